"""Hostile connections to the gRPC ports, frame by frame. Each maker gets a random generator and the maximum duration in
seconds.
"""

import re
import struct
from random import Random

from grpc_health.v1 import health_pb2

from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from tests.fuzz import http2_garbage
from tests.fuzz.connections.script import EndOutput, Flood, Reset, Script, Send, Step, UntilHeard, Wait
from tests.fuzz.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW,
    WINDOW_UPDATE,
    call,
    call_headers,
    header,
    message,
    raw_frame,
    setting,
)

HEALTH = (b"/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest().SerializeToString())
TOKENIZE = (
    b"/penstock.inference.v1.InferenceService/Tokenize",
    pb.TokenizeRequest(text="Once upon a time there was a fox").SerializeToString(),
)
GENERATE = (
    b"/penstock.inference.v1.InferenceService/Generate",
    pb.GenerateRequest(
        text="Once upon", sampling_params=SamplingParams(max_tokens=24, n=4, logprobs=5, ignore_eos=True)
    ).SerializeToString(),
)
CALLS = {"health": HEALTH, "tokenize message": TOKENIZE}
"""Calls with one known answer, by the answer's name."""
START = PREFACE + raw_frame(SETTINGS, 0, 0)
_PORTS = ("frontend",) * 7 + ("admin", "engine", "coordinator")
TRAILERS = re.compile(rb"grpc-status")
"""Pattern of trailers from gRPC servers, which do not compress the header's name."""
_CANCEL = struct.pack(">I", 8)
_MOST = 3 * 2**20
"""Bytes that a connection floods a server with."""


def _port_and_call(rng: Random) -> tuple[str, bytes, bytes, str]:
    """Return a port, a call that the port answers, and the name of the answer."""
    port = rng.choice(_PORTS)
    known = rng.choice(("health", "tokenize message")) if port == "frontend" else "health"
    return port, *CALLS[known], known


def _leave(rng: Random) -> list[Step]:
    return rng.choice(([], [Reset()], [EndOutput(), Wait(0.1)], [Send(raw_frame(GOAWAY, 0, 0, bytes(8)))]))


def silence(rng: Random, hold: float) -> Script:
    """Send the HTTP/2 preface, a part of it, or nothing. Then stay silent."""
    sent = rng.choice((b"", PREFACE[: rng.randrange(1, len(PREFACE))], PREFACE, START))
    return Script(
        "preface, then silence", rng.choice(_PORTS), [Send(sent), Wait(hold * rng.uniform(0.2, 1)), *_leave(rng)]
    )


def byte_by_byte(rng: Random, hold: float) -> Script:
    """Send a valid call in pieces of a few bytes, which must be answered, or abandon the call."""
    port, path, payload, known = _port_and_call(rng)
    raw = START + call(1, path, payload)
    piece = rng.choice((1, 1, 2, 9))
    pause = hold * rng.uniform(0.1, 0.9) * piece / len(raw)
    if rng.random() < 0.6:
        steps = [Send(raw, piece, pause), UntilHeard(TRAILERS)]
        return Script("byte by byte", port, steps, least=1, known=known)
    cut = rng.randrange(1, len(raw) - 1)
    return Script("byte by byte, given up", port, [Send(raw[:cut], piece, pause), *_leave(rng)])


def tiny_data(rng: Random, hold: float) -> Script:
    """Send a message in DATA frames of one byte with empty frames in between, either complete or endless."""
    port, path, payload, known = _port_and_call(rng)
    opened = START + raw_frame(HEADERS, END_HEADERS, 1, call_headers(path))
    if rng.random() < 0.5:
        empty = raw_frame(DATA, 0, 1) * rng.choice((0, 0, 1, 20))
        data = message(payload)
        pieces = b"".join(empty + raw_frame(DATA, 0, 1, data[i : i + 1]) for i in range(len(data)))
        steps = [Send(opened + pieces + raw_frame(DATA, END_STREAM, 1)), UntilHeard(TRAILERS)]
        return Script("tiny data of a whole message", port, steps, least=1, known=known)
    announced = struct.pack(">BI", 0, rng.choice((60_000, 2**26, 2**32 - 1)))
    one = rng.choice((raw_frame(DATA, 0, 1, b"x"), raw_frame(DATA, 0, 1), raw_frame(DATA, 8, 1, b"\0")))
    steps = [
        Send(opened + raw_frame(DATA, 0, 1, announced)),
        Flood(one * 3000, hold * rng.uniform(0.2, 1), 900_000),
        *_leave(rng),
    ]
    return Script("tiny data without end", port, steps)


def continuation_flood(rng: Random, hold: float) -> Script:
    """Send headers that never end."""
    more = rng.choice(
        (b"", header(b"a", b"b"), header(b"a", b"b") * 200, header(b"x" * 200, b"y" * 8000), b"\xff" * 90)
    )
    first = raw_frame(HEADERS, 0, 1, call_headers(HEALTH[0]))
    one = raw_frame(CONTINUATION, 0, 1, more)
    flood = Flood(one * max(1, 60_000 // len(one)), hold * rng.uniform(0.2, 0.8), _MOST if len(one) > 500 else 900_000)
    return Script("continuation flood", rng.choice(_PORTS), [Send(START + first), flood, *_leave(rng)])


def settings_flood(rng: Random, hold: float) -> Script:
    """Send valid or invalid SETTINGS frames, which the server would acknowledge."""
    entries = rng.choice(
        (b"", setting(INITIAL_WINDOW_SIZE, 0), setting(1, 0) + setting(1, 65_536), setting(5, 2**24 - 1) * 50)
    )
    one = raw_frame(SETTINGS, 0, 0, entries)
    return _control_flood("settings flood", one, rng, hold)


def ping_flood(rng: Random, hold: float) -> Script:
    """Send PING frames, which the server would answer."""
    return _control_flood("ping flood", raw_frame(PING, rng.choice((0, 0, ACK)), 0, b"pingping"), rng, hold)


def other_floods(rng: Random, hold: float) -> Script:
    """Send frames that need no answer: PRIORITY, WINDOW_UPDATE, RST_STREAM of unknown streams, and unknown frames."""
    one = rng.choice(
        (
            raw_frame(PRIORITY, 0, 1, struct.pack(">IB", 3, 16)),
            raw_frame(PRIORITY, 0, 1, struct.pack(">IB", 1, 16)),
            raw_frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)),
            raw_frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**31 - 1)),
            raw_frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 0)),
            raw_frame(RST_STREAM, 0, 1, _CANCEL),
            raw_frame(GOAWAY, 0, 0, bytes(8)),
            raw_frame(PUSH_PROMISE, END_HEADERS, 1, struct.pack(">I", 2)),
            raw_frame(99, 0xFF, 0, b"unknown"),
        )
    )
    return _control_flood("flood of other frames", one, rng, hold)


def _control_flood(kind: str, one: bytes, rng: Random, hold: float) -> Script:
    """Send frames of one kind repeatedly. The client may leave the answers unread."""
    flood = Flood(one * max(1, 40_000 // len(one)), hold * rng.uniform(0.2, 0.8), 900_000)
    steps = [Send(START), flood, Wait(hold * rng.uniform(0.0, 0.3)), *_leave(rng)]
    return Script(kind, rng.choice(_PORTS), steps, reads=rng.random() < 0.5)


def rapid_reset(rng: Random, hold: float) -> Script:
    """Open streams and reset them immediately (CVE-2023-44487)."""
    port, path, payload, _ = _port_and_call(rng)
    if port == "frontend" and rng.random() < 0.3:
        path, payload = GENERATE
    count = rng.choice((20, 200, 1000, 3000))
    whole = rng.random() < 0.5
    streams = []
    for number in range(count):
        stream = 2 * number + 1
        opened = call(stream, path, payload) if whole else raw_frame(HEADERS, END_HEADERS, stream, call_headers(path))
        streams.append(opened + raw_frame(RST_STREAM, 0, stream, _CANCEL))
    steps = [Send(START + b"".join(streams)), Wait(hold * rng.uniform(0.0, 0.5)), *_leave(rng)]
    return Script("rapid reset", port, steps)


def no_window(rng: Random, hold: float) -> Script:
    """Request large answers with no flow-control window, or with a small one."""
    window = rng.choice((0, 0, 1, 100))
    start = PREFACE + raw_frame(SETTINGS, 0, 0, setting(INITIAL_WINDOW_SIZE, window))
    count = rng.choice((1, 3, 10))
    calls = b"".join(call(2 * number + 1, *GENERATE) for number in range(count))
    steps = [Send(start + calls), Wait(hold * rng.uniform(0.2, 1)), *_leave(rng)]
    return Script("no window", "frontend", steps, window=window * count)


def never_reads(rng: Random, hold: float) -> Script:
    """Request large answers with a large flow-control window, and do not read them."""
    start = PREFACE + raw_frame(SETTINGS, 0, 0, setting(INITIAL_WINDOW_SIZE, 2**31 - 1))
    start += raw_frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**31 - 1 - WINDOW))
    count = rng.choice((1, 4, 10))
    calls = b"".join(call(2 * number + 1, *GENERATE) for number in range(count))
    steps = [Send(start + calls), Wait(hold * rng.uniform(0.2, 1)), *_leave(rng)]
    return Script("never reads (gRPC)", "frontend", steps, reads=False)


def huge_metadata(rng: Random, hold: float) -> Script:
    """Send many kilobytes of headers, as many headers or as large headers, in one or several frames."""
    port, path, payload, _ = _port_and_call(rng)
    size = rng.choice((4_000, 15_000, 60_000, 100_000, 900_000))
    more = rng.choice(
        (
            [(b"x-huge", b"h" * size)],
            [(b"x-%d" % i, b"v" * 20) for i in range(size // 30)],
            [(b"x-bin-bin", b"\xff" * size)],
            [(b"x" * size, b"v")],
        )
    )
    block = call_headers(path, more)
    parts = [block[at : at + 16_384] for at in range(0, len(block), 16_384)]
    raw = raw_frame(HEADERS, END_HEADERS if len(parts) == 1 else 0, 1, parts[0])
    for number, part in enumerate(parts[1:], 2):
        raw += raw_frame(CONTINUATION, END_HEADERS if number == len(parts) else 0, 1, part)
    raw += raw_frame(DATA, END_STREAM, 1, message(payload))
    steps = [Send(START + raw), Wait(hold * rng.uniform(0.1, 0.4)), *_leave(rng)]
    return Script("huge metadata", port, steps)


def half_closed(rng: Random, hold: float) -> Script:
    """Make calls that are never half-closed, or shut down the sending side of the connection."""
    port, path, payload, _ = _port_and_call(rng)
    if port == "frontend":
        path, payload = rng.choice((TOKENIZE, GENERATE, (path, payload)))
    count = rng.choice((1, 1, 5, 50))
    ends = rng.random() < 0.3
    calls = b"".join(call(2 * number + 1, path, payload, ends=ends) for number in range(count))
    steps: list[Step] = [Send(START + calls), Wait(hold * rng.uniform(0.1, 0.7)), *_leave(rng)]
    if rng.random() < 0.6:
        steps.insert(1, EndOutput())
    return Script("half closed (gRPC)", port, steps)


def cut_off(rng: Random, hold: float) -> Script:
    """End the connection during a call or during its answer."""
    port, path, payload, _ = _port_and_call(rng)
    if port == "frontend" and rng.random() < 0.5:
        path, payload = GENERATE
    raw = START + call(1, path, payload)
    if rng.random() < 0.6:
        raw = raw[: rng.randrange(1, len(raw))]
        return Script("cut off in a call", port, [Send(raw), Wait(hold * rng.choice((0.0, 0.05))), *_leave(rng)])
    steps = [Send(raw), Wait(hold * rng.choice((0.0, 0.005, 0.02, 0.1))), *_leave(rng)]
    return Script("cut off in an answer", port, steps)


def many_streams(rng: Random, hold: float) -> Script:
    """Make hundreds of calls on one connection, more than its limit of concurrent streams."""
    port, path, payload, _ = _port_and_call(rng)
    count = rng.choice((50, 300, 1500))
    waits = rng.random() < 0.5  # the calls wait for messages that never arrive
    streams = (
        raw_frame(HEADERS, END_HEADERS, 2 * n + 1, call_headers(path)) if waits else call(2 * n + 1, path, payload)
        for n in range(count)
    )
    steps = [Send(START + b"".join(streams)), Wait(hold * rng.uniform(0.1, 0.6)), *_leave(rng)]
    return Script("many streams", port, steps)


def broken_messages(rng: Random, hold: float) -> Script:
    """Send messages with a wrong length, an unknown compression, or contradictory frames."""
    port, path, payload, _ = _port_and_call(rng)
    opened = START + raw_frame(HEADERS, END_HEADERS, 1, call_headers(path))
    raw = rng.choice(
        (
            raw_frame(DATA, END_STREAM, 1, struct.pack(">BI", 0, 2**32 - 1)),
            raw_frame(DATA, 0, 1, struct.pack(">BI", 0, 2**26) + bytes(100)),
            raw_frame(DATA, END_STREAM, 1, struct.pack(">BI", 1, len(payload)) + payload),
            raw_frame(DATA, END_STREAM, 1, message(payload) * 3),
            raw_frame(DATA, END_STREAM, 1, b"\xff" * 300),
            raw_frame(DATA, 0, 3, message(payload)),
            raw_frame(DATA, 8, 1, b"\xff"),
            raw_frame(DATA, 0, 1, bytes(16_384))[:-1],
            b"\xff\xff\xff" + raw_frame(DATA, 0, 1, b"x")[3:] + bytes(1000),
            raw_frame(HEADERS, END_HEADERS, 1, call_headers(path)) * 20,
            raw_frame(HEADERS, END_HEADERS, 2, call_headers(path)),
            raw_frame(HEADERS, END_HEADERS, 3, rng.randbytes(40)),
        )
    )
    return Script("broken messages", port, [Send(opened + raw), Wait(hold * rng.uniform(0.05, 0.4)), *_leave(rng)])


def garbage(rng: Random, hold: float) -> Script:
    """Send bytes that are not HTTP/2, or frames in random order."""
    sent = http2_garbage.garbage(rng)
    return Script("garbage", rng.choice(_PORTS), [Send(sent), Wait(hold * rng.uniform(0.0, 0.3)), *_leave(rng)])


MAKERS = {
    silence: 5.0,
    byte_by_byte: 8.0,
    tiny_data: 7.0,
    continuation_flood: 7.0,
    settings_flood: 5.0,
    ping_flood: 5.0,
    other_floods: 6.0,
    rapid_reset: 8.0,
    no_window: 7.0,
    never_reads: 4.0,
    huge_metadata: 7.0,
    half_closed: 7.0,
    cut_off: 9.0,
    many_streams: 5.0,
    broken_messages: 6.0,
    garbage: 4.0,
}
"""Weights of the scripts."""

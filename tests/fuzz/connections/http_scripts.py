"""Hostile connections to the HTTP port. Each maker gets a random generator and the maximum duration in seconds."""

import json
import re
from collections.abc import Sequence
from random import Random

from tests.fuzz.connections.framing import smuggling
from tests.fuzz.connections.script import (
    CLIENT_ERRORS,
    EndOutput,
    Flood,
    Reset,
    Script,
    Send,
    Step,
    UntilClosed,
    UntilHeard,
    Wait,
)

TOKENIZE = b'{"prompt":"Once upon a time there was a fox"}'
_STREAM = json.dumps({"prompt": "Once upon", "max_tokens": 24, "stream": True, "ignore_eos": True}).encode()
_MANY = json.dumps({"prompt": ["a", "b"], "n": 4, "max_tokens": 24, "logprobs": 3, "stream": True}).encode()
_ANSWER = re.compile(rb"HTTP/1\.1 [2-5]\d\d")
_CLOSE = b"connection: close\r\n"
_SLOW = frozenset({200, 408})
"""Allowed statuses for slow clients. A frontend refuses clients that exceed its timeouts."""
_TOO_LARGE = 10**10
"""Size in bytes of a body that every frontend refuses."""
_MOST = 3 * 2**20
"""Bytes that a connection floods a server with."""
_MOST_CHUNKS = 400_000
"""Maximum bytes of tiny chunks, which are about 60 000 chunks."""


def head(method: bytes, path: bytes, headers: bytes = b"") -> bytes:
    """Return a request without its body. Lines of ``headers`` end with CR LF."""
    return method + b" " + path + b" HTTP/1.1\r\nhost: localhost\r\n" + headers + b"\r\n"


def post(path: bytes, body: bytes, headers: bytes = b"") -> bytes:
    """Return a complete request with a JSON body."""
    length = f"content-length: {len(body)}\r\n".encode()
    return head(b"POST", path, b"content-type: application/json\r\n" + length + headers) + body


def _chunked_head(path: bytes = b"/tokenize", headers: bytes = b"") -> bytes:
    return head(b"POST", path, b"content-type: application/json\r\ntransfer-encoding: chunked\r\n" + headers)


def _leave(rng: Random) -> list[Step]:
    """Return the steps with which a client ends its connection."""
    return rng.choice(([], [Reset()], [EndOutput(), Wait(0.1)]))


def tiny_chunks_without_end(rng: Random, hold: float) -> Script:
    """Send endless chunks of one byte, some of them with extensions."""
    extension = rng.choice((b"", b"", b";a=b", b';a="' + b"q" * 50 + b'"', b";" + b"x" * 500, b";" * 100))
    size = rng.choice((b"1", b"1", b"0001", b"0" * 15 + b"1"))
    chunk = size + extension + b"\r\n \r\n"
    flood = Flood(chunk * max(1, 40_000 // len(chunk)), hold * rng.uniform(0.3, 1), _MOST_CHUNKS)
    return Script("tiny chunks without end", "http", [Send(_chunked_head()), flood, *_leave(rng)])


def tiny_chunks_of_a_whole_body(rng: Random, hold: float) -> Script:
    """Send a valid body with each byte in a separate chunk, with extensions and trailers."""
    extension = rng.choice((b"", b";a=b", b";a=b;c"))
    chunks = b"".join(b"1" + extension + b"\r\n" + TOKENIZE[i : i + 1] + b"\r\n" for i in range(len(TOKENIZE)))
    trailers = rng.choice((b"", b"", b"x-trailer: a\r\n", b"x-trailer: a\r\nx-other: b\r\n"))
    body = chunks + b"0\r\n" + trailers + b"\r\n"
    piece = rng.choice((1, 3, 7, len(body)))
    pause = 0.0 if piece == len(body) else hold * rng.uniform(0.1, 0.6) * piece / len(body)
    sent = [Send(_chunked_head(headers=_CLOSE)), Send(body, piece, pause)]
    return Script("tiny chunks of a whole body", "http", [*sent, UntilClosed()], known="tokenize", least=1)


def broken_chunks(rng: Random, hold: float) -> Script:
    """Send chunks with invalid, too large or endless sizes, with a wrong length, or with endless trailers."""
    whole = f"{len(TOKENIZE):x}\r\n".encode() + TOKENIZE + b"\r\n"
    broken: bytes = rng.choice(
        (
            b"zz\r\n",
            b"-1\r\na\r\n",
            b"+1\r\na\r\n",
            b"0x1\r\na\r\n",
            b"1 \r\na\r\n",
            b"fffffffffffffffff\r\na",
            b"7fffffffffffffff\r\na",
            b"f" * 4000,
            b"1\r\nab\r\n",
            b"1\r\na",
            b"1\na\n0\n\n",
            b"1;" + b"x" * 200_000,
            b"\r\n\r\n",
            whole + b"0\r\n" + b"x: y\r\n" * 3000,
            whole + b"0\r\nx: " + b"y" * 200_000,
            whole + b"0\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        )
    )
    steps = [Send(_chunked_head()), Send(broken), Wait(hold * rng.uniform(0.1, 0.5)), *_leave(rng)]
    return Script("broken chunks", "http", steps)


def slow_body(rng: Random, hold: float) -> Script:
    """Send a body one byte at a time, either completely, or abandoned."""
    body, seconds = TOKENIZE, hold * rng.uniform(0.2, 1)
    whole = rng.random() < 0.5
    cut = len(body) if whole else rng.randrange(1, len(body))
    sent = post(b"/tokenize", body, _CLOSE)
    middle = len(sent) - len(body)
    steps: list[Step] = [Send(sent[:middle]), Send(sent[middle : middle + cut], 1, seconds / len(body))]
    if whole:
        return Script("slow body", "http", [*steps, UntilClosed()], least=1, allowed=_SLOW, known="tokenize")
    return Script("slow body", "http", [*steps, *_leave(rng)])


def many_headers(rng: Random, hold: float) -> Script:
    """Send tens to thousands of headers."""
    count = rng.choice((50, 90, 200, 1000, 3000))
    lines = b"".join(b"x-%d: %s\r\n" % (i, b"v" * rng.choice((0, 1, 30))) for i in range(count))
    return Script("many headers", "http", [Send(head(b"GET", b"/ping", lines + _CLOSE)), UntilClosed()])


def long_lines(rng: Random, hold: float) -> Script:
    """Send a long or endless header, path or method."""
    size = rng.choice((4_000, 16_000, 70_000, 300_000, 1_000_000))
    raw = rng.choice(
        (
            head(b"GET", b"/ping", b"x-long: " + b"v" * size + b"\r\n" + _CLOSE),
            head(b"GET", b"/ping", b"x" * size + b": v\r\n" + _CLOSE),
            head(b"GET", b"/ping?" + b"q" * size, _CLOSE),
            head(b"G" * size, b"/ping", _CLOSE),
            b"GET /ping HTTP/1.1\r\nhost: localhost\r\nx-endless: " + b"v" * size,
            b"GET /" + b"p" * size,
        )
    )
    ends: list[Step] = [UntilClosed()] if raw.endswith(b"\r\n\r\n") else [Wait(hold * 0.3), *_leave(rng)]
    return Script("long lines", "http", [Send(raw, 2**14), *ends])


def headers_byte_by_byte(rng: Random, hold: float) -> Script:
    """Send the headers of a request byte by byte, either completely, or abandoned."""
    raw = head(b"GET", b"/ping", b"x-a: " + b"b" * rng.randrange(60) + b"\r\n" + _CLOSE)
    whole = rng.random() < 0.5
    seconds = hold * rng.uniform(0.2, 0.9)
    sent = Send(raw if whole else raw[: rng.randrange(1, len(raw) - 2)], 1, seconds / len(raw))
    if whole:
        steps: list[Step] = [sent, UntilClosed()]
        return Script("headers byte by byte", "http", steps, least=1, allowed=_SLOW, known="ping")
    return Script("headers byte by byte", "http", [sent, *_leave(rng)])


def pipelined(rng: Random, hold: float) -> Script:
    """Send two to thousands of complete requests in one write. All of them must be answered in order."""
    count = rng.choice((2, 3, 10, 30, 100)) if rng.random() < 0.97 else 3000
    known = rng.choice(("ping", "tokenize")) if count <= 30 else "ping"
    one, last = (
        (post(b"/tokenize", TOKENIZE), post(b"/tokenize", TOKENIZE, _CLOSE))
        if known == "tokenize"
        else (head(b"GET", b"/ping"), head(b"GET", b"/ping", _CLOSE))
    )
    piece = rng.choice((2**16, 2**16, 700))
    sent = Send(one * (count - 1) + last, piece, 0.001 if piece < 2**16 else 0.0)
    steps = [sent, UntilClosed()]
    return Script("pipelined", "http", steps, most=count, least=count, allowed=frozenset({200}), known=known)


def half_pipelined(rng: Random, hold: float) -> Script:
    """Send several requests in one write. The last one is incomplete, or the client does not wait for the answers."""
    count = rng.choice((1, 5, 50, 400))
    one = rng.choice((head(b"GET", b"/ping"), post(b"/tokenize", TOKENIZE), post(b"/v1/completions", _STREAM)))
    count = min(count, 5) if b"completions" in one else count
    raw = one * count + one[: rng.randrange(1, len(one))]
    steps = [Send(raw), Wait(hold * rng.uniform(0.0, 0.5)), *_leave(rng)]
    return Script("half pipelined", "http", steps, most=count + 1)


def half_closed(rng: Random, hold: float) -> Script:
    """Shut down the sending side after the headers, during the body, or after the request.

    The client may still read.
    """
    path, body = rng.choice(((b"/tokenize", TOKENIZE), (b"/v1/completions", _STREAM)))
    raw = post(path, body)
    start = len(raw) - len(body)
    cut = rng.choice((rng.randrange(1, start), start, rng.randrange(start + 1, len(raw)), len(raw), len(raw)))
    steps: list[Step] = [Send(raw[:cut]), EndOutput(), Wait(hold * rng.uniform(0.05, 0.5))]
    return Script("half closed", "http", steps, reads=rng.random() < 0.6)


def reset_anywhere(rng: Random, hold: float) -> Script:
    """Send a valid request and reset the connection after a random byte of the request or of the answer."""
    raw = rng.choice(
        (
            post(b"/tokenize", TOKENIZE),
            post(b"/v1/completions", _STREAM),
            post(b"/v1/completions", _MANY),
            head(b"GET", b"/metrics"),
            _chunked_head() + b"5\r\n" + TOKENIZE[:5] + b"\r\n",
        )
    )
    if rng.random() < 0.5:
        return Script("reset in the request", "http", [Send(raw[: rng.randrange(len(raw) + 1)]), Reset()])
    steps: list[Step] = [Send(raw), Wait(hold * rng.choice((0.0, 0.005, 0.02, 0.1))), Reset()]
    return Script("reset in the answer", "http", steps, reads=rng.random() < 0.5)


def idle(rng: Random, hold: float) -> Script:
    """Keep a connection open after an answer. A second request may follow after a pause."""
    ping, known = head(b"GET", b"/ping"), "ping"
    steps: list[Step] = [Send(ping), UntilHeard(_ANSWER), Wait(hold * rng.uniform(0.1, 1))]
    if rng.random() < 0.5:
        steps += [Send(head(b"GET", b"/ping", _CLOSE)), UntilClosed()]
        return Script("idle between requests", "http", steps, most=2, least=2, allowed=frozenset({200}), known=known)
    return Script("idle after a request", "http", [*steps, *_leave(rng)], least=1, known=known)


def refused_body(rng: Random, hold: float) -> Script:
    """Send a body while the server already refuses the headers.

    The body is too large, or the path, the key or the content type is wrong.
    """
    why, headers, path, port = rng.choice(
        (
            (413, f"content-length: {_TOO_LARGE}\r\n", b"/v1/completions", "http"),
            (404, f"content-length: {_MOST}\r\n", b"/v1/nothing", "http"),
            (404, "transfer-encoding: chunked\r\n", b"/v1/nothing", "http"),
            (405, f"content-length: {_MOST}\r\n", b"/health", "http"),
            (401, f"content-length: {_MOST}\r\n", b"/v1/completions", "guarded"),
            (401, "transfer-encoding: chunked\r\n", b"/v1/completions", "guarded"),
            (401, f"content-length: {_MOST}\r\nauthorization: Bearer wrong\r\n", b"/tokenize", "guarded"),
            (415, f"content-length: {_MOST}\r\ncontent-type: text/plain\r\n", b"/v1/completions", "http"),
        )
    )
    chunked = "chunked" in headers
    piece = rng.choice((b"1\r\n \r\n" * 2000, b"fff\r\n" + b" " * 0xFFF + b"\r\n")) if chunked else b" " * 2**14
    if why != 415:
        headers += "content-type: application/json\r\n"
    if rng.random() < 0.3:
        headers += "expect: 100-continue\r\n"
    most = min(_MOST_CHUNKS, _MOST) if chunked else _MOST
    flood = Flood(piece, hold * rng.uniform(0.1, 0.6), most)
    # Other routes refuse content types with a different status, and a reset of the connection may lose an answer.
    steps = [Send(head(b"POST", path, headers.encode())), flood, Wait(0.1), *_leave(rng)]
    return Script(f"refused body {why}", port, steps, allowed=CLIENT_ERRORS)


def never_continued(rng: Random, hold: float) -> Script:
    """Send ``Expect: 100-continue``, and then no body or only a part of the body."""
    length = rng.choice((1, len(TOKENIZE), 10**6))
    headers = f"content-type: application/json\r\ncontent-length: {length}\r\nexpect: 100-continue\r\n".encode()
    part = rng.choice((b"", b"", TOKENIZE[: length // 2][:20]))
    steps = [Send(head(b"POST", b"/tokenize", headers) + part), Wait(hold * rng.uniform(0.1, 1)), *_leave(rng)]
    return Script("never continued", "http", steps, allowed=CLIENT_ERRORS)


def never_reads(rng: Random, hold: float) -> Script:
    """Request many answers, large answers or a stream, and do not read them."""
    raw = rng.choice(
        (
            head(b"GET", b"/openapi.json") * rng.choice((1, 20, 60)),
            head(b"GET", b"/metrics") * rng.choice((1, 20)),
            head(b"GET", b"/ping") * 2000,
            post(b"/v1/completions", _MANY) * rng.choice((1, 3)),
        )
    )
    flood = rng.random() < 0.3
    steps: list[Step] = [Send(raw), Wait(hold * rng.uniform(0.2, 1))]
    if flood:
        steps.insert(1, Flood(head(b"GET", b"/ping") * 200, hold * 0.3, 200_000))
    return Script("never reads", "http", [*steps, *_leave(rng)], reads=False)


def silent(rng: Random, hold: float) -> Script:
    """Send nothing, empty lines, or a different protocol."""
    raw = rng.choice(
        (
            b"",
            b"",
            b"\r\n" * 2000,
            b"\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(50),
            rng.randbytes(rng.choice((1, 100, 10_000))),
        )
    )
    return Script("silent or no HTTP", "http", [Send(raw), Wait(hold * rng.uniform(0.1, 1)), *_leave(rng)], most=9)


def ambiguous(rng: Random, hold: float) -> Script:
    """Send a request whose end is ambiguous between servers. It must not be read as two requests."""
    name, raw, allowed = smuggling(rng)
    steps: Sequence[Step] = [Send(raw, rng.choice((2**16, 2**16, 40)), 0.001), Wait(hold * 0.3), *_leave(rng)]
    return Script(f"ambiguous: {name}", "http", steps, allowed=allowed)


MAKERS = {
    tiny_chunks_without_end: 5.0,
    tiny_chunks_of_a_whole_body: 5.0,
    broken_chunks: 5.0,
    slow_body: 8.0,
    many_headers: 5.0,
    long_lines: 5.0,
    headers_byte_by_byte: 6.0,
    pipelined: 6.0,
    half_pipelined: 6.0,
    half_closed: 9.0,
    reset_anywhere: 14.0,
    idle: 7.0,
    refused_body: 9.0,
    never_continued: 4.0,
    never_reads: 5.0,
    silent: 4.0,
    ambiguous: 10.0,
}
"""Weights of the scripts."""

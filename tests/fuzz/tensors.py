"""Invalid transfers of prompt tensors: ``python -m tests.fuzz.tensors [COUNT] [SEED]``.

A sequence has the messages of one frontend for some tensors and the requests that refer to them. Chunks come in order,
out of order, twice, too many, abandoned, late, or above the session's limit. Shared-memory segments are valid,
truncated, missing or foreign. References have any size, shape and type. Valid tensors must arrive complete, with the
same answer as alone. All others must fail only their own request, with an error that names the field, and must leak
nothing.
"""

import asyncio
import contextlib
import os
import random
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.common.v1 import tensor_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.config.sections import ServerConfig
from penstock_common.tensors.chunks import STALE_AFTER
from penstock_common.tensors.shared_memory import ROOT, SegmentWriter, owner_of
from penstock_common.types.request import EngineCoreRequest
from tests.fakes.clients.session_client import SessionClient, connected
from tests.fakes.engines.engine_harness import FakeClock, make_config
from tests.fakes.engines.engine_server import EngineServer, wait_until
from tests.fakes.engines.fake_executor import FakeExecutor, oracle_tokens

AT_FAULT = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS"})
VOCAB, HIDDEN, TOKENS = 1000, 4, 2
ROW_BYTES = HIDDEN * 4
MAX_BYTES = 16 * 1024
"""Limit for tensors in flight of a hostile session, in bytes."""
NUM_SESSIONS = 8
HARM = ("gap", "twice", "swapped", "shifted", "cut", "more", "abandoned", "stale", "too much", "empty", "behind")
REFERENCES = ("smaller", "larger", "huge", "shape", "dtype", "flat", "unknown", "width")


class Wrong(Exception):  # noqa: N818 - what it is
    """Raised if an engine violates a rule."""


class Sent:
    """A tensor as sent by a session. ``data`` is its intended content; ``came`` is the content received in order, or
    None once it is invalid.
    """

    def __init__(self, drawn: random.Random, transfer_id: int) -> None:
        self.num_rows = drawn.randint(1, 40)
        self.transfer_id = transfer_id
        self.data = struct.pack(f"<{self.num_rows * HIDDEN}f", *(drawn.random() for _ in range(self.num_rows * HIDDEN)))
        self.came: bytes | None = b""
        self.harm = drawn.choice(HARM) if drawn.random() < 0.6 else ""
        self.pieces = self._pieces(drawn)

    def _pieces(self, drawn: random.Random) -> list[tuple[int, bytes]]:
        cuts = sorted(drawn.sample(range(1, len(self.data)), drawn.randint(0, min(4, len(self.data) - 1))))
        starts = [0, *cuts]
        pieces = [(s, self.data[s:e]) for s, e in zip(starts, [*cuts, len(self.data)], strict=True)]
        place = drawn.randrange(len(pieces))
        match self.harm:
            case "gap":
                del pieces[place]
            case "twice":
                pieces.insert(place, pieces[place])
            case "swapped":
                pieces.insert(0, pieces.pop(place))
            case "shifted":
                offset, data = pieces[place]
                pieces[place] = ((offset + drawn.choice((1, -1, 2**32, 2**63))) % 2**64, data)
            case "cut":
                pieces[-1] = (pieces[-1][0], pieces[-1][1][:-1])
            case "more":
                pieces.append((len(self.data), b"more"))
            case "too much":
                pieces.append((len(self.data), bytes(MAX_BYTES + 1)))
            case "empty":
                pieces.insert(place, (pieces[place][0], b""))
        return pieces

    def take(self, offset: int, data: bytes) -> None:
        """Apply a piece, as the receiver must do."""
        if self.came is not None:
            self.came = self.came + data if offset == len(self.came) and len(data) <= MAX_BYTES else None


class Campaign:
    """Campaign. ``ends`` counts the results of requests by code and by the field in errors."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.ends: Counter[str] = Counter()
        self.num_sequences = 0
        self._received: dict[str, EngineCoreRequest] = {}

    def run(self, count: int) -> None:
        """Run the campaign. Raises Wrong."""
        with self._served() as server:
            asyncio.run(self._attack(server, count))
            wait_until(lambda: not server.engine.has_requests and not len(server.io.sessions))
            pool = server.engine.scheduler.kv_cache.pool
            if pool.num_free_blocks != pool.num_usable_blocks:
                raise Wrong("blocks were not given back")
        if wrong := {end for end in self.ends if end.split()[0] in AT_FAULT}:
            raise Wrong(f"requests ended with {sorted(wrong)}")

    @contextlib.contextmanager
    def _served(self) -> Iterator[EngineServer]:
        config = msgspec.structs.replace(
            make_config(num_blocks=4000, max_num_batched_tokens=1024), server=ServerConfig(host="127.0.0.1")
        )
        server = EngineServer(config, FakeExecutor(vocab_size=VOCAB, check_kv=False)).start().load()
        add = server.busy_loop.add

        def noting(client_id: str, request: EngineCoreRequest) -> None:
            self._received[request.request_id] = request
            add(client_id, request)

        server.busy_loop.add = noting  # type: ignore[method-assign]
        try:
            yield server
        finally:
            server.stop()

    async def _attack(self, server: EngineServer, count: int) -> None:
        with contextlib.closing(Segments()) as segments:
            await self._beside_a_neighbour(server, count, segments)

    async def _beside_a_neighbour(self, server: EngineServer, count: int, segments: "Segments") -> None:
        async with connected(server.address, "neighbour") as neighbour:
            sessions = [self._session(server, first, count, segments) for first in range(NUM_SESSIONS)]
            attack = asyncio.gather(*sessions)
            number = 0
            while not attack.done():
                await self._is_served(neighbour, number)
                number += 1
            await attack

    async def _session(self, server: EngineServer, first: int, count: int, segments: "Segments") -> None:
        """Run every eighth sequence. A stream has two hundred sequences."""
        numbers = iter(range(first, count, NUM_SESSIONS))
        for stream in range(count):
            name = f"hostile-{first}-{stream}"
            async with connected(server.address, name) as client:
                opened = list(server.io.sessions._sessions.items())
                tensors = next(each.prompts.tensors for key, each in opened if key.startswith(f"{name}#"))
                tensors._clock, tensors._max_bytes = clock, _ = FakeClock(), MAX_BYTES
                for _ in range(200):
                    if (number := next(numbers, None)) is None:
                        return
                    await self._sequence(client, number, clock, segments)
                    if tensors.num_bytes or len(tensors):
                        raise Wrong(f"sequence {number}: {tensors.num_bytes} bytes were left")
                    server.executor.steps.clear()  # type: ignore[attr-defined]

    async def _sequence(self, client: SessionClient, number: int, clock: FakeClock, segments: "Segments") -> None:
        drawn = random.Random(f"{self.seed} {number}")
        sent = [Sent(drawn, number * 4 + place + 1) for place in range(drawn.choice((1, 1, 2, 3)))]
        await self._chunks(client, drawn, sent, clock)
        expected: dict[str, tuple[str, bytes | None]] = {}
        named: list[str] = []
        for each in sent:
            for time in range(drawn.choice((1, 1, 2))):
                name = f"{number}-{each.transfer_id}-{time}"
                tensor, data = self._reference(drawn, each, segments)
                named.append(tensor.shared_memory.name)
                expected[name] = each.harm, data
                await client.add(name, prompt=(), prompt_embeds=tensor, seed=number, max_tokens=TOKENS)
                if tensor.chunks.transfer_id == each.transfer_id and not tensor.chunks.keep:
                    each.came = None
            if each.harm == "behind" and each.came is not None:
                await client._send(chunk(each, len(each.came), b"behind"))
        await client.until_ended(*expected)
        for name, (harm, data) in expected.items():
            self._check(client, name, number, harm, data)
        for each in sent:  # unused tensors are abandoned or dropped
            if drawn.random() < 0.5:
                await client._send(chunk(each, 0, b"", abandoned=True))
        await client.utility("is_sleeping")
        clock.now += STALE_AFTER + 1
        await client._send(pb.SessionRequest(tensor_chunk=tensor_pb2.TensorChunk(transfer_id=2**63)))
        await client._send(pb.SessionRequest(tensor_chunk=tensor_pb2.TensorChunk(transfer_id=2**63, abandoned=True)))
        await client.utility("is_sleeping")
        segments.were_read(named)
        self.num_sequences += 1

    async def _chunks(self, client: SessionClient, drawn: random.Random, sent: list[Sent], clock: FakeClock) -> None:
        """Send the chunks of all tensors in turn."""
        left = [each for each in sent for _ in each.pieces]
        drawn.shuffle(left)
        done: Counter[int] = Counter()
        for each in left:
            offset, data = each.pieces[done[each.transfer_id]]
            done[each.transfer_id] += 1
            await client._send(chunk(each, offset, data))
            each.take(offset, data)
            if each.harm == "abandoned" and drawn.random() < 0.5:
                await client._send(chunk(each, 0, b"", abandoned=True))
                each.came = b""
        if any(each.harm == "stale" for each in sent):
            await client.utility("is_sleeping")
            clock.now += STALE_AFTER + 1
            for each in sent:
                each.came = None

    def _reference(
        self, drawn: random.Random, sent: Sent, segments: "Segments"
    ) -> tuple[tensor_pb2.Tensor, bytes | None]:
        """Return a request's tensor and its expected content, or None if it must be refused."""
        tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[sent.num_rows, HIDDEN])
        kind = drawn.choice(("chunks", "chunks", "chunks", "shared_memory", "inline"))
        data: bytes | None = sent.data
        size = len(sent.data)
        wrong = drawn.choice(REFERENCES) if drawn.random() < 0.3 else ""
        if wrong:
            data = None
        size = {"smaller": size - 1, "larger": size + 1, "huge": 2**62}.get(wrong, size)
        match kind:
            case "chunks":
                transfer_id = 2**62 if wrong == "unknown" else sent.transfer_id
                tensor.chunks.transfer_id, tensor.chunks.size = transfer_id, size
                tensor.chunks.keep = drawn.random() < 0.3
                if sent.came != sent.data:
                    data = None
            case "shared_memory":
                name, sound = segments.make(drawn, sent.data)
                tensor.shared_memory.name = "penstock-unknown" if wrong == "unknown" else name
                tensor.shared_memory.size = size
                data = data if sound else None
            case "inline":
                tensor.inline = sent.data[:-1] if wrong in ("smaller", "larger", "huge", "unknown") else sent.data
        match wrong:
            case "shape":
                tensor.shape[0] += 1
            case "flat":
                del tensor.shape[1]
            case "dtype":
                tensor.dtype = tensor_pb2.DataType.ValueType(drawn.choice((0, 4, 6, 77)))
            case "width":
                tensor.shape[:] = [sent.num_rows * 2, HIDDEN // 2]
        return tensor, data

    def _check(self, client: SessionClient, name: str, number: int, harm: str, data: bytes | None) -> None:
        end, received = client.ends.pop(name), self._received.pop(name, None)
        error, tokens = end.error, client.tokens.pop(name)
        self.ends[f"{error.code} {error.reason}" if end.HasField("error") else "OK"] += 1
        del client.outputs[name], client.events[name]
        what = f"sequence {number} ({harm or 'sound'}), request {name}"
        if data is None:
            if not end.HasField("error"):
                raise Wrong(f"{what}: it was answered")
            if not error.field.startswith("prompt_embeds") or not error.message:
                raise Wrong(f"{what}: {error.field!r} is named: {error.message}")
            return
        if end.HasField("error"):
            raise Wrong(f"{what}: {error.code}: {error.message}")
        if received is None or received.prompt_embeds is None or bytes(received.prompt_embeds.data) != data:
            raise Wrong(f"{what}: other bytes have come")
        if tokens != oracle_tokens(number, TOKENS, VOCAB):
            raise Wrong(f"{what}: other tokens have come")

    async def _is_served(self, neighbour: SessionClient, number: int) -> None:
        drawn, name = random.Random(number), f"neighbour-{number}"
        sent = Sent(drawn, number + 1)
        for start in range(0, len(sent.data), 100):
            await neighbour._send(chunk(sent, start, sent.data[start : start + 100]))
        tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[sent.num_rows, HIDDEN])
        tensor.chunks.transfer_id, tensor.chunks.size = sent.transfer_id, len(sent.data)
        await neighbour.add(name, prompt=(), prompt_embeds=tensor, seed=number, max_tokens=TOKENS)
        await neighbour.until_ended(name)
        self._check(neighbour, name, number, "neighbour", sent.data)


class Segments:
    """Shared-memory segments of the attacking frontends, which are one process, and of another process."""

    def __init__(self) -> None:
        self._own, self._other = SegmentWriter(""), SegmentWriter("another")

    def make(self, drawn: random.Random, data: bytes) -> tuple[str, bool]:
        """Return a segment, and whether the segment is valid."""
        kind = drawn.choice(("sound", "sound", "cut", "gone", "other", "path", "link"))
        if kind == "path":
            return drawn.choice(("/etc/passwd", "../x", "", "penstock-" + "0" * 32 + "-0")), False
        writer = self._other if kind == "other" else self._own
        name = self._write(writer, data[:-1] if kind == "cut" else data)
        if kind in ("gone", "link"):
            (ROOT / name).unlink()
        if kind == "link":
            (ROOT / name).symlink_to("/etc/passwd")
        return name, kind == "sound"

    def _write(self, writer: SegmentWriter, data: bytes) -> str:
        writer.remove_old()
        if (ref := writer.write(data)) is None:
            raise Wrong("shared memory cannot be written")
        return ref.name

    def were_read(self, names: list[str]) -> None:
        """Check segments that requests have named.

        Raises Wrong if an engine has not removed a segment of its session, or has removed a foreign segment.
        """
        for name in names:
            if name.startswith(f"penstock-{owner_of('')}-") and os.path.lexists(ROOT / name):
                raise Wrong(f"segment {name} was left")
            if name in self._other:
                if not (ROOT / name).exists():
                    raise Wrong(f"segment {name} of another process is gone")
                self._other.remove(name)

    def close(self) -> None:
        self._own.close()
        self._other.close()


def chunk(sent: Sent, offset: int, data: bytes, **more: Any) -> pb.SessionRequest:
    """Return the message of a chunk."""
    piece = tensor_pb2.TensorChunk(transfer_id=sent.transfer_id, offset=offset, data=data, **more)
    return pb.SessionRequest(tensor_chunk=piece)


if __name__ == "__main__":
    campaign = Campaign(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    campaign.run(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
    print(f"{campaign.num_sequences} sequences, requests ended: {dict(campaign.ends.most_common())}")

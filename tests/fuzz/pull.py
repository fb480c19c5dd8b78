"""Pulls with a hostile peer: ``python -m tests.fuzz.pull [COUNT] [SEED]``.

Half of the streams go to an engine with blocks, from a client that sends any messages. The others go from an engine
that wants blocks to a server that answers anything. Each engine must continue to serve a peer that keeps to the
protocol, and end each stream and fetch once. It must not accept incomplete bytes, leak a lease, block, task or slot, or
answer with a code that means an internal error.
"""

import asyncio
import contextlib
import random
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc

from penstock.common.v1 import tensor_pb2
from penstock.kvtransfer.v1 import messages_pb2 as pb
from penstock.kvtransfer.v1 import service_pb2_grpc
from penstock_common.rpc.interceptor import CallEnd
from penstock_common.types.kv_transfer import BlockName, KvSource
from tests.fakes.kv_engines import FINGERPRINT, FakeKvEngine, content, names_of

AT_FAULT = frozenset({"INTERNAL", "UNKNOWN", "UNIMPLEMENTED", "DATA_LOSS"})
NAMES = names_of("prompt", 6)
LEASE = b"l" * 16
BLOCK_BYTES = 1000


class Wrong(Exception):  # noqa: N818 - what it is
    """Raised if an engine violates a rule."""


def some_bytes(random: random.Random, *known: bytes) -> bytes:
    """Return random bytes, mostly meaningful values."""
    if known and random.random() < 0.8:
        found = random.choice(known)
        return found if random.random() < 0.9 else found[:-1] + random.randbytes(1)
    return random.randbytes(random.choice((0, 1, 15, 16, 17, 64)))


def some_number(random: random.Random) -> int:
    return random.choice((0, 0, 1, 1, 1, 2, 3, 7, 999, 1000, 1001, 6000, 2**31, 2**32 - 1, 2**63, 2**64 - 1))


def request_of(random: random.Random, kind: str | None = None) -> pb.PullRequest:
    """Return a random message to an engine with blocks."""
    match kind or random.choice(("fetch", "fetch", "fetch", "ack", "ack", "release", "open", "")):
        case "open":
            return pb.PullRequest(
                open=pb.Open(
                    lease_id=some_bytes(random, LEASE),
                    incarnation=random.choice(("a-1", "a-1", "a-1", "a-0", "", "x" * 1000)),
                    fingerprint=some_bytes(random, FINGERPRINT),
                    transports=random.choices(("grpc", "shared_memory", "nixl", "", "\u20ac"), k=random.randrange(20)),
                    shared_memory_id=random.choice(("", "here", "x" * 5000)),
                )
            )  # fmt: skip
        case "fetch":
            count = random.choice((0, 1, 1, 2, 6, 20, 4096, 4097))
            hashes = [some_bytes(random, *(name.hash for name in NAMES)) for _ in range(count)]
            return pb.PullRequest(
                fetch=pb.Fetch(
                    fetch_id=random.choice((1, 2, 3, some_number(random))),
                    group=random.choice((0, 0, 0, 1, 2**32 - 1)),
                    hashes=hashes,
                )
            )
        case "ack":
            return pb.PullRequest(ack=pb.Ack(num_bytes=some_number(random)))
        case "release":
            return pb.PullRequest(release=pb.Release())
    return pb.PullRequest()


def response_of(random: random.Random) -> pb.PullResponse:
    """Return a random message to an engine that pulls blocks."""
    name = random.choice(NAMES)
    group, block_hash = random.choice((0, 0, 0, 5)), some_bytes(random, name.hash)
    number = random.choice((1, 1, 1, 2, some_number(random)))
    match random.choice(("opened", "chunk", "block", "block", "block", "missing", "done", "")):
        case "opened":
            return pb.PullResponse(opened=pb.Opened(transport=random.choice(("grpc", "shared_memory", "x"))))
        case "chunk":
            chunk = tensor_pb2.TensorChunk(
                transfer_id=some_number(random),
                offset=some_number(random),
                data=random.randbytes(random.choice((0, 1, 1000))),
                abandoned=random.random() < 0.1,
            )
            return pb.PullResponse(chunk=chunk)
        case "block":
            return pb.PullResponse(block=_block(random, number, group, block_hash, name))
        case "missing":
            return pb.PullResponse(missing=pb.Missing(fetch_id=number, group=group, hash=block_hash))
        case "done":
            return pb.PullResponse(done=pb.Done(fetch_id=number))
    return pb.PullResponse()


def _block(random: random.Random, number: int, group: int, block_hash: bytes, name: BlockName) -> pb.Block:

    data = content(name, BLOCK_BYTES)
    if random.random() < 0.3:
        data = data[: random.randrange(BLOCK_BYTES + 1)]
    crc32 = zlib.crc32(data) if random.random() < 0.8 else some_number(random) % 2**32
    tensor = tensor_pb2.Tensor(
        dtype=tensor_pb2.DataType.ValueType(random.choice((6, 6, 6, 6, 1, 0, 77))),
        shape=[BLOCK_BYTES] if random.random() < 0.9 else [some_number(random)] * random.randrange(5),
    )
    match random.choice(("inline", "inline", "inline", "chunks", "shared_memory", "")):
        case "inline":
            tensor.inline = data
        case "chunks":
            tensor.chunks.transfer_id, tensor.chunks.size = some_number(random), some_number(random)
            tensor.chunks.keep = random.random() < 0.5
        case "shared_memory":
            tensor.shared_memory.name = random.choice(("", "/etc/passwd", "penstock-" + "0" * 32 + "-0"))
            tensor.shared_memory.offset, tensor.shared_memory.size = some_number(random), some_number(random)
    return pb.Block(fetch_id=number, group=group, hash=block_hash, crc32=crc32, data=tensor)


class Liar(service_pb2_grpc.KvTransferServiceServicer):
    """Server with random answers. ``random`` is the generator of the next answers."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    async def Pull(
        self, request_iterator: AsyncIterator[pb.PullRequest], context: Any
    ) -> AsyncIterator[pb.PullResponse]:
        drawn = self.random
        await anext(aiter(request_iterator), None)
        if drawn.random() < 0.9:
            yield pb.PullResponse(opened=pb.Opened(transport=drawn.choice(("grpc", "grpc", "shared_memory", ""))))
            await anext(aiter(request_iterator), None)
        for _ in range(drawn.randrange(12)):
            yield response_of(drawn)
        if drawn.random() < 0.3:
            await context.abort(drawn.choice(list(grpc.StatusCode)[1:]), "no")


class Campaign:
    """Campaign.

    ``codes`` counts results of streams to the engine with blocks, ``reasons`` those of the other engine.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.codes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def run(self, count: int) -> None:
        """Run the campaign. Raises Wrong."""
        asyncio.run(self._attack(count - count // 2))
        self._lie(count // 2)

    def started(self, method: str, *_: object) -> CallEnd:
        """See ``CallObserver``: clients do not always see the final status of a call."""
        return lambda code: self.codes.update([code])

    # Attacks on the engine with blocks.

    async def _attack(self, count: int) -> None:
        with FakeKvEngine("a", block_bytes=BLOCK_BYTES, lease=600.0, observer=self) as engine:
            async with grpc.aio.insecure_channel(engine.address) as channel:
                stub = service_pb2_grpc.KvTransferServiceStub(channel)
                for number in range(count):
                    drawn = random.Random(f"{self.seed} {number}")
                    if LEASE not in engine.leases:
                        engine.leases.settle(30)
                        engine.grant(NAMES, time.monotonic())
                    await self._stream(stub, drawn)
                    if number % 500 == 0:
                        _serves(engine, "engine that has blocks")
            _is_clean(engine)
        if wrong := AT_FAULT & self.codes.keys():
            raise Wrong(f"streams ended with {sorted(wrong)}")

    async def _stream(self, stub: Any, drawn: random.Random) -> None:
        messages = [request_of(drawn, "open" if drawn.random() < 0.95 else None)]
        messages += [request_of(drawn) for _ in range(drawn.randrange(8))]
        call = stub.Pull()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for message in messages:
                await call.write(message)
            if drawn.random() < 0.1:
                call.cancel()
            else:
                await call.done_writing()
        wanted = {bytes(block_hash) for message in messages for block_hash in message.fetch.hashes}
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for answer in call:
                if answer.WhichOneof("message") == "block":
                    name = BlockName(answer.block.group, answer.block.hash)
                    if name.hash not in wanted or answer.block.data.inline != content(name, BLOCK_BYTES):
                        raise Wrong("a block came that was not asked for, or another one")
        await call.code()

    # Attacks on the engine that pulls blocks.

    def _lie(self, count: int) -> None:
        with _lying() as (liar, address), FakeKvEngine("b", block_bytes=BLOCK_BYTES, silence=0.3) as engine:
            for number in range(count):
                liar.random = random.Random(f"{self.seed} lie {number}")
                given = KvSource(
                    engine_id="a",
                    incarnation=f"a-{number}",
                    address=address,
                    lease_id=LEASE,
                    num_tokens=24,
                    fingerprint=FINGERPRINT,
                )
                engine.peers._peers.clear()  # otherwise the engine would avoid this peer
                request = engine.request(given)
                engine.peers.opened(request)
                fetched = engine.fetch(request, NAMES)
                for name, data in fetched.wait().items():
                    if len(data) != BLOCK_BYTES:
                        raise Wrong(f"{len(data)} bytes were taken for block {name}")
                engine.peers.closed(request)
                if number % 500 == 0:
                    _takes(engine)
            self.reasons = engine.counts.failures.copy()
            _is_clean(engine)


def _serves(engine: FakeKvEngine, what: str) -> None:
    names, lease_id = names_of("neighbour", 3), b"n" * 16
    with FakeKvEngine("n", block_bytes=BLOCK_BYTES) as target:
        request = target.request(engine.grant(names, time.monotonic(), lease_id))
        target.peers.opened(request)
        if target.fetch(request, names).wait() != {name: content(name, BLOCK_BYTES) for name in names}:
            raise Wrong(f"the {what} does not serve any more")
        target.peers.closed(request)
        _until(lambda: lease_id not in engine.leases, "a lease that was released is there")
    engine.leases.expire(time.monotonic())


def _takes(engine: FakeKvEngine) -> None:
    names = names_of("neighbour", 3)
    with FakeKvEngine("n", block_bytes=BLOCK_BYTES) as source:
        request = engine.request(source.grant(names, time.monotonic()))
        engine.peers.opened(request)
        if engine.fetch(request, names).wait() != {name: content(name, BLOCK_BYTES) for name in names}:
            raise Wrong("the engine that wants blocks takes none any more")
        engine.peers.closed(request)


def _is_clean(engine: FakeKvEngine) -> None:
    _until(lambda: engine.transfer.num_pulls == (0, 0), "a stream did not end")
    engine.leases.revoke_all()
    _until(lambda: not engine.leases.expire(0.0) and len(engine.leases) == 0, "a lease did not end")
    if engine.pool.num_free_blocks != engine.pool.num_usable_blocks:
        raise Wrong("blocks were not given back")
    if engine.peers._fetching:
        raise Wrong("fetches did not end")


def _until(condition: Any, otherwise: str) -> None:
    give_up = time.monotonic() + 30
    while not condition():
        if time.monotonic() > give_up:
            raise Wrong(otherwise)
        time.sleep(0.01)


@contextlib.contextmanager
def _lying() -> Iterator[tuple[Liar, str]]:
    loop, liar = asyncio.new_event_loop(), Liar()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        service_pb2_grpc.add_KvTransferServiceServicer_to_server(liar, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield liar, f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


if __name__ == "__main__":
    campaign = Campaign(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    campaign.run(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
    print(f"codes {dict(campaign.codes)}, reasons {dict(campaign.reasons)}")

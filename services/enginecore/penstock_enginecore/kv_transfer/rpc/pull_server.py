"""Server side of a pull of KV blocks, in the engine that has the blocks."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import grpc

from penstock.kvtransfer.v1 import messages_pb2 as pb
from penstock.kvtransfer.v1 import service_pb2_grpc
from penstock_common.block_hash import DIGEST_SIZE
from penstock_common.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from penstock_common.observability.logging import get_logger
from penstock_common.rpc.handshake import first_message
from penstock_common.types.kv_transfer import STATE_GROUP, BlockName
from penstock_enginecore.kv_transfer.core.base import Content
from penstock_enginecore.kv_transfer.core.leases import LEASE_ID_BYTES, Leases
from penstock_enginecore.kv_transfer.core.pull import MAX_ASKED, MAX_HASHES
from penstock_enginecore.kv_transfer.metrics import TransferCounts
from penstock_enginecore.kv_transfer.rpc.transports import GRPC, GrpcSender, Sender, Window

_READ_BYTES = 2 * 1024 * 1024
"""Approximate number of bytes in one read from the block pool. While the bytes of one read are sent, the next read
runs. No bytes are sent before the first read ends.
"""
_MAX_TRANSPORTS = 16
_MAX_PULLS = 1024
"""Maximum number of open pulls by other engines."""

Read = Callable[[Sequence[int]], "Future[list[Content]]"]
Context = grpc.aio.ServicerContext[Any, Any]
log = get_logger()


class PullSource:
    """The blocks that other engines may pull from this engine, and how to read them.

    Args:
        leases: Leases on the blocks. Only blocks with a lease may be pulled.
        read: Function that returns the contents of blocks. Thread-safe.
        read_states: Function that returns the contents of states of recurrent layers, or None for a model without
            recurrent layers.
        wake: Function that makes the busy loop check the leases.
        incarnation: This engine's incarnation.
        fingerprint: Fingerprint of the layout and content of the engine's blocks.
        block_bytes: Size of a block in bytes.
        senders: Function that creates a sender for a transport that the message ``Open`` of a stream offers. The result
            is None if the transport is not possible.
        counts: Counts of transfers, for metrics.
        clock: Function that returns monotonic seconds.
    """

    def __init__(
        self,
        leases: Leases,
        read: "Read",
        wake: Callable[[], None],
        *,
        incarnation: str,
        fingerprint: bytes,
        block_bytes: int,
        read_states: "Read | None" = None,
        senders: Callable[[str, pb.Open], Sender | None] = lambda name, _: GrpcSender() if name == GRPC else None,
        counts: TransferCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.leases = leases
        self.read = read
        self.read_states = read_states
        self.wake = wake
        self.incarnation = incarnation
        self.fingerprint = fingerprint
        self.block_bytes = block_bytes
        self.senders = senders
        self.counts = counts or TransferCounts()
        self.clock = clock


class PullServicer(service_pb2_grpc.KvTransferServiceServicer):
    """The gRPC service from which other engines pull blocks. ``source`` is set once the model is loaded."""

    def __init__(self) -> None:
        self.source: PullSource | None = None
        self.num_pulls = 0

    async def Pull(
        self, request_iterator: AsyncIterator[pb.PullRequest], context: Context
    ) -> AsyncIterator[pb.PullResponse]:
        """Serve the stream of one pull. The lease does not expire while the stream is open, up to the maximum duration
        of a lease.
        """
        source = self.source
        if source is None:
            raise Unavailable("the engine is still loading its model", reason="ENGINE_LOADING")
        opening = _opening(await first_message(request_iterator, "open"), source)
        if self.num_pulls >= _MAX_PULLS:
            raise ResourceExhausted(
                f"{_MAX_PULLS} pulls of KV blocks are open, which is the limit", reason="TOO_MANY_PULLS"
            )
        lease = source.leases.opened(opening.lease_id)
        if lease is None:
            raise NotFound("open.lease_id is unknown, or the lease has ended", reason="LEASE_GONE")
        self.num_pulls += 1
        stream: _Stream | None = None
        try:
            stream = _Stream(source, opening)
            yield pb.PullResponse(
                opened=pb.Opened(
                    transport=stream.sender.name,
                    lease_seconds=source.leases.lease_seconds,
                    num_blocks=len(lease.blocks),
                    nixl_agent=stream.sender.agent,
                )
            )
            async for response in stream.answers(request_iterator):
                yield response
        finally:
            self.num_pulls -= 1
            if stream is not None:
                stream.close()
            source.leases.closed(opening.lease_id, source.clock())
            source.wake()  # The time of the lease is running again, so the busy loop's next deadline changes.


class _Reading(NamedTuple):
    """A read of blocks that is in flight. ``ids`` has None for missing blocks. ``future`` returns the contents of all
    other blocks.
    """

    ids: Sequence[int | None]
    future: "Future[list[Content]] | None"


class _Stream:
    """The stream of one pull by another engine."""

    def __init__(self, source: PullSource, opening: pb.Open) -> None:
        self.sender = _sender(source, opening)
        self._source = source
        self._leases = source.leases
        self._lease_id = opening.lease_id
        self._window = Window()
        self._fetches: deque[pb.Fetch] = deque()
        self._open: set[int] = set()
        self._over = False
        self._changed = asyncio.Event()
        self._progress = source.clock()
        """Time of the last message to, or acknowledgement from, the pulling engine."""
        self._task = asyncio.current_task()
        self._reader: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def answers(self, requests: AsyncIterator[pb.PullRequest]) -> AsyncIterator[pb.PullResponse]:
        """Yield the response messages with the requested blocks, until the pulling engine sends no more requests."""
        self._reader = asyncio.create_task(self._read(requests))
        self._watch = asyncio.create_task(self._end_when_stalled())
        while (fetch := await self._next()) is not None:
            self._leases.fetch_began(self._lease_id)
            try:
                async for response in self._blocks(fetch):
                    yield response
            finally:
                self._leases.fetch_ended(self._lease_id)
            self._open.discard(fetch.fetch_id)
            yield pb.PullResponse(done=pb.Done(fetch_id=fetch.fetch_id))
        self._reader.result()

    def close(self) -> None:
        for task in (self._reader, self._watch):
            if task is not None:
                task.cancel()
        self.sender.close()

    # Messages from the pulling engine.

    async def _read(self, requests: AsyncIterator[pb.PullRequest]) -> None:
        try:
            async for request in requests:
                self._take(request)
                self._changed.set()
        finally:
            self._over = True
            self._changed.set()

    def _take(self, request: pb.PullRequest) -> None:
        match request.WhichOneof("message"):
            case "fetch":
                self._take_fetch(request.fetch)
            case "ack":
                self._window.acknowledged(request.ack.num_bytes)
                self.sender.acknowledged(request.ack.num_bytes)
                self._progress = self._source.clock()
            case "release":
                if self._leases.released(self._lease_id):
                    self._source.wake()
            case "open":
                raise InvalidArgument(
                    "the stream has a second PullRequest with the field open; only the first may have this field",
                    field="open",
                )
            case _:
                raise InvalidArgument(
                    "the PullRequest is empty; it must have one of the fields fetch, ack, release", field="message"
                )

    def _take_fetch(self, fetch: pb.Fetch) -> None:
        if not 1 <= len(fetch.hashes) <= MAX_HASHES:
            raise InvalidArgument(
                f"fetch.hashes has {len(fetch.hashes)} entries; it must have 1 to {MAX_HASHES}", field="fetch.hashes"
            )
        if any(len(each) != DIGEST_SIZE for each in fetch.hashes):
            raise InvalidArgument(
                f"fetch.hashes has an entry that is not {DIGEST_SIZE} bytes long", field="fetch.hashes"
            )
        if fetch.fetch_id in self._open:
            raise InvalidArgument(f"fetch.fetch_id {fetch.fetch_id} is in use by an open fetch", field="fetch.fetch_id")
        if len(self._open) >= MAX_ASKED:
            raise ResourceExhausted(
                f"{MAX_ASKED} fetch requests are open on this stream, which is the limit", field="fetch"
            )
        self._open.add(fetch.fetch_id)
        self._fetches.append(fetch)

    async def _next(self) -> pb.Fetch | None:
        while not self._fetches:
            if self._over:
                return None
            await self._wait()
        return self._fetches.popleft()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    # Sending of blocks.

    async def _blocks(self, fetch: pb.Fetch) -> AsyncIterator[pb.PullResponse]:
        names = [BlockName(fetch.group, block_hash) for block_hash in fetch.hashes]
        of_states = fetch.group == STATE_GROUP
        count = 1 if of_states else max(1, _READ_BYTES // max(1, self._source.block_bytes))
        batches = [names[start : start + count] for start in range(0, len(names), count)]
        reading = self._begin(batches[0])
        for place, batch in enumerate(batches):
            contents = await self._contents(reading)
            if place + 1 < len(batches):
                reading = self._begin(batches[place + 1])
            for name, data in zip(batch, contents, strict=True):
                if data is None:
                    missing = pb.Missing(fetch_id=fetch.fetch_id, group=name.group, hash=name.hash)
                    yield pb.PullResponse(missing=missing)
                    continue
                async for response in self._block(fetch.fetch_id, name, data):
                    yield response

    async def _block(self, fetch_id: int, name: BlockName, data: Content) -> AsyncIterator[pb.PullResponse]:
        size = len(data)
        while not self._window.has_room(size):
            if self._over:
                raise Unavailable("the pulling engine closed the stream before it acknowledged all blocks")
            await self._wait()
        self._window.sent(size)
        for response in self.sender.messages(fetch_id, name, data):
            yield response
            self._progress = self._source.clock()
        self._source.counts.moved("out", self.sender.name, size, of_states=name.group == STATE_GROUP)

    def _begin(self, names: Sequence[BlockName]) -> _Reading:
        """Look up blocks in the lease, and begin to read the blocks. The read ends when the copy has ended, even if the
        stream ends earlier.
        """
        ids = self._leases.read_began(self._lease_id, names)
        if ids is None:
            return _Reading([None] * len(names), None)
        read = self._source.read
        if names[0].group == STATE_GROUP and self._source.read_states is not None:
            read = self._source.read_states
        try:
            future = read([block_id for block_id in ids if block_id is not None])
        except BaseException:
            self._read_ended()
            raise
        future.add_done_callback(lambda _: self._read_ended())
        return _Reading(ids, future)

    async def _contents(self, reading: _Reading) -> list[Content | None]:
        """Return the content of each requested block, or None for a missing block."""
        nothing: list[Content | None] = [None] * len(reading.ids)
        if reading.future is None:
            return nothing
        try:
            contents = await asyncio.shield(asyncio.wrap_future(reading.future))
        except (OSError, MemoryError) as e:
            log.warning("cannot read KV blocks that another engine requested", reason=str(e))
            self._source.counts.failures["read"] += 1
            return nothing
        found = iter(contents)
        return [None if block_id is None else next(found) for block_id in reading.ids]

    def _read_ended(self) -> None:
        if self._leases.read_ended(self._lease_id):
            self._source.wake()

    async def _end_when_stalled(self) -> None:
        """End the stream if the pulling engine has made no progress for the duration of a lease. The blocks of the
        lease can then be freed.
        """
        while True:
            seconds = self._leases.lease_seconds
            await asyncio.sleep(seconds / 4)
            if not self._open:
                self._progress = self._source.clock()
            elif self._source.clock() - self._progress >= seconds and self._task is not None:
                self._source.counts.failures["stalled"] += 1
                self._task.cancel()
                return


def _opening(first: pb.PullRequest | None, source: PullSource) -> pb.Open:
    """Validate and return the first message of the stream. Raises RequestFailed if the message is not valid or names
    another engine process.
    """
    if first is None or first.WhichOneof("message") != "open":
        raise InvalidArgument("the first message of Pull must be a PullRequest with the field open", field="open")
    opening = first.open
    for field, size in (("lease_id", LEASE_ID_BYTES), ("fingerprint", len(source.fingerprint))):
        if len(value := getattr(opening, field)) != size:
            raise InvalidArgument(f"open.{field} has {len(value)} bytes; it must have {size}", field=f"open.{field}")
    if len(opening.transports) > _MAX_TRANSPORTS:
        raise InvalidArgument(
            f"open.transports has {len(opening.transports)} entries; the limit is {_MAX_TRANSPORTS}",
            field="open.transports",
        )
    if opening.incarnation != source.incarnation:
        raise FailedPrecondition(
            "open.incarnation is not this engine's incarnation; the engine has restarted", reason="RESTARTED"
        )
    if opening.fingerprint != source.fingerprint:
        raise FailedPrecondition(
            "open.fingerprint is not this engine's fingerprint; the block layouts or the weights differ",
            reason="LAYOUTS_DIFFER",
        )
    return opening


def _sender(source: PullSource, opening: pb.Open) -> Sender:
    """Return a sender for the best transport that both engines offer."""
    for name in dict.fromkeys(opening.transports):
        if (sender := source.senders(name, opening)) is not None:
            return sender
    return GrpcSender()

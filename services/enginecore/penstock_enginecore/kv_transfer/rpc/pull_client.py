"""Client side of a pull of KV blocks, in the engine that receives the blocks."""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import grpc

from penstock.kvtransfer.v1 import messages_pb2 as pb
from penstock.kvtransfer.v1 import service_pb2_grpc
from penstock_common.errors import FailedPrecondition, RequestFailed, Unauthenticated
from penstock_common.observability.logging import get_logger
from penstock_common.observability.tracing import Headers
from penstock_common.rpc.call_authorization import PortSecret
from penstock_common.rpc.status import from_rpc_error
from penstock_common.types.kv_transfer import STATE_GROUP, BlockName, KvMedium, KvSource
from penstock_enginecore.kv_transfer.core.base import PeerBlock
from penstock_enginecore.kv_transfer.core.pull import (
    Acknowledge,
    Arrived,
    Ask,
    Broken,
    Effect,
    Ended,
    GiveUp,
    Pull,
)
from penstock_enginecore.kv_transfer.core.transfer_stats import ABANDONED, WHOLE, Observe, Transfer, outcome_of
from penstock_enginecore.kv_transfer.metrics import TransferCounts
from penstock_enginecore.kv_transfer.rpc.transports import WINDOW_BYTES, Receiver

CHECKSUM = "checksum"
"""Failure reason: the other engine sent blocks with wrong checksums. This engine requests no blocks from it for a
while.
"""
_FAREWELL = 1.0
"""Time in seconds within which the source must end the stream after this engine has released the lease."""
_REASONS = {"LEASE_GONE": "lease", "RESTARTED": "restarted", "LAYOUTS_DIFFER": "layout", "ENGINE_LOADING": "restarted"}

Post = Callable[[Callable[[], None]], None]
"""Function that runs another function on the transfer thread. Any thread may call it. The call does nothing once the
transfer thread has ended.
"""
Call = grpc.aio.StreamStreamCall[pb.PullRequest, pb.PullResponse]
log = get_logger()


class PullSettings(NamedTuple):
    """Settings that all pulls of an engine share.

    Attributes:
        fingerprint: Fingerprint of the layout and content of the engine's blocks.
        silence: Time in seconds without a message after which a source counts as lost.
        transports: Names of the accepted transports, best first.
        shared_memory_id: Id of the host's shared memory, or empty if the engine uses no shared memory.
        receiver: Function that creates a receiver for the transport that a source chose.
        counts: Counts of transfers, for metrics.
        observe: Function that is called with each finished transfer.
        clock: Function that returns monotonic seconds.
        secret: Shared secret that authenticates the source, or None without a secret.
    """

    fingerprint: bytes
    silence: float
    transports: Sequence[str]
    shared_memory_id: str
    receiver: Callable[[pb.Opened, KvSource], Receiver]
    counts: TransferCounts
    observe: Observe = lambda _: None
    clock: Callable[[], float] = time.monotonic
    secret: PortSecret | None = None


@dataclass(slots=True)
class _Wish:
    """A fetch in progress.

    Attributes:
        arrived: Function that is called with arrived blocks.
        ended: Function that is called when the fetch ends.
        began: Start time of the fetch, in monotonic seconds.
        num_wanted: Number of requested blocks.
        num_blocks: Number of verified blocks that arrived.
        num_bytes: Total size of these blocks in bytes.
        abandoned: Whether the remaining blocks are not needed any more.
    """

    arrived: Callable[[Sequence[PeerBlock]], None]
    ended: Callable[[], None]
    began: float
    num_wanted: int
    num_blocks: int = 0
    num_bytes: int = 0
    abandoned: bool = False


class PullClient:
    """A pull of blocks from one source engine. Any thread may create the object and read ``failed``. Only the transfer
    thread may call the other methods.

    ``bad_block`` is called for each block with a wrong checksum. If the source must not be used any more, ``bad_block``
    returns the reason, otherwise None. ``headers`` has the trace context of the request.
    """

    def __init__(
        self,
        source: KvSource,
        settings: PullSettings,
        post: Post,
        bad_block: Callable[[], str | None],
        headers: Headers = MappingProxyType({}),
    ) -> None:
        self._source = source
        self._settings = settings
        self._post = post
        self._bad_block = bad_block
        self._headers = headers
        self._began = settings.clock()
        self._failure = ""
        self._pull = Pull(settings.clock(), silence=settings.silence, window=WINDOW_BYTES)
        self._wishes: dict[int, _Wish] = {}
        self._requests: deque[pb.PullRequest] = deque()
        self._num_acknowledged: int | None = None
        """Total number of bytes that the next acknowledgement reports, or None if no acknowledgement is pending."""
        self._closing = False
        self._due = asyncio.Event()
        self._receiver: Receiver | None = None
        self._transport = ""
        self._call: Call | None = None

    @property
    def failed(self) -> bool:
        """Whether the pull has ended. After the end, no block arrives. Thread-safe."""
        return self._pull.state.ended

    async def run(self, channel: grpc.aio.Channel) -> None:
        """Run the pull until it ends. An error ends the pull and is counted as a failure."""
        opening = pb.Open(
            lease_id=self._source.lease_id,
            incarnation=self._source.incarnation,
            fingerprint=self._settings.fingerprint,
            transports=self._settings.transports,
            shared_memory_id=self._settings.shared_memory_id,
        )
        self._requests.appendleft(pb.PullRequest(open=opening))
        self._due.set()
        secret = self._settings.secret
        metadata = () if secret is None else secret.metadata()
        self._call = call = service_pb2_grpc.KvTransferServiceStub(channel).Pull(metadata=metadata)
        writer: asyncio.Task[None] | None = None
        reason = "ended"
        try:
            if secret is not None:
                await secret.check_server(call, metadata)
            writer = asyncio.create_task(self._write(call))
            while isinstance(response := await call.read(), pb.PullResponse):
                await self._take(response)
            if await call.code() is not grpc.StatusCode.OK:
                reason = "unreachable"
        except grpc.aio.AioRpcError as e:
            failed = from_rpc_error(e)
            reason = _REASONS.get(failed.reason, "unreachable" if failed.code == "UNAVAILABLE" else "refused")
        except asyncio.CancelledError:
            reason = "stopped"
        except FailedPrecondition as e:
            reason = "unreadable"
            if not self.failed:
                log.warning(
                    "cannot read KV blocks in the memory of another engine", address=self._address, reason=str(e)
                )
        except Unauthenticated as e:
            reason = "refused"
            log.warning(
                "the engine that should send KV blocks failed to authenticate", address=self._address, reason=str(e)
            )
        except (Broken, RequestFailed) as e:
            reason = "protocol"
            log.warning("the engine that sends KV blocks violated the protocol", address=self._address, reason=str(e))
        finally:
            self.fail(reason)
            call.cancel()
            if writer is not None:
                writer.cancel()
                with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                    await writer

    @property
    def _address(self) -> str:
        return self._source.address

    # Operations that this engine calls.

    def fetch(
        self,
        fetch_id: int,
        names: Sequence[BlockName],
        arrived: Callable[[Sequence[PeerBlock]], None],
        ended: Callable[[], None],
    ) -> None:
        now = self._settings.clock()
        self._wishes[fetch_id] = _Wish(arrived, ended, now, len(names))
        self._carry_out(self._pull.fetch(fetch_id, names, now))

    def abandon(self, fetch_id: int) -> None:
        if (wish := self._wishes.get(fetch_id)) is not None:
            wish.abandoned = True
        self._carry_out(self._pull.abandon(fetch_id))

    def close(self, *, released: bool) -> None:
        """Close the pull. ``released`` is true if no engine needs the lease any more."""
        for wish in self._wishes.values():
            wish.abandoned = True
        self._carry_out(self._pull.close(released=released))

    def fail(self, reason: str) -> None:
        """Fail the pull, if it has not ended."""
        if not self._pull.state.ended:
            self._settings.counts.failures[reason] += 1
            self._failure = reason
            if not self._wishes:
                self._observe(self._began, reason)
            log.info("fetching KV blocks from another engine failed", address=self._address, reason=reason)
            self._carry_out(self._pull.fail(reason))

    def look(self, now: float) -> None:
        """Fail the pull if the source has sent no message for too long."""
        if self._pull.is_silent(now):
            self.fail("silent")

    def forgive(self, now: float) -> None:
        """Restart the timeout for messages of the source, because this process was stalled and could not receive
        messages.
        """
        self._pull.heard(now)

    # Messages from the source.

    async def _take(self, response: pb.PullResponse) -> None:
        now = self._settings.clock()
        if self._pull.state.ended:
            return
        kind = response.WhichOneof("message")
        if kind == "opened":
            self._transport = response.opened.transport
            self._receiver = self._settings.receiver(response.opened, self._source)
            self._carry_out(self._pull.opened(now))
            return
        if self._receiver is None:
            raise Broken("the first message of the sending engine is not the message 'opened'")
        match kind:
            case "chunk":
                self._pull.heard(now)
                self._receiver.chunk(response.chunk)
            case "block":
                await self._take_block(response.block, self._receiver)
            case "missing":
                missing = response.missing
                self._pull.missing(missing.fetch_id, BlockName(missing.group, missing.hash), now)
                self._settings.counts.failures["missing"] += 1
            case "done":
                self._carry_out(self._pull.done(response.done.fetch_id, now))
            case _:
                raise Broken("the sending engine sent an empty message, or a message of an unknown kind")

    async def _take_block(self, block: pb.Block, receiver: Receiver) -> None:
        data = await receiver.data(block)
        if self._pull.state.ended:
            return
        now, counts = self._settings.clock(), self._settings.counts
        size = block.data.shape[0]
        effects = self._pull.block(block.fetch_id, BlockName(block.group, block.hash), size, now, good=data is not None)
        counts.moved("in", self._transport, size, of_states=block.group == STATE_GROUP)
        if data is None:
            counts.failures[CHECKSUM] += 1
            log.warning("another engine sent a KV block with a wrong checksum", address=self._address)
            if (reason := self._bad_block()) is not None:
                self.fail(reason)
                return
        for effect in effects:
            if isinstance(effect, Arrived):
                wish = self._wishes[effect.fetch_id]
                wish.num_blocks += 1
                wish.num_bytes += size
                done = _Once(partial(self._post, partial(self._taken, effect.sequence)))
                wish.arrived([PeerBlock(effect.place, memoryview(data or b""), done)])
            else:
                self._carry_out([effect])

    def _taken(self, sequence: int) -> None:
        self._carry_out(self._pull.taken(sequence, self._settings.clock()))

    # Messages to the source.

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Ask(number, group, hashes):
                    fetch = pb.Fetch(fetch_id=number, group=group, hashes=hashes)
                    self._requests.append(pb.PullRequest(fetch=fetch))
                case Acknowledge(num_bytes):
                    self._num_acknowledged = num_bytes
                case Ended(fetch_id):
                    self._end(self._wishes.pop(fetch_id))
                case GiveUp(released):
                    self._give_up(released=released)
        if effects:
            self._due.set()

    def _end(self, wish: _Wish) -> None:
        outcome = outcome_of(wish.num_wanted, wish.num_blocks)
        if outcome != WHOLE:
            outcome = self._failure or (ABANDONED if wish.abandoned else outcome)
        self._observe(wish.began, outcome, wish)
        wish.ended()

    def _observe(self, began: float, outcome: str, wish: _Wish | None = None) -> None:
        wanted, blocks, size = (0, 0, 0) if wish is None else (wish.num_wanted, wish.num_blocks, wish.num_bytes)
        now = self._settings.clock()
        self._settings.observe(
            Transfer(self._headers, KvMedium.PEER, self._transport, began, now, wanted, blocks, size, outcome)
        )

    def _give_up(self, *, released: bool) -> None:
        self._closing = True
        self._requests = deque(each for each in self._requests if each.WhichOneof("message") == "open")
        if released:
            self._requests.append(pb.PullRequest(release=pb.Release()))
        if self._receiver is not None:
            self._receiver.close()
        if self._call is not None:
            if released:
                asyncio.get_running_loop().call_later(_FAREWELL, self._call.cancel)
            else:
                self._call.cancel()

    async def _write(self, call: Call) -> None:
        """Write pending messages to the stream, with acknowledgements last. If the stream has ended, the task that
        reads from the stream handles the end.
        """
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._due.wait()
                self._due.clear()
                while self._requests:
                    await call.write(self._requests.popleft())
                if self._closing:
                    await call.done_writing()
                    return
                if (num_bytes := self._num_acknowledged) is not None:
                    self._num_acknowledged = None
                    await call.write(pb.PullRequest(ack=pb.Ack(num_bytes=num_bytes)))


class _Once:
    """Calls a function at most once, on the thread that makes the first call."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._function: Callable[[], None] | None = function

    def __call__(self) -> None:
        with self._lock:
            function, self._function = self._function, None
        if function is not None:
            function()

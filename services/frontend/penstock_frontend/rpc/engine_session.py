"""Stream of a session between this frontend and one engine, and the queue of messages for this stream."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import grpc
import msgspec

from penstock.common.v1 import data_parallel_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock.enginecore.v1 import service_pb2_grpc
from penstock_common.errors import InvalidArgument, RequestFailed, Unavailable
from penstock_common.observability.logging import incident
from penstock_common.rpc import stats
from penstock_common.rpc.by_field import to_message
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.credentials import NO_TLS, ClientCredentials
from penstock_common.rpc.data_parallel import wave_from_proto
from penstock_common.rpc.handshake import COLUMNS_SINCE, OLDEST_REVISION, PROTOCOL_REVISION
from penstock_common.rpc.outputs import Place, chunk_to_proto, take_chunk, taker
from penstock_common.rpc.status import from_rpc_error
from penstock_common.tensors.chunks import (
    DEFAULT_MAX_MESSAGE_BYTES,
    MAX_TENSOR_BYTES,
    Buffer,
    Chunk,
    IncomingTensors,
    Limits,
    Outgoing,
    TensorRef,
    no_tensors,
)
from penstock_common.types.data_parallel import StartDpWave, StartWave
from penstock_common.types.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineReady,
    FinishReason,
    RequestError,
    SchedulerStats,
    UtilityOutput,
)
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.interfaces import LossCause
from penstock_frontend.rpc import session_messages
from penstock_frontend.rpc.media_transport import MediaTransport, Probe
from penstock_frontend.rpc.tensor_sender import MediaMirror, NotWrittenError, TensorSender

# The classes below queue requests to an engine. These classes do no I/O.


class _NotSentError(Exception):
    """Raised if no message can be made now for a queued request."""


class OutgoingRequests:
    """Queue of the messages of one stream to an engine.

    The message of a request is made only when it is sent.

    Large tensors are sent in chunks before the request, or are written to shared memory. If several requests share a
    tensor, its chunks are sent once. No message is larger than the engine's limit. A request that is too large ends as
    if the engine had refused the request.
    """

    def __init__(
        self, media: MediaTransport, *, on_refused: Callable[[EngineCoreOutputs], None], max_message_bytes: int
    ) -> None:
        """Create the queue. ``on_refused`` receives the final output of each request that cannot be sent."""
        self._transport = media
        self._on_refused = on_refused
        self._limits = Limits(max_message_bytes, 0)
        self._revision = OLDEST_REVISION
        self._outgoing: Outgoing[pb.SessionRequest] = Outgoing(_chunk)
        self._tensors: TensorSender | None = None

    def greeted(self, ready: EngineReady, limits: Limits, revision: int, probe: Probe | None = None) -> None:
        """Apply the greeting that the engine sent at the start of the session.

        Args:
            ready: the engine's greeting.
            limits: the message size limits of frontend and engine.
            revision: protocol revision of this stream.
            probe: the shared memory segment that the engine was asked to read, or None.
        """
        self._limits, self._revision = limits, revision
        self._outgoing.limit(limits)
        self._tensors = TensorSender(self._transport, ready, limits, probe)

    @property
    def mirror(self) -> MediaMirror | None:
        """Copy of the state of the engine's media cache. None before the engine's greeting."""
        return None if self._tensors is None else self._tensors.mirror

    def put(self, message: pb.SessionRequest) -> None:
        """Add a message to the queue."""
        self._outgoing.put(lambda _: message)

    def add(self, request: EngineCoreRequest) -> None:
        """Add a request to the queue."""
        self._add(request, 0)

    def abort(self, request_ids: Sequence[str], reason: str) -> None:
        """Abort requests that were queued or sent in this session.

        A request whose tensors are still being sent has not reached the engine, so this method ends the request itself.
        The method aborts all other requests on the engine.
        """
        unsent = self._outgoing.discard(request_ids)
        if self._tensors is not None:
            self._tensors.not_queued(unsent)
            self._tensors.forget(request_ids)
        if sent := [request_id for request_id in request_ids if request_id not in unsent]:
            self.put(pb.SessionRequest(abort=pb.Abort(request_ids=sent, reason=reason)))

    def take(self, outputs: EngineCoreOutputs) -> None:
        """Process the outputs of the engine.

        If the engine refused a request that can be sent again, queue the request again, and remove the refusal from the
        outputs.
        """
        if self._tensors is not None:
            for request, again in self._tensors.take(outputs):
                self._add(request, again)

    def media_cleared(self) -> None:
        """Clear the copy of the media cache's state, because the engine has cleared its media cache."""
        if self._tensors is not None:
            self._tensors.cleared()

    def __bool__(self) -> bool:
        """Return True if there are messages to send."""
        return bool(self._outgoing) or (self.mirror is not None and self.mirror.has_drops)

    def next(self) -> list[pb.SessionRequest]:
        """Return the messages that must be sent next, in this order.

        The caller must send all of the messages. The list may be empty.
        """
        drops = self._drops()
        if not self._outgoing:
            return drops
        try:
            message = self._outgoing.next()
        except _NotSentError:
            return drops
        # Send the messages that drop media first, because they make room in the engine's cache for the data of the
        # message.
        return drops if message is None else [*drops, *self._drops(), message]

    def drop_stale(self) -> None:
        """Free shared memory that the engine has not read before its time limit."""
        if self._tensors is not None:
            self._tensors.drop_stale()

    def close(self) -> None:
        if self._tensors is not None:
            self._tensors.close()

    def _drops(self) -> list[pb.SessionRequest]:
        return [] if self._tensors is None else self._tensors.take_drops()

    def _add(self, request: EngineCoreRequest, again: int) -> None:
        """Add a request to the queue. ``again`` is the number of times that this attempt of the request was already
        sent to the engine.
        """
        plain = _is_plain(request)
        if self._tensors is not None and not plain:
            self._tensors.queued(request)
        tensors = no_tensors if plain else partial(self._in_chunks, request, again)
        self._outgoing.put(partial(self._make, request, again), tensors, key=request.request_id)

    def _in_chunks(self, request: EngineCoreRequest, again: int) -> Sequence[Buffer]:
        if self._tensors is None:
            return ()
        return self._tensors.in_chunks(request, again, self._outgoing.is_under_way)

    def _make(self, request: EngineCoreRequest, again: int, refs: Sequence[TensorRef]) -> pb.SessionRequest:
        """Make the message of a request.

        Raises _NotSentError if the request cannot be sent now. In this case, the request has ended, or is in the queue
        again.
        """
        tensors = None if _is_plain(request) else self._tensors
        places: dict[int, Place] = {}
        try:
            if tensors is not None:
                tensors.not_queued([request.request_id])
                places = tensors.places(request, refs, again)
            place, every_position = None, not self._limits.max_tensor_bytes
            if (embeds := request.prompt_embeds) is not None and (place := places.get(id(embeds.data))) is None:
                _check_vectors(embeds, self._limits, every_position=every_position)
            message = session_messages.add_request(request, place, every_position=every_position)
            if self._revision < COLUMNS_SINCE:
                message.add.ClearField("request_number")
            if request.context.deadline is not None:
                # Send the time left until the deadline instead of the deadline, because the engine's clock may differ.
                message.add.time_left = request.context.deadline - time.time()
            if tensors is not None:
                tensors.fill(message.add, request, places, again)
            if (size := message.ByteSize()) > self._limits.max_message_bytes:
                raise InvalidArgument(
                    f"the request has {size} bytes; engines accept messages of up to {self._limits.max_message_bytes} bytes",
                    reason="MESSAGE_TOO_LARGE",
                )
        except NotWrittenError:
            self._add(request, again)
        except RequestFailed as e:
            self._refuse(request, e)
        except Exception as e:
            self._refuse(request, incident(e, request=request.context.external_request_id, doing="sending the request"))
        else:
            return message
        if tensors is not None:
            tensors.forsake(places)
        raise _NotSentError

    def _refuse(self, request: EngineCoreRequest, error: RequestFailed) -> None:
        if self._tensors is not None:
            self._tensors.not_sent(request)
        output = EngineCoreOutput(
            request_id=request.request_id,
            attempt=request.attempt,
            offset=len(request.prior_output_token_ids),
            finish_reason=FinishReason.ERROR,
            error=RequestError.from_exception(error),
        )
        self._on_refused(EngineCoreOutputs(outputs=[output]))


def _is_plain(request: EngineCoreRequest) -> bool:
    """Return True if the request contains no tensors."""
    return request.prompt_embeds is None and not request.mm_features


def _chunk(chunk: Chunk) -> pb.SessionRequest:
    return pb.SessionRequest(tensor_chunk=chunk_to_proto(chunk))


def _check_vectors(embeds: PromptEmbeds, limits: Limits, *, every_position: bool) -> None:
    """Check that the embeddings of a prompt fit into one message, because the engine does not accept them in chunks.
    Raises InvalidArgument if they are too large.
    """
    size = embeds.num_tokens * embeds.row_bytes if every_position else len(embeds.data)
    limit = limits.max_message_bytes
    if size > limit:
        raise InvalidArgument(
            f"the embeddings of the prompt have {size} bytes; engines accept up to {limit} bytes",
            field="prompt",
            reason="MESSAGE_TOO_LARGE",
        )


_HANDSHAKE_TIMEOUT = 10.0

_OF_THE_NETWORK = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Status codes of a stream whose connection broke. The cause may be the engine, the network or this frontend."""


class SessionEnd(NamedTuple):
    """Reason and cause of the end of a session with an engine."""

    why: str
    cause: LossCause

    @property
    def by_engine(self) -> bool:
        """True if the engine failed or ended the session. Otherwise the network may have failed."""
        return self.cause in (LossCause.WEDGED, LossCause.FAILED)


class EngineSession:
    """One ``EngineCoreService.Session`` stream to an engine.

    The frontend sends ``hello``, and the engine answers with ``ready``. Then the frontend sends requests, aborts and
    utility calls. The engine sends one frame of outputs per step. The engine sends ``draining`` when it stops accepting
    new requests, and ``engine_dead`` when it has failed. A broken stream also counts as the loss of the engine.

    Call ``open``, then ``run``, which returns when the stream ends, then ``close``. Sending never blocks, because a
    queue feeds the stream. Messages that are queued after the end of the session are dropped. All callbacks run on the
    event loop.

    Messages are never larger than the engine accepts. Large tensors are written to shared memory, or are sent in chunks
    before the request. If several requests share a tensor, its chunks are sent once. A request that is too large ends
    as if the engine had refused the request.
    """

    def __init__(
        self,
        address: str,
        *,
        frontend_id: str,
        incarnation: str,
        on_outputs: Callable[[EngineCoreOutputs], None],
        on_draining: Callable[[float | None], None],
        on_start_wave: Callable[[StartWave], None] = lambda _: None,
        credentials: ClientCredentials = NO_TLS,
        media: MediaTransport | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        follows_cache: bool = False,
        revision: int = PROTOCOL_REVISION,
    ) -> None:
        """Args: address: host:port of the engine. frontend_id: name of this frontend. incarnation: id of this run of
        the frontend process. on_outputs: called with each frame of outputs. on_draining: called with the number of
        seconds until the engine ends its requests. None means that the time is unknown. on_start_wave: called when the
        engine waits until the other ranks of its data-parallel group start a wave. The message does not name the rank
        of the engine. credentials: TLS credentials of the connection. media: transport of tensors to engines on the
        same host, which all sessions share. None means that no shared memory is used. max_message_bytes: maximum size
        of a message in either direction, in bytes. follows_cache: True to ask the engine for the events of its prefix
        cache. revision: newest revision of the session protocol that this frontend supports.
        """
        self.address = address
        self._on_outputs = on_outputs
        self._on_draining = on_draining
        self._on_start_wave = on_start_wave
        # Accept at least the default size, because engines of earlier versions ignore the limit in ``hello``.
        most = max(max_message_bytes, DEFAULT_MAX_MESSAGE_BYTES)
        self._channel = make_channel(address, credentials=credentials, max_message_bytes=most)
        self._max_message_bytes = max_message_bytes
        self._incoming = IncomingTensors(MAX_TENSOR_BYTES)
        self._transport = media or MediaTransport(incarnation, memory_id="")
        self._probe = self._transport.probe()
        self._outgoing = OutgoingRequests(self._transport, on_refused=on_outputs, max_message_bytes=max_message_bytes)
        self._queued = asyncio.Event()
        self._closed = False
        self._put(
            pb.SessionRequest(
                hello=pb.Hello(
                    protocol_revision=revision,
                    frontend_id=frontend_id,
                    incarnation=incarnation,
                    max_message_bytes=max_message_bytes,
                    max_tensor_bytes=MAX_TENSOR_BYTES,
                    shared_memory_probe="" if self._probe is None else self._probe.name,
                    follows_cache=follows_cache,
                )
            )
        )
        self._stub: service_pb2_grpc.EngineCoreServiceAsyncStub = service_pb2_grpc.EngineCoreServiceStub(self._channel)
        self._call = self._stub.Session(self._requests())
        self._responses = aiter(self._call)
        self._call_ids = itertools.count(1)
        self._utility_calls: dict[int, asyncio.Future[Any]] = {}

    async def open(self) -> EngineReady:
        """Start the stream, and return the greeting of the engine.

        Raises Unavailable if the engine is not reachable, or uses a protocol revision that this frontend does not
        support.
        """
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT):
                first = await anext(self._responses, None)
        except TimeoutError:
            raise Unavailable(f"engine at {self.address} did not answer within {_HANDSHAKE_TIMEOUT:g} s") from None
        except grpc.aio.AioRpcError as e:
            raise Unavailable(f"engine at {self.address}: {from_rpc_error(e).message}") from None
        if first is None or not first.HasField("ready"):
            raise Unavailable(f"the first message of the engine at {self.address} is not the expected greeting 'ready'")
        if not OLDEST_REVISION <= first.ready.protocol_revision <= PROTOCOL_REVISION:
            raise Unavailable(
                f"engine at {self.address} uses revision {first.ready.protocol_revision} of the session protocol; "
                f"this frontend supports revisions {OLDEST_REVISION} to {PROTOCOL_REVISION}"
            )
        ready = session_messages.engine_ready(first.ready)
        limits = Limits.of(self._max_message_bytes, ready.max_message_bytes, ready.max_tensor_bytes)
        self._outgoing.greeted(ready, limits, first.ready.protocol_revision, self._probe)
        self._withdraw_probe()
        return ready

    async def run(self) -> SessionEnd:
        """Process the engine's messages until the stream ends. Return the reason for the end of the session."""
        take = taker(self._incoming)
        try:
            async for response in self._responses:
                kind = response.WhichOneof("message")
                if kind == "outputs":
                    self._take(session_messages.engine_core_outputs(response.outputs, take))
                elif kind == "frames":
                    for frame in response.frames.frames:
                        self._take(session_messages.engine_core_outputs(frame, take))
                elif kind == "tensor_chunk":
                    take_chunk(self._incoming, response.tensor_chunk)
                elif kind == "draining":
                    self._on_draining(session_messages.draining_time_left(response.draining))
                elif kind == "media_cleared":
                    self._outgoing.media_cleared()
                    self._queued.set()
                elif kind == "start_wave":
                    self._on_start_wave(wave_from_proto(response.start_wave, StartWave, ""))
                elif kind == "engine_dead":
                    return SessionEnd(f"the engine failed: {response.engine_dead.reason}", LossCause.FAILED)
        except grpc.aio.AioRpcError as e:
            why = f"the connection broke: {e.details() or e.code().name}"
            of_network = e.code() in _OF_THE_NETWORK
            return SessionEnd(why, LossCause.DISCONNECTED if of_network else LossCause.FAILED)
        return SessionEnd("the engine closed the session", LossCause.FAILED)

    def start_dp_wave(self, message: StartDpWave) -> None:
        """Ask the engine to start or join a wave. The engine must be a rank of a data-parallel group."""
        self._put(pb.SessionRequest(start_dp_wave=to_message(message, data_parallel_pb2.GroupWave)))

    def add(self, request: EngineCoreRequest) -> None:
        """Send a request to the engine.

        If the request cannot be sent, the request ends with an output whose finish reason is ERROR. This method raises
        no error.
        """
        self._outgoing.add(request)
        self._queued.set()

    @property
    def media(self) -> MediaMirror | None:
        """Copy of the state of the engine's media cache. None before ``open`` has returned."""
        return self._outgoing.mirror

    def abort(self, request_ids: Sequence[str], reason: str) -> None:
        """Abort requests on the engine."""
        self._outgoing.abort(request_ids, reason)
        self._queued.set()

    def hand_over(self, request_ids: Sequence[str]) -> None:
        """Ask the engine to hand requests over to other engines. The engine must have the capability ``kv_transfer``."""
        self._put(pb.SessionRequest(handoff=pb.Handoff(request_ids=request_ids)))

    async def call_utility(self, method: str, arguments: Sequence[object] = ()) -> Any:
        """Call a registered method of the engine, and return the result of the method. Raises the error with which the
        call ended.
        """
        call_id = next(self._call_ids)
        self._utility_calls[call_id] = asyncio.get_running_loop().create_future()
        call = pb.UtilityCall(call_id=call_id, method=method, arguments=msgspec.msgpack.encode(list(arguments)))
        self._put(pb.SessionRequest(utility=call))
        try:
            return await self._utility_calls[call_id]
        finally:
            del self._utility_calls[call_id]

    async def load(self, within: float) -> SchedulerStats | None:
        """Return the current statistics of the engine, which show its load and whether it is wedged.

        Return None if the engine does not answer within ``within`` seconds.
        """
        try:
            info = await self._stub.GetEngineInfo(pb.GetEngineInfoRequest(), timeout=within)
        except grpc.aio.AioRpcError:
            return None
        return stats.from_proto(info.scheduler_stats)

    async def close(self, reason: str = "the session was closed") -> None:
        """End the stream, and close the connection to the engine. Utility calls that have no result yet fail.
        Idempotent.
        """
        for future in self._utility_calls.values():
            if not future.done():
                future.set_exception(Unavailable(f"engine at {self.address}: {reason}", reason="ENGINE_GONE"))
        self._call.cancel()
        # End the task that feeds the stream. If the task were only dropped, it would wait until it is garbage
        # collected, and then log an error.
        self._closed = True
        self._queued.set()
        # gRPC ends this task when it ends a running call. If no call has started, the code below must end the task.
        feeding: asyncio.Task[None] | None = self._call._async_request_poller  # type: ignore[attr-defined]
        if feeding is not None:
            feeding.cancel()
        self._outgoing.close()
        self._withdraw_probe()
        await self._channel.close()

    def drop_stale(self) -> None:
        """Drop tensors of which a chunk is overdue, and free shared memory that the engine has not read before its time
        limit.
        """
        self._incoming.drop_stale()
        self._outgoing.drop_stale()

    async def _requests(self) -> AsyncIterator[pb.SessionRequest]:
        while not self._closed:
            if not self._outgoing:
                self._queued.clear()
                await self._queued.wait()
                continue
            for message in self._outgoing.next():
                yield message

    def _put(self, message: pb.SessionRequest) -> None:
        self._outgoing.put(message)
        self._queued.set()

    def _withdraw_probe(self) -> None:
        if self._probe is not None:
            self._transport.withdraw(self._probe)

    def _take(self, outputs: EngineCoreOutputs) -> None:
        if outputs.utility_output is not None:
            self._answer(outputs.utility_output)
        self._outgoing.take(outputs)
        self._queued.set()
        self._on_outputs(outputs)

    def _answer(self, output: UtilityOutput) -> None:
        future = self._utility_calls.get(output.call_id)
        if future is None or future.done():
            return  # the caller of the utility call does not wait any more
        if output.error is not None:
            future.set_exception(output.error.to_exception())
            return
        try:
            future.set_result(msgspec.msgpack.decode(output.result) if output.result else None)
        except Exception as e:
            future.set_exception(session_messages.unreadable(e, f"utility call {output.call_id}"))

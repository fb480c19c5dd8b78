"""The stream between this frontend and one engine."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import grpc
import msgspec

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock.enginecore.v1 import service_pb2_grpc
from penstock_common.errors import InvalidArgument, RequestFailed, Unavailable
from penstock_common.observability.incidents import incident
from penstock_common.rpc import stats
from penstock_common.rpc.channel import make_channel
from penstock_common.rpc.credentials import NO_TLS, ClientCredentials
from penstock_common.rpc.data_parallel import start_wave_from_proto, wave_to_proto
from penstock_common.rpc.outputs import chunk_to_proto, take_chunk, taker
from penstock_common.rpc.revision import COLUMNS_SINCE, OLDEST_REVISION, PROTOCOL_REVISION
from penstock_common.rpc.status import from_rpc_error
from penstock_common.tensors.incoming import IncomingTensors
from penstock_common.tensors.outgoing import Chunk, Outgoing, TensorRef
from penstock_common.tensors.sizes import DEFAULT_MAX_MESSAGE_BYTES, MAX_TENSOR_BYTES, Buffer, Limits
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
from penstock_frontend.engine.media_mirror import MediaMirror
from penstock_frontend.engine.media_transport import MediaTransport
from penstock_frontend.rpc import session_messages
from penstock_frontend.rpc.media_sender import MediaSender, NotWrittenError

_HANDSHAKE_TIMEOUT = 10.0


class _NotSentError(Exception):
    """There is no message after all."""


class EngineSession:
    """One ``EngineCoreService.Session``: hello up, ready down; then requests, aborts and utility calls up, one frame of
    outputs per step down. The engine says ``draining`` when it takes no new requests and ``engine_dead`` when it failed;
    a broken stream means the same.

    Lifecycle: ``open``, ``run`` until the stream ends, ``close``. Sending never blocks: a queue feeds the stream, and what
    is sent after the end goes nowhere. All callbacks run on the event loop.

    Neither end sends a message larger than the other said it takes. Large prompts of vectors go ahead in chunks, once for all
    requests that share them; a request that is too large ends as if the engine had refused it.
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
        revision: int = PROTOCOL_REVISION,
    ) -> None:
        """``on_draining``: called with the seconds until the engine ends what it has, None where it does not say.
        ``on_start_wave``: called, without a name of the rank, when the engine waits for others of its data-parallel group.
        ``media``: how media go to engines of this host; None: as to others. ``max_message_bytes``: the largest message either
        way, ``revision``: the newest, as far as this end is concerned.
        """
        self.address = address
        self._on_outputs = on_outputs
        self._on_draining = on_draining
        self._on_start_wave = on_start_wave
        # An engine of an earlier version does not heed what this end says it takes.
        most = max(max_message_bytes, DEFAULT_MAX_MESSAGE_BYTES)
        self._channel = make_channel(address, credentials=credentials, max_message_bytes=most)
        self._max_message_bytes = max_message_bytes
        self._limits = Limits(max_message_bytes, 0)
        self._transport = media or MediaTransport(incarnation, memory_id="")
        self._media: MediaSender | None = None
        self._revision = OLDEST_REVISION
        self._incoming = IncomingTensors(MAX_TENSOR_BYTES)
        self._outgoing: Outgoing[pb.SessionRequest] = Outgoing(_chunk)
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
                )
            )
        )
        self._stub: service_pb2_grpc.EngineCoreServiceAsyncStub = service_pb2_grpc.EngineCoreServiceStub(self._channel)
        self._call = self._stub.Session(self._requests())
        self._responses = aiter(self._call)
        self._call_ids = itertools.count(1)
        self._utility_calls: dict[int, asyncio.Future[Any]] = {}

    async def open(self) -> EngineReady:
        """Wait for the engine to greet back. Raises Unavailable when it cannot be reached or speaks another revision."""
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT):
                first = await anext(self._responses, None)
        except TimeoutError:
            raise Unavailable(f"engine at {self.address} did not answer within {_HANDSHAKE_TIMEOUT:g} s") from None
        except grpc.aio.AioRpcError as e:
            raise Unavailable(f"engine at {self.address}: {from_rpc_error(e).message}") from None
        if first is None or not first.HasField("ready"):
            raise Unavailable(f"engine at {self.address} did not begin with ready")
        if not OLDEST_REVISION <= first.ready.protocol_revision <= PROTOCOL_REVISION:
            raise Unavailable(
                f"engine at {self.address} speaks revision {first.ready.protocol_revision} of the session protocol; "
                f"this frontend speaks {OLDEST_REVISION} to {PROTOCOL_REVISION}"
            )
        self._revision = first.ready.protocol_revision
        ready = session_messages.engine_ready(first.ready)
        self._limits = Limits.of(self._max_message_bytes, ready.max_message_bytes, ready.max_tensor_bytes)
        self._outgoing.limit(self._limits)
        self._media = MediaSender(self._transport, ready, self._limits)
        return ready

    async def run(self) -> str:
        """Hand on what the engine says until it says no more. Returns why the stream ended."""
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
                elif kind == "media_cleared" and self._media is not None:
                    self._media.cleared()
                    self._queued.set()
                elif kind == "start_wave":
                    self._on_start_wave(start_wave_from_proto(response.start_wave, ""))
                elif kind == "engine_dead":
                    return f"the engine failed: {response.engine_dead.reason}"
        except grpc.aio.AioRpcError as e:
            return f"the connection broke: {e.details() or e.code().name}"
        return "the engine closed the session"

    def start_dp_wave(self, message: StartDpWave) -> None:
        """Have the engine, a rank of a data-parallel group, be in a wave."""
        self._put(pb.SessionRequest(start_dp_wave=wave_to_proto(message)))

    def add(self, request: EngineCoreRequest) -> None:
        """Start a request. One that the engine would not take ends with an ERROR output; nothing is raised."""
        self._put_request(request, 0)

    def _put_request(self, request: EngineCoreRequest, again: int) -> None:
        """Queue a request. ``again``: how often it was sent before to this engine, as the same attempt."""
        self._outgoing.put(
            partial(self._add, request, again), partial(self._tensors, request, again), key=request.request_id
        )
        self._queued.set()

    def _tensors(self, request: EngineCoreRequest, again: int) -> Sequence[Buffer]:
        """What has to go ahead of a request in chunks; nothing where that is too much: the request is refused then."""
        tensors = self._vectors(request)
        if request.mm_features and self._media is not None:
            tensors += self._media.in_chunks(request, again)
        return tensors if sum(map(len, tensors)) <= self._limits.max_tensor_bytes else ()

    def _vectors(self, request: EngineCoreRequest) -> list[Buffer]:
        embeds, limits = request.prompt_embeds, self._limits
        in_chunks = embeds is not None and limits.inline_bytes < len(embeds.data) <= limits.max_tensor_bytes
        return [embeds.data] if embeds is not None and in_chunks else []

    @property
    def media(self) -> MediaMirror | None:
        """What the engine keeps of media; None before ``open``."""
        return None if self._media is None else self._media.mirror

    def abort(self, request_ids: Sequence[str], reason: str) -> None:
        """End requests."""
        unsent = self._outgoing.discard(request_ids)
        if self._media is not None:
            self._media.forget(request_ids)
        if sent := [request_id for request_id in request_ids if request_id not in unsent]:
            self._put(pb.SessionRequest(abort=pb.Abort(request_ids=sent, reason=reason)))
        self._queued.set()

    async def call_utility(self, method: str, arguments: Sequence[object] = ()) -> Any:
        """Call a registered method of the engine; returns its result. Raises what it failed with."""
        call_id = next(self._call_ids)
        self._utility_calls[call_id] = asyncio.get_running_loop().create_future()
        call = pb.UtilityCall(call_id=call_id, method=method, arguments=msgspec.msgpack.encode(list(arguments)))
        self._put(pb.SessionRequest(utility=call))
        try:
            return await self._utility_calls[call_id]
        finally:
            del self._utility_calls[call_id]

    async def load(self, within: float) -> SchedulerStats | None:
        """The engine's load and whether it is wedged; None when it does not say so ``within`` seconds."""
        try:
            info = await self._stub.GetEngineInfo(pb.GetEngineInfoRequest(), timeout=within)
        except grpc.aio.AioRpcError:
            return None
        return stats.from_proto(info.scheduler_stats)

    async def close(self, reason: str = "the session was closed") -> None:
        """End the stream and the connection. Utility calls under way fail. Idempotent."""
        for future in self._utility_calls.values():
            if not future.done():
                future.set_exception(Unavailable(f"engine at {self.address}: {reason}", reason="ENGINE_GONE"))
        self._call.cancel()
        # Or the task that feeds the stream would wait until it is collected, and complain.
        self._closed = True
        self._queued.set()
        # gRPC ends that task only with a call that still runs: where none could begin, it would wait for ever.
        feeding: asyncio.Task[None] | None = self._call._async_request_poller  # type: ignore[attr-defined]
        if feeding is not None:
            feeding.cancel()
        if self._media is not None:
            self._media.close()
        await self._channel.close()

    def drop_stale(self) -> None:
        """Drop what has come of vectors whose rest does not come, and what nobody reads."""
        self._incoming.drop_stale()
        if self._media is not None:
            self._media.drop_stale()

    async def _requests(self) -> AsyncIterator[pb.SessionRequest]:
        while not self._closed:
            for drops in self._drops():
                yield drops
            if not self._outgoing:
                self._queued.clear()
                await self._queued.wait()
                continue
            try:
                message = self._outgoing.next()
            except _NotSentError:
                continue
            if message is None:
                continue
            for drops in self._drops():  # what makes room for this message; what is decided from now on goes behind it
                yield drops
            yield message

    def _drops(self) -> Sequence[pb.SessionRequest]:
        return () if self._media is None else self._media.take_drops()

    def _put(self, message: pb.SessionRequest) -> None:
        self._outgoing.put(lambda _: message)
        self._queued.set()

    def _add(self, request: EngineCoreRequest, again: int, refs: Sequence[TensorRef]) -> pb.SessionRequest:
        """The message of a request, when it is its turn. Raises _NotSentError for one that cannot be sent: it has ended then, or
        is queued again.
        """
        try:
            every_position = not self._limits.max_tensor_bytes
            ref = refs[0] if refs and self._vectors(request) else None
            if request.prompt_embeds is not None and ref is None:
                _check_vectors(request.prompt_embeds, self._limits, every_position=every_position)
            message = session_messages.add_request(request, ref, every_position=every_position)
            if self._revision < COLUMNS_SINCE:
                message.add.ClearField("request_number")
            if request.context.deadline is not None:
                message.add.time_left = request.context.deadline - time.time()  # the engine's clock may be another
            if request.mm_features and self._media is not None:
                self._media.fill(message.add, request, refs if ref is None else refs[1:], again)
            if (size := message.ByteSize()) > self._limits.max_message_bytes:
                raise InvalidArgument(
                    f"the request has {size} bytes; engines take messages of up to {self._limits.max_message_bytes}",
                    reason="MESSAGE_TOO_LARGE",
                )
        except NotWrittenError:
            self._put_request(request, again)
        except RequestFailed as e:
            self._refuse(request, e)
        except Exception as e:
            self._refuse(request, incident(e, request=request.context.external_request_id, doing="sending the request"))
        else:
            return message
        raise _NotSentError

    def _refuse(self, request: EngineCoreRequest, error: RequestFailed) -> None:
        if self._media is not None:
            self._media.not_sent(request)
        output = EngineCoreOutput(
            request_id=request.request_id,
            attempt=request.attempt,
            offset=len(request.prior_output_token_ids),
            finish_reason=FinishReason.ERROR,
            error=RequestError.from_exception(error),
        )
        self._on_outputs(EngineCoreOutputs(outputs=[output]))

    def _take(self, outputs: EngineCoreOutputs) -> None:
        if outputs.utility_output is not None:
            self._answer(outputs.utility_output)
        if self._media is not None:
            for request, again in self._media.take(outputs):
                self._put_request(request, again)
        self._on_outputs(outputs)

    def _answer(self, output: UtilityOutput) -> None:
        future = self._utility_calls.get(output.call_id)
        if future is None or future.done():
            return  # the caller gave up
        if output.error is not None:
            future.set_exception(output.error.to_exception())
            return
        try:
            future.set_result(msgspec.msgpack.decode(output.result) if output.result else None)
        except Exception as e:
            future.set_exception(session_messages.unreadable(e, f"utility call {output.call_id}"))


def _chunk(chunk: Chunk) -> pb.SessionRequest:
    return pb.SessionRequest(tensor_chunk=chunk_to_proto(chunk))


def _check_vectors(embeds: PromptEmbeds, limits: Limits, *, every_position: bool) -> None:
    """Raise InvalidArgument for vectors that are too large for chunks, or for a message where no chunks are taken."""
    size = embeds.num_tokens * embeds.row_bytes if every_position else len(embeds.data)
    limit = limits.max_tensor_bytes or limits.max_message_bytes
    if size > limit:
        raise InvalidArgument(
            f"the vectors of the prompt have {size} bytes; engines take up to {limit}",
            field="prompt",
            reason="MESSAGE_TOO_LARGE",
        )

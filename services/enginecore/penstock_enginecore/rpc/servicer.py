"""Implementation of the gRPC service ``penstock.enginecore.v1.EngineCoreService``."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc

from penstock.common.v1 import stats_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock.enginecore.v1 import service_pb2_grpc
from penstock_common.errors import InvalidArgument, RequestFailed, Unavailable, Unimplemented
from penstock_common.observability.logging import get_logger, incident
from penstock_common.rpc.by_field import to_message
from penstock_common.rpc.data_parallel import MAX_NUMBER, wave_from_proto
from penstock_common.rpc.handshake import OLDEST_REVISION, PROTOCOL_REVISION, first_message
from penstock_common.rpc.outputs import take_chunk
from penstock_common.types.data_parallel import StartDpWave
from penstock_common.types.media import MultiModalFeature
from penstock_common.types.outputs import EngineCoreOutput, EngineCoreOutputs, EngineReady, FinishReason, RequestError
from penstock_enginecore.core.busy_loop import BusyLoop
from penstock_enginecore.core.request import log_refused
from penstock_enginecore.data_parallel.core.group_channels import Refused
from penstock_enginecore.rpc import convert
from penstock_enginecore.rpc.frontend_sessions import FrontendSession, Sessions

log = get_logger()

Context = grpc.aio.ServicerContext[Any, Any]


class EngineCoreServicer(service_pb2_grpc.EngineCoreServiceServicer):
    """Serves the sessions of frontends. Before ``attach`` is called, the engine is loading its model, and sessions are
    refused with UNAVAILABLE.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._busy_loop: BusyLoop | None = None
        self._ready: EngineReady | None = None

    def attach(self, busy_loop: BusyLoop, ready: EngineReady) -> None:
        """Start to serve sessions, now that the model is loaded."""
        self._busy_loop, self._ready = busy_loop, ready
        self._sessions.on_refused = partial(busy_loop.abort, reason="an output of the request cannot be sent")

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        """Serve the stream of one frontend session. When the stream ends, the requests that it carried end as well."""
        busy_loop, ready = self._attached()
        hello = await _hello(request_iterator)
        revision = min(hello.protocol_revision, PROTOCOL_REVISION)
        session = self._sessions.open(hello, revision)
        log.info("a frontend opened its session", frontend=session.client_id)
        welcome = to_message(ready, pb.Ready, protocol_revision=revision)
        self._sessions.welcome(session, welcome, hello.shared_memory_probe)
        if hello.follows_cache:
            busy_loop.follow_cache(session.client_id)
        load = busy_loop.stats()
        # Send the statistics now, so that the frontend exports the metrics of adapters from the start. All other
        # statistics are sent with outputs.
        if load.wedged or load.lora is not None:
            session.put_outputs(EngineCoreOutputs(scheduler_stats=load))
        reader = asyncio.create_task(self._read(request_iterator, session, busy_loop))
        try:
            while (message := await session.next()) is not None:
                yield message
            if reader.done():
                reader.result()
        finally:
            reader.cancel()
            self._sessions.close(session)
            busy_loop.client_gone(session.client_id)
            log.info("the session of a frontend ended", frontend=session.client_id)

    async def _read(
        self, requests: AsyncIterator[pb.SessionRequest], session: FrontendSession, busy_loop: BusyLoop
    ) -> None:
        """Handle the frontend's messages, until the frontend ends the stream or violates the protocol. Then the session
        ends.
        """
        try:
            async for message in requests:
                try:
                    self._dispatch(message, session, busy_loop)
                except RequestFailed:  # End the session, because the frontend violated the protocol.
                    raise
                except Exception as e:
                    kind = message.WhichOneof("message")
                    incident(e, request="", doing=f"handling {kind} of frontend {session.client_id}")
        finally:
            session.close()

    def _dispatch(self, message: pb.SessionRequest, session: FrontendSession, busy_loop: BusyLoop) -> None:
        match message.WhichOneof("message"):
            case "add":
                self._add(message.add, session, busy_loop)
            case "abort":
                busy_loop.abort(session.client_id, list(message.abort.request_ids), message.abort.reason)
            case "handoff":
                busy_loop.hand_over(session.client_id, list(message.handoff.request_ids))
            case "utility":
                call = message.utility
                busy_loop.call_utility(session.client_id, call.call_id, call.method, call.arguments)
            case "tensor_chunk":
                take_chunk(session.prompts.tensors, message.tensor_chunk)
            case "drop_media":
                if session.features is not None:
                    session.features.kept.drop(message.drop_media.identifiers)
            case "start_dp_wave":
                busy_loop.group_changed(wave_from_proto(message.start_dp_wave, StartDpWave, ""))
            case "hello":
                raise InvalidArgument(
                    "the session has a second SessionRequest with the field hello; only the first may have this field",
                    field="hello",
                )
            case _:
                raise InvalidArgument(
                    "the message is empty: set one of add, abort, utility, tensor_chunk", field="message"
                )

    def _add(self, message: pb.EngineCoreRequest, session: FrontendSession, busy_loop: BusyLoop) -> None:
        try:
            features = _features(message, session)
            request = convert.request_from_proto(message, session.prompts.read(message), features)
            if self._sessions.traces is not None:
                self._sessions.traces.add(session.client_id, request)
            busy_loop.add(session.client_id, request)
        except Exception as e:
            session.prompts.discard(message)
            if isinstance(e, RequestFailed):
                failed: RequestFailed = e
                log_refused(message.request_id, message.external_request_id, failed)
            else:
                name = message.external_request_id or message.request_id
                failed = incident(e, request=name, doing="reading the request")
            output = EngineCoreOutput(
                request_id=message.request_id,
                attempt=message.attempt,
                offset=len(message.prior_output_token_ids),
                finish_reason=FinishReason.ERROR,
                error=RequestError.from_exception(failed),
            )
            self._sessions.emit(session.client_id, EngineCoreOutputs(outputs=[output]))
            busy_loop.group_changed(Refused(message.group_epoch, min(message.current_wave, MAX_NUMBER)))

    async def GetEngineInfo(self, request: pb.GetEngineInfoRequest, context: Context) -> pb.GetEngineInfoResponse:
        """Return the engine's identity and load."""
        busy_loop, ready = self._attached()
        return pb.GetEngineInfoResponse(
            ready=to_message(ready, pb.Ready, protocol_revision=PROTOCOL_REVISION),
            scheduler_stats=to_message(busy_loop.stats(), stats_pb2.SchedulerStats),
        )

    def _attached(self) -> tuple[BusyLoop, EngineReady]:
        if self._sessions.dead is not None:
            raise Unavailable(f"the engine has failed: {self._sessions.dead}", reason="ENGINE_DEAD")
        if self._busy_loop is None or self._ready is None:
            raise Unavailable("the engine is still loading its model", reason="ENGINE_LOADING", retry_after=1.0)
        return self._busy_loop, self._ready


def _features(message: pb.EngineCoreRequest, session: FrontendSession) -> list[MultiModalFeature]:
    """Return a request's media items with their data. Raises RequestFailed if the engine accepts no media or the media
    cannot be read.
    """
    if session.features is not None:
        return session.features.read(message)
    if message.mm_features:
        raise Unimplemented("mm_features is set; this engine accepts no media", field="mm_features")
    return []


async def _hello(requests: AsyncIterator[pb.SessionRequest]) -> pb.Hello:
    message = await first_message(requests, "hello")
    if message is None or message.WhichOneof("message") != "hello":
        raise InvalidArgument(
            "the first message of Session must be a SessionRequest with the field hello", field="hello"
        )
    hello = message.hello
    if hello.protocol_revision < OLDEST_REVISION:
        raise InvalidArgument(
            f"hello.protocol_revision is {hello.protocol_revision}; "
            f"this engine supports {OLDEST_REVISION} to {PROTOCOL_REVISION}",
            field="hello.protocol_revision",
        )
    if not hello.frontend_id:
        raise InvalidArgument("hello.frontend_id is empty", field="hello.frontend_id")
    return hello

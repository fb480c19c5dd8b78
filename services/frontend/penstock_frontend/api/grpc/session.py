"""GenerateSession: many requests on one stream."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import NamedTuple

from penstock.common.v1 import finish_pb2, stats_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.config.reread import Reread
from penstock_common.errors import InvalidArgument, RequestFailed, ResourceExhausted, quoted
from penstock_common.observability.incidents import incident
from penstock_common.rpc.interceptor import check_response_size
from penstock_common.rpc.outputs import error_to_proto
from penstock_common.types.outputs import RequestError
from penstock_frontend.api.call_context import tenant_of_message
from penstock_frontend.api.grpc import generate_messages
from penstock_frontend.call_types import GenerateRequest
from penstock_frontend.calls.admission import InFlight, demand_of
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.calls.live_request import LiveRequest
from penstock_frontend.config import LimitsConfig

_MAX_QUEUED = 16
"""Messages that wait to be written. What comes while they do is merged in the requests' collectors."""


class _Running(NamedTuple):
    """A request of the session, and the task that serves it."""

    live: LiveRequest
    task: asyncio.Task[None]


class GenerateSession:
    """One client's stream: a task reads it, each request has a task, and ``responses`` is what is written.

    A request's task puts one output at a time and waits for room, so a client that reads slowly costs memory proportional
    to the outputs of its requests, and holds up nobody else. An aborted request ends like any other, with a last output;
    its finish reason is ABORT. The stream ends when its client has half-closed it and the last request has ended.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        *,
        metadata: Mapping[str, str],
        time_left: Callable[[], float | None],
        limits: Reread[LimitsConfig],
        max_response_bytes: int,
    ) -> None:
        """``time_left``: seconds until the call's deadline, which is that of each request. A request with a larger response than
        ``max_response_bytes`` ends, alone.
        """
        self._llm = llm
        self._metadata = metadata
        self._time_left = time_left
        self._limits = limits
        self._max_response_bytes = max_response_bytes
        self._running: dict[str, _Running] = {}
        self._in_flight = InFlight()
        self._out: asyncio.Queue[pb.GenerateSessionResponse | None] = asyncio.Queue(_MAX_QUEUED)
        self._main: asyncio.Task[None] | None = None

    async def responses(
        self, requests: AsyncIterator[pb.GenerateSessionRequest]
    ) -> AsyncIterator[pb.GenerateSessionResponse]:
        """What the stream answers to ``requests``."""
        self._main = asyncio.create_task(self._serve(requests), name="generate session")
        try:
            while (response := await self._out.get()) is not None:
                yield response
            await self._main
        finally:
            self.close()

    def close(self) -> None:
        """The call is over: end everything it started. Idempotent."""
        if self._main is not None:
            self._main.cancel()
        for running in self._running.values():
            running.task.cancel()
            self._llm.release(running.live)
        self._running.clear()

    async def _serve(self, requests: AsyncIterator[pb.GenerateSessionRequest]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                messages = aiter(requests)
                while True:
                    try:
                        message = await anext(messages)
                    except StopAsyncIteration:
                        break
                    except RequestFailed as e:  # a message that cannot be read: nobody knows whose it is
                        await self._fail("", e)
                        continue
                    await self._answer(message, tasks)
        except (
            ExceptionGroup
        ) as e:  # the stream's own failure, no request's; reaches the call's end through ``responses``
            await self._out.put(None)
            raise e.exceptions[0] from None
        await self._out.put(None)

    async def _answer(self, message: pb.GenerateSessionRequest, tasks: asyncio.TaskGroup) -> None:
        """Act on one message; whatever it is, the requests of others go on."""
        request_id = message.generate.request_id or message.abort_request_id
        try:
            await self._take(message, tasks)
        except RequestFailed as e:
            await self._fail(request_id, e)
        except Exception as e:
            await self._fail(request_id, incident(e, request=request_id, doing="reading a message of a session"))

    async def _take(self, message: pb.GenerateSessionRequest, tasks: asyncio.TaskGroup) -> None:
        """Act on one message. Raises RequestFailed when the request that it starts is refused."""
        kind = message.WhichOneof("message")
        if kind == "abort_request_id":
            await self._abort(message.abort_request_id)
            return
        if kind != "generate":
            raise InvalidArgument("message is not set: give generate or abort_request_id", field="message")
        if not message.generate.request_id:
            raise InvalidArgument("request_id is empty; in a session each request must have one", field="request_id")
        if message.generate.request_id in self._running:
            raise InvalidArgument(
                f"request_id is {quoted(message.generate.request_id)}, which a running request of this session has",
                field="request_id",
                reason="DUPLICATE_REQUEST_ID",
            )
        if len(self._running) >= (limit := self._limits.now.max_session_requests):
            refusal = ResourceExhausted(
                f"{len(self._running)} requests of this session are running; limits.max_session_requests is {limit}",
                retry_after=self._in_flight.retry_after(1),
            )
            tenant = tenant_of_message(message.generate.routing, self._metadata)
            self._llm.refused(refusal, tenant, message.generate.request_id)
            raise refusal
        request = generate_messages.generate_request(
            message.generate, metadata=self._metadata, time_left=self._time_left(), limits=self._limits.now
        )
        live = self._llm.accept(request.context.external_request_id, demand_of(request))
        self._in_flight.enter()
        self._running[live.request_id] = _Running(live, tasks.create_task(self._run(request, live)))

    async def _abort(self, request_id: str) -> None:
        """End a request; one that has ended meanwhile is none any more."""
        running = self._running.get(request_id)
        if running is None or self._llm.abort(running.live):
            return
        # It is not on its way to an engine yet: there is no output but this.
        running.task.cancel()
        self._end(running.live)
        last = pb.GenerateResponse(request_id=request_id, finish_reason=finish_pb2.FINISH_REASON_ABORT)
        last.usage.CopyFrom(stats_pb2.Usage())
        await self._out.put(pb.GenerateSessionResponse(output=last))

    async def _run(self, request: GenerateRequest, live: LiveRequest) -> None:
        """Serve one request to its end; whatever that is, the others go on."""
        try:
            async for output in self._llm.generate(request, live):
                if live.released:
                    self._end(live)  # with this output: the id is free when its client reads it
                response = pb.GenerateSessionResponse(
                    output=generate_messages.generate_response(output, live.request_id)
                )
                check_response_size(response, self._max_response_bytes)
                await self._out.put(response)
        except RequestFailed as e:
            self._end(live)
            await self._fail(live.request_id, e)
        except Exception as e:
            self._end(live)
            await self._fail(live.request_id, incident(e, request=live.request_id, doing="serving the request"))

    async def _fail(self, request_id: str, error: RequestFailed) -> None:
        failed = pb.SessionError(request_id=request_id, error=error_to_proto(RequestError.from_exception(error)))
        await self._out.put(pb.GenerateSessionResponse(error=failed))

    def _end(self, live: LiveRequest) -> None:
        self._llm.release(live)
        running = self._running.get(live.request_id)
        if running is not None and running.live is live:
            del self._running[live.request_id]
            self._in_flight.leave()

"""Public gRPC API, ``penstock.inference.v1.InferenceService``. The method GenerateSession serves many requests on one
stream.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import grpc

from penstock.common.v1 import finish_pb2, stats_pb2
from penstock.common.v1.media_pb2 import MediaLimits
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2, service_pb2_grpc
from penstock_common.config.settings import Reread
from penstock_common.errors import InvalidArgument, NotFound, RequestFailed, ResourceExhausted, quoted
from penstock_common.observability.logging import incident, peer_address
from penstock_common.rpc.by_field import to_message
from penstock_common.rpc.interceptor import check_response_size
from penstock_common.types.outputs import RequestError
from penstock_common.types.request import PoolingTask
from penstock_frontend.api.call_context import tenant_of_message
from penstock_frontend.api.grpc import messages, speech_messages
from penstock_frontend.api.grpc.servicers import media_limits, refuses_unserved
from penstock_frontend.call_types import ChatRequest, GenerateRequest, caller_named
from penstock_frontend.call_warnings import CallWarnings, WarningLog
from penstock_frontend.calls.admission import InFlight, demand_of
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.calls.live_request import LiveRequest
from penstock_frontend.config import LimitsConfig
from penstock_frontend.dispatch.adapters import NamedAdapter
from penstock_frontend.served_models import ServedModel, ServedModels
from penstock_frontend.speech.calls import required

R = TypeVar("R", GenerateRequest, ChatRequest)
Out = TypeVar("Out")

# The code below serves GenerateSession, which has many requests on one stream.

_MAX_QUEUED = 16
"""Maximum number of responses that wait to be sent. When this many responses wait, the new outputs of requests are
merged.
"""


class _Running(NamedTuple):
    """A request of a session, and the task that serves this request."""

    llm: AsyncLLM
    live: LiveRequest
    task: asyncio.Task[None]


class GenerateSession:
    """Stream of one client with many requests. One task reads the stream, one task serves each request, and
    ``responses`` yields the answers.

    A request's task adds one output at a time to the queue, and waits while the queue is full. A slow client therefore
    uses memory in proportion to the outputs of its requests, and delays no other client. An aborted request ends with
    an output whose finish reason is ABORT. The stream ends when the client has half-closed it and the last request has
    ended.
    """

    def __init__(
        self,
        models: ServedModels,
        *,
        metadata: Mapping[str, str],
        time_left: Callable[[], float | None],
        limits: Reread[LimitsConfig],
        max_response_bytes: int,
    ) -> None:
        """Create the session for one GenerateSession call. ``time_left`` returns the seconds until the call's deadline,
        which applies to each request.

        If a response of a request exceeds ``max_response_bytes``, this request fails, and the session continues.
        """
        self._models = models
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
        """Yield the answers to the messages in ``requests``."""
        self._main = asyncio.create_task(self._serve(requests), name="generate session")
        try:
            while (response := await self._out.get()) is not None:
                yield response
            await self._main
        finally:
            self.close()

    def close(self) -> None:
        """End all requests and tasks of the session. Idempotent."""
        if self._main is not None:
            self._main.cancel()
        for running in self._running.values():
            running.task.cancel()
            running.llm.release(running.live)
        self._running.clear()

    async def _serve(self, requests: AsyncIterator[pb.GenerateSessionRequest]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                incoming = aiter(requests)
                while True:
                    try:
                        message = await anext(incoming)
                    except StopAsyncIteration:
                        break
                    except RequestFailed as e:
                        # the message cannot be read, so it is not known which request it is about
                        await self._fail("", e)
                        continue
                    await self._answer(message, tasks)
        except ExceptionGroup as e:  # the stream has failed, not a request; ``responses`` raises this error at its end
            await self._out.put(None)
            raise e.exceptions[0] from None
        await self._out.put(None)

    async def _answer(self, message: pb.GenerateSessionRequest, tasks: asyncio.TaskGroup) -> None:
        """Process one message of the client. An error affects no other request of the session."""
        request_id = message.generate.request_id or message.abort_request_id
        try:
            await self._take(message, tasks)
        except RequestFailed as e:
            await self._fail(request_id, e)
        except Exception as e:
            await self._fail(
                request_id, incident(e, request=request_id, doing="reading a message of a client's session")
            )

    async def _take(self, message: pb.GenerateSessionRequest, tasks: asyncio.TaskGroup) -> None:
        """Process one message of the client. If the message starts a request that is refused, raises RequestFailed."""
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
                f"request_id is {quoted(message.generate.request_id)}, which a running request of this session "
                "already has",
                field="request_id",
                reason="DUPLICATE_REQUEST_ID",
            )
        llm = self._models.of(message.generate.model, message.generate.lora).llm
        if len(self._running) >= (limit := self._limits.now.max_session_requests):
            refusal = ResourceExhausted(
                f"{len(self._running)} requests of this session are running; limits.max_session_requests is {limit}",
                retry_after=self._in_flight.retry_after(1),
            )
            tenant = tenant_of_message(message.generate.routing, self._metadata)
            llm.refused(refusal, tenant, message.generate.request_id)
            raise refusal
        request = messages.generate_request(
            message.generate, metadata=self._metadata, time_left=self._time_left(), limits=self._limits.now
        )
        live = llm.accept(request.context.external_request_id, demand_of(request))
        self._in_flight.enter()
        self._running[live.request_id] = _Running(llm, live, tasks.create_task(self._run(llm, request, live)))

    async def _abort(self, request_id: str) -> None:
        """Abort a request. Do nothing if the request has already ended."""
        running = self._running.get(request_id)
        if running is None or running.llm.abort(running.live):
            return
        # The request has not been sent to an engine, so this message is its only output.
        running.task.cancel()
        self._end(running.llm, running.live)
        last = pb.GenerateResponse(request_id=request_id, finish_reason=finish_pb2.FINISH_REASON_ABORT)
        last.usage.CopyFrom(stats_pb2.Usage())
        await self._out.put(pb.GenerateSessionResponse(output=last))

    async def _run(self, llm: AsyncLLM, request: GenerateRequest, live: LiveRequest) -> None:
        """Serve one request until it ends. An error affects no other request of the session."""
        try:
            async for output in llm.generate(request, live):
                if live.released:
                    # free the id before this output is sent, so that the client can use the id again when it reads the
                    # output
                    self._end(llm, live)
                response = pb.GenerateSessionResponse(output=messages.generate_response(output, live.request_id))
                check_response_size(response, self._max_response_bytes)
                await self._out.put(response)
        except RequestFailed as e:
            self._end(llm, live)
            await self._fail(live.request_id, e)
        except Exception as e:
            self._end(llm, live)
            await self._fail(live.request_id, incident(e, request=live.request_id, doing="serving the request"))

    async def _fail(self, request_id: str, error: RequestFailed) -> None:
        failed = pb.SessionError(
            request_id=request_id, error=to_message(RequestError.from_exception(error), finish_pb2.RequestError)
        )
        await self._out.put(pb.GenerateSessionResponse(error=failed))

    def _end(self, llm: AsyncLLM, live: LiveRequest) -> None:
        llm.release(live)
        running = self._running.get(live.request_id)
        if running is not None and running.live is live:
            del self._running[live.request_id]
            self._in_flight.leave()


_SERVICE = service_pb2.DESCRIPTOR.services_by_name["InferenceService"]
SERVICE_NAME = _SERVICE.full_name

add_to_server = service_pb2_grpc.add_InferenceServiceServicer_to_server
Context = grpc.aio.ServicerContext[Any, Any]


@refuses_unserved(_SERVICE)
class InferenceServicer(service_pb2_grpc.InferenceServiceServicer):
    """Converts gRPC calls into requests of the model that the call names. The interceptor of the server converts errors
    into gRPC statuses.
    """

    def __init__(
        self, models: ServedModels, limits: Reread[LimitsConfig], warnings: WarningLog, *, max_response_bytes: int
    ) -> None:
        self._models = models
        self._warnings = warnings
        self._limits = limits
        self._max_response_bytes = max_response_bytes

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Generate a continuation of a prompt, and stream the output. Warnings are sent as initial metadata."""
        llm = self._models.of(request.model, request.lora).llm
        warnings = self._warnings.begin(_caller(context))
        converted = messages.generate_request(request, **_call(context), limits=self._limits.now)
        async for output, request_id in _outputs(llm, converted, llm.generate, context, warnings):
            yield messages.generate_response(output, request_id)

    async def GenerateSession(
        self, request_iterator: AsyncIterator[pb.GenerateSessionRequest], context: Context
    ) -> AsyncIterator[pb.GenerateSessionResponse]:
        """Serve many requests of a client on one stream. Each request may name another model."""
        session = GenerateSession(
            self._models,
            metadata=_metadata(context),
            time_left=context.time_remaining,
            limits=self._limits,
            max_response_bytes=self._max_response_bytes,
        )
        context.add_done_callback(lambda _: session.close())  # type: ignore[arg-type]  # its stub is no Protocol
        async for response in session.responses(request_iterator):
            yield response

    async def Chat(self, request: pb.ChatRequest, context: Context) -> AsyncIterator[pb.ChatResponse]:
        """Generate the next message of a conversation, and stream the message. Warnings are sent as initial metadata."""
        model = self._models.of(request.model, request.lora)
        warnings = self._warnings.begin(_caller(context))
        converted = messages.chat_request(request, **_call(context), limits=self._limits.now)
        async for output, request_id in _outputs(model.llm, converted, model.chat.run, context, warnings):
            yield messages.chat_response(output, request_id)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Return the embeddings of the inputs in a request."""
        llm = self._models.of(request.model, request.lora).llm
        llm.pooling.inputs.check_count(len(request.inputs), field="inputs")
        prompts = llm.pooling.inputs.prompts
        converted = messages.embed_request(request, **_call(context), limits=self._limits.now, prompts=prompts)
        return messages.embed_response(*await llm.run_pooling(converted))

    async def Classify(self, request: pb.ClassifyRequest, context: Context) -> pb.ClassifyResponse:
        """Return the classes of the inputs in a request."""
        model = self._models.of(request.model, request.lora)
        model.llm.pooling.inputs.check_count(len(request.inputs), field="inputs")
        converted = messages.classify_request(request, **_call(context), limits=self._limits.now)
        result, request_id = await model.llm.run_pooling(converted)
        per_token = converted.params.task is PoolingTask.TOKEN_CLASSIFY
        return messages.classify_response(result, request_id, per_token=per_token, labels=model.labels)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """Return the scores of pairs of texts. The scores are those of a cross-encoder, or cosine similarities of
        embeddings.
        """
        model = self._models.of(request.model, request.lora)
        model.llm.pooling.inputs.check_count(len(request.documents), field="documents")
        converted = messages.score_request(request, **_call(context), prompts=model.llm.pooling.inputs.prompts)
        return messages.score_response(await model.scoring.run(converted))

    async def Transcribe(self, request: pb.TranscribeRequest, context: Context) -> AsyncIterator[pb.TranscribeResponse]:
        """Transcribe an audio file, and stream the text and the transcript."""
        model = self._models.of(request.model, request.lora)
        speech = required(model.speech, model.name)
        stream = speech.stream(speech_messages.transcription_request(request, **_call(context)))
        context.add_done_callback(lambda _: stream.close())  # type: ignore[arg-type]  # its stub is no Protocol
        async for item in stream:
            yield speech_messages.transcribe_response(item)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Return the token ids of a text."""
        llm = self._models.of(request.model).llm
        llm.inputs.check_model(request.model)
        add = request.add_special_tokens if request.HasField("add_special_tokens") else True
        encoded = await llm.encode(request.text, add_special_tokens=add, with_tokens=True)
        limits = llm.engines.view.limits
        return pb.TokenizeResponse(
            token_ids=encoded.ids, tokens=encoded.tokens, max_model_len=limits.max_model_len if limits else 0
        )

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Return the text that token ids stand for."""
        llm = self._models.of(request.model).llm
        llm.inputs.check_model(request.model)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return pb.DetokenizeResponse(text=await llm.decode(request.token_ids, skip_special_tokens=skip))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """Return the models and the LoRA adapters that this frontend serves."""
        return pb.ListModelsResponse(models=[each for model in self._models for each in self._all_of(model)])

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """Return the model or LoRA adapter with this name."""
        if not request.name:
            raise NotFound(f"name is not set; known: {', '.join(self._models.names)}", field="name")
        model = self._models.of(request.name, field="name")
        model.llm.inputs.check_model(request.name, field="name")
        return pb.GetModelResponse(model=self._named(model, request.name) or self._describe(model))

    def _all_of(self, model: ServedModel) -> Iterator[pb.Model]:
        adapters = model.llm.adapters.adapters
        yield self._describe(model)
        yield from (self._adapter(model, named) for named in adapters.all())
        yield from filter(None, (self._named(model, name) for name in adapters.aliases))

    def _named(self, model: ServedModel, name: str) -> pb.Model | None:
        """Return the model or LoRA adapter with this name. Return None for an alias whose adapter does not exist."""
        adapters = model.llm.adapters.adapters
        adapter = adapters.get(name)
        if adapter is None and adapters.aliases.get(name, name) != model.name:
            return None
        described = self._describe(model) if adapter is None else self._adapter(model, adapter)
        described.name = name
        return described

    def _adapter(self, model: ServedModel, named: NamedAdapter) -> pb.Model:
        """Return the message that describes a LoRA adapter as a model."""
        described = self._describe(model)
        described.name, described.root, described.revision = named.name, named.adapter.path, ""
        described.parent = model.name
        return described

    def _describe(self, model: ServedModel) -> pb.Model:
        llm, engines = model.llm, model.llm.engines.view
        limits = engines.limits
        return pb.Model(
            name=model.name,
            root=model.config.path,
            revision=model.config.revision,
            max_model_len=limits.max_model_len if limits else 0,
            capabilities=[*engines.capabilities, *([] if model.speech is None else ["transcribe"])],
            num_engines=engines.num_engines,
            vocab_size=llm.vocab_size,
            media=[to_message(each, MediaLimits) for each in media_limits(llm, self._limits.now)],
        )


async def _outputs(
    llm: AsyncLLM,
    request: R,
    run: Callable[[R, LiveRequest], AsyncIterator[Out]],
    context: Context,
    warnings: CallWarnings,
) -> AsyncIterator[tuple[Out, str]]:
    """Yield the outputs of one request, each with the request id. Send the warnings before the first output."""
    live = llm.accept(request.context.external_request_id, demand_of(request))
    # A call may be cancelled at any await, for example while a slow client reads a message. Only the done callback
    # runs in every case.
    context.add_done_callback(lambda _: llm.release(live))  # type: ignore[arg-type]  # its stub is no Protocol
    begun = False
    async for output in run(request, live):
        if not begun and warnings.headers:
            await context.send_initial_metadata(tuple(warnings.headers.items()))
        begun = True
        yield output, live.request_id


def _caller(context: Context) -> str:
    """Return the name of the caller for logs. The port of an address is left out, because each connection has another
    port.
    """
    host, _, _ = peer_address(context.peer()).rpartition(":")
    return caller_named(host.strip("[]") or "local")


def _call(context: Context) -> dict[str, Any]:
    return {"metadata": _metadata(context), "time_left": context.time_remaining()}


def _metadata(context: Context) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}

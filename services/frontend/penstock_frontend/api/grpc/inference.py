"""The public API, ``penstock.inference.v1.InferenceService``."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2, service_pb2_grpc
from penstock_common.config.reread import Reread
from penstock_common.errors import NotFound
from penstock_common.observability.caller import peer_address
from penstock_common.rpc.media import limits_to_proto
from penstock_common.types.pooling import PoolingTask
from penstock_frontend.api.grpc import chat_messages, generate_messages, pooling_messages
from penstock_frontend.api.grpc.session import GenerateSession
from penstock_frontend.api.grpc.unserved import refuses_unserved
from penstock_frontend.api.media_limits import media_limits
from penstock_frontend.auth.principal import caller_named
from penstock_frontend.calls.admission import demand_of
from penstock_frontend.calls.chat import ChatCalls
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.calls.scoring import ScoringCalls
from penstock_frontend.config import FrontendConfig, LimitsConfig
from penstock_frontend.dispatch.adapters import NamedAdapter
from penstock_frontend.telemetry.call_warnings import WarningLog

_SERVICE = service_pb2.DESCRIPTOR.services_by_name["InferenceService"]
SERVICE_NAME = _SERVICE.full_name

Context = grpc.aio.ServicerContext[Any, Any]


@refuses_unserved(_SERVICE)
class InferenceServicer(service_pb2_grpc.InferenceServiceServicer):
    """Turns calls into requests of the AsyncLLM. Errors become statuses in the server's interceptor."""

    def __init__(
        self,
        llm: AsyncLLM,
        chat: ChatCalls,
        config: FrontendConfig,
        limits: Reread[LimitsConfig],
        labels: Sequence[str],
        warnings: WarningLog,
    ) -> None:
        self._llm = llm
        self._warnings = warnings
        self._chat = chat
        self._labels = labels
        self._model = config.model
        self._limits = limits
        self._scoring = ScoringCalls(llm)
        self._max_response_bytes = config.server.max_message_bytes

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Continues a prompt; the output is streamed. Warnings are initial metadata."""
        warnings = self._warnings.begin(_caller(context))
        converted = generate_messages.generate_request(request, **_call(context), limits=self._limits.now)
        live = self._llm.accept(converted.context.external_request_id, demand_of(converted))
        # A call may end anywhere, also while a message waits for a slow client to read: only its end is sure to come.
        context.add_done_callback(lambda _: self._llm.release(live))  # type: ignore[arg-type]  # its stub is no Protocol
        begun = False
        async for output in self._llm.generate(converted, live):
            if not begun and warnings.headers:
                await context.send_initial_metadata(tuple(warnings.headers.items()))
            begun = True
            yield generate_messages.generate_response(output, live.request_id)

    async def GenerateSession(
        self, request_iterator: AsyncIterator[pb.GenerateSessionRequest], context: Context
    ) -> AsyncIterator[pb.GenerateSessionResponse]:
        """Many requests on one stream."""
        session = GenerateSession(
            self._llm,
            metadata=_metadata(context),
            time_left=context.time_remaining,
            limits=self._limits,
            max_response_bytes=self._max_response_bytes,
        )
        context.add_done_callback(lambda _: session.close())  # type: ignore[arg-type]  # its stub is no Protocol
        async for response in session.responses(request_iterator):
            yield response

    async def Chat(self, request: pb.ChatRequest, context: Context) -> AsyncIterator[pb.ChatResponse]:
        """Answers a conversation; the answer is streamed. Warnings are initial metadata."""
        warnings = self._warnings.begin(_caller(context))
        converted = chat_messages.chat_request(request, **_call(context), limits=self._limits.now)
        live = self._llm.accept(converted.context.external_request_id, demand_of(converted))
        context.add_done_callback(lambda _: self._llm.release(live))  # type: ignore[arg-type]  # its stub is no Protocol
        begun = False
        async for output in self._chat.run(converted, live):
            if not begun and warnings.headers:
                await context.send_initial_metadata(tuple(warnings.headers.items()))
            begun = True
            yield chat_messages.chat_response(output, live.request_id)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Vectors of the inputs."""
        self._llm.pooling.inputs.check_count(len(request.inputs), field="inputs")
        return pooling_messages.embed_response(
            *await self._llm.run_pooling(
                pooling_messages.embed_request(request, **_call(context), limits=self._limits.now)
            )
        )

    async def Classify(self, request: pb.ClassifyRequest, context: Context) -> pb.ClassifyResponse:
        """Classes of the inputs."""
        self._llm.pooling.inputs.check_count(len(request.inputs), field="inputs")
        converted = pooling_messages.classify_request(request, **_call(context), limits=self._limits.now)
        result, request_id = await self._llm.run_pooling(converted)
        per_token = converted.params.task is PoolingTask.TOKEN_CLASSIFY
        return pooling_messages.classify_response(result, request_id, per_token=per_token, labels=self._labels)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """Scores of pairs: by the model where it reads pairs, else the cosines of their vectors."""
        self._llm.pooling.inputs.check_count(len(request.documents), field="documents")
        converted = pooling_messages.score_request(request, **_call(context))
        return pooling_messages.score_response(await self._scoring.run(converted))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Text to token ids."""
        self._llm.inputs.check_model(request.model)
        add = request.add_special_tokens if request.HasField("add_special_tokens") else True
        encoded = await self._llm.encode(request.text, add_special_tokens=add, with_tokens=True)
        limits = self._llm.engines.view.limits
        return pb.TokenizeResponse(
            token_ids=encoded.ids, tokens=encoded.tokens, max_model_len=limits.max_model_len if limits else 0
        )

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Token ids to text."""
        self._llm.inputs.check_model(request.model)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return pb.DetokenizeResponse(text=await self._llm.decode(request.token_ids, skip_special_tokens=skip))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """The models that are served."""
        adapters = self._llm.adapters.adapters
        aliases = (self._named(name) for name in adapters.aliases)
        return pb.ListModelsResponse(
            models=[self._describe(), *map(self._adapter, adapters.all()), *filter(None, aliases)]
        )

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """One of them."""
        if not request.name:
            raise NotFound(f"name is not set; known: {self._model.name}", field="name")
        self._llm.inputs.check_model(request.name, field="name")
        return pb.GetModelResponse(model=self._named(request.name) or self._describe())

    def _named(self, name: str) -> pb.Model | None:
        """A model under one of its names; None for an alias of an adapter that there is not."""
        adapters = self._llm.adapters.adapters
        adapter = adapters.get(name)
        if adapter is None and adapters.aliases.get(name, name) != self._model.name:
            return None
        model = self._describe() if adapter is None else self._adapter(adapter)
        model.name = name
        return model

    def _adapter(self, named: NamedAdapter) -> pb.Model:
        """A LoRA adapter as the model that requests can name."""
        model = self._describe()
        model.name, model.root, model.revision, model.parent = named.name, named.adapter.path, "", model.name
        return model

    def _describe(self) -> pb.Model:
        engines = self._llm.engines.view
        limits = engines.limits
        return pb.Model(
            name=self._model.name,
            root=self._model.path,
            revision=self._model.revision,
            max_model_len=limits.max_model_len if limits else 0,
            capabilities=engines.capabilities,
            num_engines=engines.num_engines,
            vocab_size=self._llm.vocab_size,
            media=limits_to_proto(media_limits(self._llm, self._limits.now)),
        )


def add_to_server(
    server: grpc.aio.Server,
    llm: AsyncLLM,
    chat_calls: ChatCalls,
    config: FrontendConfig,
    limits: Reread[LimitsConfig],
    labels: Sequence[str],
    warnings: WarningLog,
) -> None:
    """Serve the public API of ``llm`` on ``server``. ``labels``: names of the model's classes, in order; ``warnings``: of the
    calls of all protocols.
    """
    servicer = InferenceServicer(llm, chat_calls, config, limits, labels, warnings)
    service_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)


def _caller(context: Context) -> str:
    """Who calls, for logs: the port of an address is another one with every connection."""
    host, _, _ = peer_address(context.peer()).rpartition(":")
    return caller_named(host.strip("[]") or "local")


def _call(context: Context) -> dict[str, Any]:
    return {"metadata": _metadata(context), "time_left": context.time_remaining()}


def _metadata(context: Context) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}

"""The frontend process: what it is made of, and how it starts and stops."""

import asyncio
import signal
import time
import uuid

import grpc
from starlette.middleware import Middleware
from starlette.routing import Route

from penstock_common.metrics_server import MetricsServer
from penstock_common.observability.logging import get_logger
from penstock_common.observability.metrics import count_tasks
from penstock_common.observability.tracer import make_tracer
from penstock_common.rpc.calls import CallTelemetry
from penstock_common.rpc.credentials import ClientCredentials
from penstock_common.rpc.guard import CallerGuard, PeerGuard
from penstock_common.rpc.in_flight import MessagesInFlight
from penstock_common.rpc.liveness import Liveness
from penstock_common.rpc.server import RpcServer
from penstock_frontend.api.authentication import OPERATORS_METHODS, HttpAuthentication, grpc_check
from penstock_frontend.api.grpc import admin, inference
from penstock_frontend.api.http.page import Page
from penstock_frontend.api.http.server import HttpServer, make_app
from penstock_frontend.api.http.telemetry import HttpTelemetry
from penstock_frontend.api.openai import app as openai
from penstock_frontend.api.vllm import engine as vllm_engine
from penstock_frontend.async_llm import AsyncLLM
from penstock_frontend.auth.authenticator import Authenticator
from penstock_frontend.chat_calls import ChatCalls
from penstock_frontend.config import FrontendConfig
from penstock_frontend.engine.client import GrpcEngineClient
from penstock_frontend.engine.kv_events import KvEventFeed
from penstock_frontend.metrics import FrontendMetrics
from penstock_frontend.observe import RequestObserver
from penstock_frontend.pooling_calls import PoolingCalls
from penstock_frontend.processing.chat.reasoning import reasoning_of
from penstock_frontend.processing.chat.rendering import ChatRenderer
from penstock_frontend.processing.chat.templates import load_chat_templates
from penstock_frontend.processing.outputs.processor import OutputProcessor
from penstock_frontend.processing.parsers import registry
from penstock_frontend.processing.pooling.inputs import PoolingInputs, load_labels
from penstock_frontend.processing.pooling.outputs import PooledOutputs, SplitOutputs
from penstock_frontend.processing.prompts.input import InputProcessor
from penstock_frontend.processing.prompts.model_card import load_model_card
from penstock_frontend.processing.prompts.tokenizer import load_model_files
from penstock_frontend.rpc.coordinator_client import CoordinatorClient

_CLOSE_GRACE = 1.0
"""Seconds that calls have to deliver their last status when the servers stop."""


class Frontend:
    """Lifecycle: ``startup``, ``main_loop`` until ``stop`` is called, ``shutdown``.

    Health is SERVING while at least one engine takes requests. The first ``stop`` drains: new requests are refused,
    running ones may finish until ``drain_timeout``. A second one ends the draining.
    """

    def __init__(self, config: FrontendConfig) -> None:
        """Reads the model's files, which may take long. Raises ConfigError."""
        self._config = config
        name = config.model.name
        get_logger().info("loading the tokenizer", model=config.model.path)
        files = load_model_files(config.model, num_threads=config.tokenizer_threads)
        self._metrics = metrics = FrontendMetrics(name)
        self._tracer = make_tracer(config.tracing, service="frontend", instance=config.name)
        calls = CallTelemetry(metrics.registry, self._tracer)
        outputs = OutputProcessor(files.tokenizer, metrics)
        pooled = PooledOutputs(lambda state, engine: metrics.engine(engine).pooled(state.started, state.num_prompt))
        templates = load_chat_templates(config.model)
        parsers = registry.pick(
            tool=config.model.tool_parser, reasoning=config.model.reasoning_parser, template=templates.source
        )
        inputs = InputProcessor(
            files.tokenizer,
            files.generation_config,
            model_name=name,
            limits=config.limits,
            fairness=config.fairness,
            reasoning=reasoning_of(parsers.reasoning, files.tokenizer),
        )
        incarnation = uuid.uuid4().hex
        self._tokenizer = files.tokenizer
        self._changed = asyncio.Event()
        self._stopping = False
        kv_events = KvEventFeed()
        self._engines = GrpcEngineClient(
            config,
            incarnation=incarnation,
            outputs=SplitOutputs(outputs, pooled),
            on_change=self._on_change,
            on_moved=metrics.moved,
            kv_events=kv_events,
        )
        if config.http.engine_metrics:
            metrics.add_engine_loads(self._engines.loads)
        self._llm = AsyncLLM(
            tokenizer=files.tokenizer,
            inputs=inputs,
            outputs=outputs,
            engines=self._engines,
            limits=config.limits,
            observer=RequestObserver(metrics, config.log, self._tracer),
            pooling=PoolingCalls(
                inputs=PoolingInputs(files.tokenizer, inputs, config.limits), outputs=pooled, engines=self._engines
            ),
        )
        renderer = ChatRenderer(templates, files.tokenizer, config.limits, tool_parser=config.model.tool_parser)
        self._chat = ChatCalls(self._llm, renderer, parsers, files.tokenizer)
        self._coordinator = self._coordinator_client(incarnation) if config.coordinator.address else None
        self._coordinator_task: asyncio.Task[None] | None = None
        self._living: asyncio.Task[None] | None = None
        self._metrics_server: MetricsServer | None = None
        authenticator = Authenticator(config.auth) if config.auth.enabled else None
        self._server = RpcServer(
            config.server,
            service_names=[inference.SERVICE_NAME, vllm_engine.SERVICE_NAME],
            interceptors=_public_guards(authenticator),
            observer=calls,
            check_responses=True,
            in_flight=MessagesInFlight(config.limits.max_message_bytes_in_flight, "limits.max_message_bytes_in_flight"),
        )
        self._admin = RpcServer(
            config.admin,
            service_names=[admin.SERVICE_NAME],
            interceptors=_admin_guards(config, authenticator),
            observer=calls,
            field="admin",
        )
        app = make_app(
            metrics.registry,
            lambda: self._llm.serving,
            [*openai.routes(self._llm, self._chat, config), *self._page_routes(chat=bool(templates.source))],
            exception_handlers=openai.EXCEPTION_HANDLERS,
            allowed_origins=config.http.allowed_origins,
            middleware=_http_guards(config, authenticator),
        )
        self._http = HttpServer(config.http, HttpTelemetry(app, metrics.registry, self._tracer))
        inference.add_to_server(self._server.server, self._llm, self._chat, config, load_labels(config.model))
        card = load_model_card(config.model, files.generation_config)
        vllm_engine.add_to_server(self._server.server, self._llm, config.model, card, kv_events)
        admin.add_to_server(self._admin.server, self._engines, self._is_coordinator_connected)

    @property
    def port(self) -> int:
        """Port of the public gRPC server."""
        return self._server.port

    @property
    def admin_port(self) -> int:
        """Port of the operators' gRPC server."""
        return self._admin.port

    @property
    def http_port(self) -> int:
        """Port of the HTTP server, -1 when it is off."""
        return self._http.port

    async def startup(self) -> None:
        """Listen, and begin to look for engines. Raises ConfigError when a port is taken."""
        count_tasks(self._metrics.registry, asyncio.get_running_loop())
        await self._server.start()
        await self._admin.start()
        await self._admin.set_serving(True)
        await self._http.start()
        self._metrics_server = MetricsServer(self._config.metrics, self._metrics.registry)
        if self._coordinator is not None:
            self._coordinator_task = asyncio.create_task(self._coordinator.run(), name="coordinator")
        else:
            self._engines.follow(self._config.engines)
        self._living = asyncio.create_task(
            Liveness(self._server, self._essential, clock=time.monotonic).run(), name="liveness"
        )
        get_logger().info(
            "frontend started", model=self._config.model.name, grpc_port=self.port, admin_port=self.admin_port
        )

    def _essential(self) -> list[asyncio.Task[None]]:
        """The tasks without which the frontend is no use, whatever its health says."""
        tasks = [self._coordinator_task, self._http.task]
        return [task for task in tasks if task is not None]

    async def main_loop(self) -> None:
        """Keep the health service true until ``stop``."""
        serving = False
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._stopping:
                return
            if serving != self._llm.serving:
                serving = self._llm.serving
                get_logger().info("serving" if serving else "not serving: no engine takes requests")
                await self._server.set_serving(serving)

    def stop(self) -> None:
        """End ``main_loop``; called again, cut the draining short."""
        if self._stopping:
            self._llm.end_all()
        self._stopping = True
        self._changed.set()

    async def shutdown(self) -> None:
        """Drain, end what is left, close the ports. Idempotent, also after a ``startup`` that failed."""
        if self._living is not None:
            self._living.cancel()
            await asyncio.gather(self._living, return_exceptions=True)
        await self._server.set_serving(False)
        get_logger().info("draining", timeout=self._config.drain_timeout)
        if left := await self._llm.drain(self._config.drain_timeout):
            get_logger().warning("ending requests that are still running", count=left)
        self._llm.end_all()
        await asyncio.gather(self._server.stop(_CLOSE_GRACE), self._admin.stop(_CLOSE_GRACE), self._http.stop())
        if self._coordinator is not None and self._coordinator_task is not None:
            await self._coordinator.close()
            await self._coordinator_task
        await self._engines.close()
        self._tokenizer.close()
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.stop)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.shutdown)
        get_logger().info("frontend stopped")

    def _coordinator_client(self, incarnation: str) -> CoordinatorClient:
        return CoordinatorClient(
            self._config.coordinator.address,
            frontend_id=self._config.name,
            incarnation=incarnation,
            on_view=self._engines.follow_view,
            reconnect_max=self._config.coordinator.reconnect_max,
            credentials=ClientCredentials(self._config.coordinator.tls, field="coordinator.tls"),
        )

    def _on_change(self) -> None:
        for load in self._engines.loads():
            self._metrics.engine(load.engine)  # its series show as 0 before its first request
        self._metrics.set_held(self._engines.num_held)
        self._metrics.set_variants(len(self._engines.variants()))
        if self._coordinator is not None:
            self._coordinator.demand(self._engines.num_held)
        self._changed.set()

    def _is_coordinator_connected(self) -> bool:
        return self._coordinator is not None and self._coordinator.connected

    def _page_routes(self, *, chat: bool) -> list[Route]:
        if not self._config.http.page:
            return []
        page = Page(
            self._engines,
            model=self._config.model.name,
            chat=chat,
            serving=lambda: self._llm.serving,
            coordinator=self._coordinator_state,
        )
        return page.routes()

    def _coordinator_state(self) -> str:
        if self._coordinator is None:
            return "none"
        return "connected" if self._coordinator.connected else "disconnected"


def _public_guards(authenticator: Authenticator | None) -> list[grpc.aio.ServerInterceptor]:
    if authenticator is None:
        return []
    return [CallerGuard(grpc_check(authenticator, scope="inference", operators=OPERATORS_METHODS))]


def _admin_guards(config: FrontendConfig, authenticator: Authenticator | None) -> list[grpc.aio.ServerInterceptor]:
    guards: list[grpc.aio.ServerInterceptor] = []
    if config.admin.tls.ca:
        guards.append(PeerGuard(dict.fromkeys(admin.METHODS, config.peers.operators)))
    if config.auth.admin and authenticator is not None:
        guards.append(CallerGuard(grpc_check(authenticator, scope="admin")))
    return guards


def _http_guards(config: FrontendConfig, authenticator: Authenticator | None) -> list[Middleware]:
    if authenticator is None:
        return []
    # The page itself is the same for everybody; what it shows is at /cluster.
    closed = {"/metrics": config.auth.metrics, "/cluster": config.auth.cluster}
    open_paths = ["/health", "/", *(path for path, asks in closed.items() if not asks)]
    return [Middleware(HttpAuthentication, authenticator, open_paths=open_paths)]


async def run(config: FrontendConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError."""
    frontend = Frontend(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, frontend.stop)
    try:
        await frontend.startup()
        await frontend.main_loop()
    finally:
        await frontend.shutdown()

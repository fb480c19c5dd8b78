"""Servers of a frontend: public gRPC server, operators' gRPC server and HTTP server.

This module also creates the access control of the servers.
"""

import asyncio
from collections.abc import Iterable, Sequence

import grpc
from starlette.middleware import Middleware
from starlette.routing import Route

from penstock_common.in_flight import BytesInFlight
from penstock_common.observability.tracing import Tracer
from penstock_common.rpc.call_authorization import CallerGuard, PeerGuard
from penstock_common.rpc.interceptor import CallTelemetry
from penstock_common.rpc.server import RpcServer
from penstock_common.security.cross_site import caller_rules
from penstock_common.security.tls import Certificates
from penstock_frontend.api.access_control import OPERATORS_METHODS, HttpAuthentication, WebCallers, grpc_check
from penstock_frontend.api.anthropic import messages as anthropic
from penstock_frontend.api.grpc import admin, inference
from penstock_frontend.api.http.endpoint import Gate
from penstock_frontend.api.http.page import Page, PageModel
from penstock_frontend.api.http.request_body import Bodies
from penstock_frontend.api.http.server import HttpServer, HttpTelemetry, make_app
from penstock_frontend.api.openai import app as openai
from penstock_frontend.api.openai import models
from penstock_frontend.api.vllm import engine as vllm_engine
from penstock_frontend.app.running_model import RunningModel
from penstock_frontend.authenticator import Authenticator
from penstock_frontend.calls.admission import Readiness
from penstock_frontend.config import FrontendConfig
from penstock_frontend.metrics import merged
from penstock_frontend.processing.prompts.tokenizer_bundle import load_model_card
from penstock_frontend.served_models import ServedModels

JITTER = 0.1
"""Random variation of the lifetime of a connection, as a fraction of the maximum age."""
QUIET = 2.0
"""Number of seconds after which a drain is complete, if during that time no calls run and no calls can arrive on open
connections.

This time must be longer than a round trip. For about one round trip, a client that was asked to reconnect may still
start calls on the old connection.
"""


class Draining:
    """Decides when the drain of a frontend is complete. A drain is complete when no calls run, and no calls can arrive
    on any open connection.

    When a gRPC connection reaches its maximum age, the server asks the client to reconnect, and the client starts no
    more calls on the connection. Such an old connection may stay open for calls that never end, such as watches of the
    health service. Times are monotonic seconds. ``max_age`` is the maximum age of gRPC connections in seconds. 0 means
    that clients are not asked to reconnect, and that the drain does not wait for gRPC connections.
    """

    def __init__(self, now: float, *, timeout: float, max_age: float) -> None:
        self.deadline = now + timeout
        """Time at which the frontend ends the calls that still run, in monotonic seconds."""
        self._max_age = max_age
        self._first_seen: dict[int, float] = {}
        self._quiet_since: float | None = None

    @property
    def moved_after(self) -> float:
        """Number of seconds after the start of the drain at which the server has asked every client to reconnect."""
        return self._max_age * (1.0 + JITTER)

    def done(self, now: float, *, calls: int, connections: Iterable[int]) -> bool:
        """Return True if no calls run and no new calls can arrive.

        Args:
            now: the current time in monotonic seconds.
            calls: number of running calls.
            connections: serial numbers of the open gRPC connections.
        """
        if not self._max_age:
            return not calls
        self._first_seen = {number: self._first_seen.get(number, now) for number in connections}
        if calls or any(now - seen < self.moved_after for seen in self._first_seen.values()):
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        return self._quiet_since is not None and now - self._quiet_since >= QUIET


PUBLIC_SERVICES = (inference.SERVICE_NAME, vllm_engine.SERVICE_NAME)
EVERYTHING = ""
"""Empty service name, which stands for the whole server in gRPC's health service. The channels of clients watch the
health of this name.
"""

MODEL_HEALTH = "model/"
"""Prefix of the names under which gRPC's health service reports the status of each model."""


class Servers:
    """The public gRPC server, the operators' gRPC server and the HTTP server of a frontend.

    ``tell_health`` updates the status in gRPC's health service. The HTTP server reads ``readiness`` itself.
    """

    def __init__(
        self,
        config: FrontendConfig,
        models: Sequence[RunningModel],
        *,
        tracer: Tracer | None,
        readiness: Readiness,
        certificates: Certificates,
    ) -> None:
        """Create the servers for ``models``. ``certificates`` records when the TLS certificates of the servers expire.
        Raises ConfigError.
        """
        self._config = config
        self._readiness = readiness
        self._certificates = certificates
        self._models = models
        self._served = ServedModels([model.served for model in models])
        self._first = models[0].assembly
        self._tracer = tracer
        self.registry = merged([model.assembly.metrics.registry for model in models])
        """Registry with the metrics of all models."""
        self._calls = CallTelemetry(self._first.metrics.registry, tracer)
        authenticator = Authenticator(config.auth) if config.auth.enabled else None
        self.public = self._public_server(authenticator)
        self.admin = self._admin_server(authenticator)
        self.http = self._http_server(authenticator)

    async def start(self) -> None:
        """Start to listen on the ports of all servers. Raises ConfigError if a port cannot be bound."""
        await self.public.start()
        await self.admin.start()
        await self.admin.set_serving(True)
        await self.tell_health()
        await self.http.start()

    async def tell_health(self) -> None:
        """Update the status in gRPC's health service.

        Under the names of the services, the status is ``Readiness.ready``, which load balancers use. Under the empty
        name, the status is ``Readiness.answers``, which clients read before they start calls. Under the name of a model
        with the prefix MODEL_HEALTH, the status is whether engines of this model accept requests.
        """
        # The operators' port reports the same status, so that operators' tools need only one address.
        await self.admin.set_serving(self._readiness.ready, *PUBLIC_SERVICES)
        await self.public.set_serving(self._readiness.ready, *PUBLIC_SERVICES)
        await self.public.set_serving(self._readiness.answers, EVERYTHING)
        for model in self._models:
            serving = self._readiness.ready and model.assembly.engines.usable
            await self.public.set_serving(serving, f"{MODEL_HEALTH}{model.name}")

    def drain(self) -> None:
        """Start the drain of all servers. During the drain, the servers serve calls while clients move to other
        frontends.

        gRPC connections still end at their maximum age, because a started server cannot change this age.
        """
        self.http.drain()

    def drained(self, draining: Draining, now: float) -> bool:
        """Return True if no calls run and no new calls can arrive. ``now`` is in monotonic seconds."""
        calls = self.public.num_calls + self.http.num_left
        return draining.done(now, calls=calls, connections=self.public.connections())

    async def stop(self, grace: float) -> None:
        """Give running calls ``grace`` seconds to deliver their last status, then close the ports. Idempotent."""
        await self.public.hang_up(grace)
        await asyncio.gather(self.public.stop(grace), self.admin.stop(grace), self.http.stop())

    def _public_server(self, authenticator: Authenticator | None) -> RpcServer:
        config, limits = self._config, self._first.settings.limits
        public = RpcServer(
            config.server,
            service_names=PUBLIC_SERVICES,
            interceptors=_public_guards(authenticator),
            observer=self._calls,
            check_responses=True,
            in_flight=BytesInFlight(
                lambda: limits.now.max_message_bytes_in_flight, "limits.max_message_bytes_in_flight"
            ),
            lasting=vllm_engine.LASTING,
            certificates=self._certificates,
        )
        own = inference.InferenceServicer(
            self._served, limits, self._first.warnings, max_response_bytes=config.server.max_message_bytes
        )
        inference.add_to_server(own, public.server)
        # Messages of vLLM's protocol have no model name, so this protocol serves only the first model.
        card = load_model_card(config.model, self._first.generation_config)
        vllm = vllm_engine.VllmEngineServicer(
            self._first.llm,
            config.model,
            card,
            self._models[0].kv_events,
            self._readiness,
            media=config.media,
            limits=limits,
        )
        vllm_engine.add_to_server(vllm, public.server)
        return public

    def _admin_server(self, authenticator: Authenticator | None) -> RpcServer:
        operators = RpcServer(
            self._config.admin,
            service_names=[admin.SERVICE_NAME],
            interceptors=_admin_guards(self._config, authenticator),
            observer=self._calls,
            field="admin",
            certificates=self._certificates,
        )
        operated = [admin.OperatedModel(model.coordinator, model.assembly.engines.lost) for model in self._models]
        servicer = admin.AdminServicer(self._served, operated)
        admin.add_to_server(servicer, operators.server)
        return operators

    def _http_server(self, authenticator: Authenticator | None) -> HttpServer:
        config = self._config
        app = make_app(
            self.registry,
            lambda: self._readiness.why,
            [*self._api_routes(), *self._page_routes()],
            exception_handlers=openai.EXCEPTION_HANDLERS,
            allowed_origins=config.http.allowed_origins,
            middleware=_http_guards(config, authenticator),
        )
        telemetry = HttpTelemetry(app, self._first.metrics.registry, self._tracer)
        return HttpServer(config.http, telemetry, self._certificates)

    def _api_routes(self) -> list[Route]:
        http, settings = self._config.http, self._first.settings
        gate = Gate(http, settings.fairness, self._first.llm.refused)
        bodies = Bodies(http, self._first.metrics.registry, self._first.warnings)
        return [
            *openai.routes(self._served, http, settings.limits, gate=gate, bodies=bodies),
            *anthropic.routes(self._served, gate=gate, bodies=bodies),
        ]

    def _page_routes(self) -> list[Route]:
        return Page([_page_model(model) for model in self._models]).routes() if self._config.http.page else []


def _page_model(model: RunningModel) -> PageModel:
    assembly, renderer = model.assembly, model.assembly.chat.renderer
    has_template = bool(renderer.templates.source)
    return PageModel(
        name=model.name,
        engines=assembly.engines.view,
        media=assembly.media.family.modalities if assembly.media is not None else (),
        speech=assembly.speech is not None,
        chat=has_template,
        tools=has_template and renderer.takes_tools,
        serving=lambda: assembly.llm.serving,
        coordinator=lambda: _coordinator_state(model),
        missing=assembly.engines.lost.missing,
    )


def _coordinator_state(model: RunningModel) -> str:
    if model.coordinator is None:
        return "none"
    return "connected" if model.coordinator_connected else "disconnected"


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
    http = config.http
    pages = Middleware(WebCallers, caller_rules("http", http.host, http.allowed_hosts, http.allowed_origins))
    if authenticator is None:
        return [pages]
    # The page itself needs no credentials. The data of the page come from /cluster, which has its own access control.
    closed = {"/metrics": config.auth.metrics, "/cluster": config.auth.cluster}
    open_paths = ["/health", "/ping", "/", *(path for path, asks in closed.items() if not asks)]
    return [
        pages,
        Middleware(HttpAuthentication, authenticator, open_paths=open_paths, operators_paths=models.PATHS),
    ]

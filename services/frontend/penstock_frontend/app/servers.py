"""Servers of a frontend: public gRPC server, operators' gRPC server and HTTP server.

This module also creates the access control of the servers.
"""

import asyncio
from collections.abc import Iterable

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
from penstock_frontend.api.http.page import Page
from penstock_frontend.api.http.request_body import Bodies
from penstock_frontend.api.http.server import HttpServer, HttpTelemetry, make_app
from penstock_frontend.api.openai import app as openai
from penstock_frontend.api.openai import models
from penstock_frontend.api.vllm import engine as vllm_engine
from penstock_frontend.app.assembly import Assembly
from penstock_frontend.authenticator import Authenticator
from penstock_frontend.calls.admission import Readiness
from penstock_frontend.config import FrontendConfig
from penstock_frontend.dispatch.client import GrpcEngineClient
from penstock_frontend.dispatch.kv_events import KvEventFeed
from penstock_frontend.processing.prompts.tokenizer_bundle import load_model_card
from penstock_frontend.rpc.coordinator_client import CoordinatorClient

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


class Servers:
    """The public gRPC server, the operators' gRPC server and the HTTP server of a frontend.

    ``tell_health`` updates the status in gRPC's health service. The HTTP server reads ``readiness`` itself.
    """

    def __init__(
        self,
        config: FrontendConfig,
        assembly: Assembly[GrpcEngineClient],
        *,
        kv_events: KvEventFeed,
        coordinator: CoordinatorClient | None,
        tracer: Tracer | None,
        readiness: Readiness,
        certificates: Certificates,
    ) -> None:
        """Create the servers. ``certificates`` records when the TLS certificates of the servers expire. Raises
        ConfigError.
        """
        self._config = config
        self._readiness = readiness
        self._certificates = certificates
        self._assembly = assembly
        self._coordinator = coordinator
        self._tracer = tracer
        self._calls = CallTelemetry(assembly.metrics.registry, tracer)
        authenticator = Authenticator(config.auth) if config.auth.enabled else None
        self.public = self._public_server(authenticator, kv_events)
        self.admin = self._admin_server(authenticator)
        self.http = self._http_server(authenticator)

    async def start(self) -> None:
        """Start to listen on the ports of all servers. Raises ConfigError if a port cannot be bound."""
        await self.public.start()
        await self.admin.start()
        await self.admin.set_serving(True)
        await self.admin.set_serving(self._readiness.ready, *PUBLIC_SERVICES)
        await self.http.start()

    async def tell_health(self) -> None:
        """Update the status in gRPC's health service.

        Under the names of the services, the status is ``Readiness.ready``, which load balancers use. Under the empty
        name, the status is ``Readiness.answers``, which clients read before they start calls.
        """
        # The operators' port reports the same status, so that operators' tools need only one address.
        await self.admin.set_serving(self._readiness.ready, *PUBLIC_SERVICES)
        await self.public.set_serving(self._readiness.ready, *PUBLIC_SERVICES)
        await self.public.set_serving(self._readiness.answers, EVERYTHING)

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

    def _public_server(self, authenticator: Authenticator | None, kv_events: KvEventFeed) -> RpcServer:
        config, assembly = self._config, self._assembly
        public = RpcServer(
            config.server,
            service_names=PUBLIC_SERVICES,
            interceptors=_public_guards(authenticator),
            observer=self._calls,
            check_responses=True,
            in_flight=BytesInFlight(
                lambda: assembly.settings.limits.now.max_message_bytes_in_flight, "limits.max_message_bytes_in_flight"
            ),
            lasting=vllm_engine.LASTING,
            certificates=self._certificates,
        )
        llm, limits = assembly.llm, assembly.settings.limits
        own = inference.InferenceServicer(
            llm,
            assembly.chat,
            config,
            limits,
            assembly.labels,
            assembly.scoring,
            assembly.speech,
            assembly.warnings,
        )
        inference.add_to_server(own, public.server)
        card = load_model_card(config.model, assembly.generation_config)
        vllm = vllm_engine.VllmEngineServicer(
            llm, config.model, card, kv_events, self._readiness, media=config.media, limits=limits
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
        llm, engines = self._assembly.llm, self._assembly.engines
        servicer = admin.AdminServicer(engines, llm.adapters, self._coordinator, lost=engines.lost, tenants=llm.tenants)
        admin.add_to_server(servicer, operators.server)
        return operators

    def _http_server(self, authenticator: Authenticator | None) -> HttpServer:
        config, registry = self._config, self._assembly.metrics.registry
        app = make_app(
            registry,
            lambda: self._readiness.why,
            [*self._api_routes(), *self._page_routes()],
            exception_handlers=openai.EXCEPTION_HANDLERS,
            allowed_origins=config.http.allowed_origins,
            middleware=_http_guards(config, authenticator),
        )
        return HttpServer(config.http, HttpTelemetry(app, registry, self._tracer), self._certificates)

    def _api_routes(self) -> list[Route]:
        config, assembly = self._config, self._assembly
        llm, chat = assembly.llm, assembly.chat
        gate = Gate(config.http, assembly.settings.fairness, assembly.llm.refused)
        bodies = Bodies(config.http, assembly.metrics.registry, assembly.warnings)
        limits = assembly.settings.limits
        return [
            *openai.routes(
                llm, chat, config, limits, assembly.labels, assembly.scoring, assembly.speech, gate=gate, bodies=bodies
            ),
            *anthropic.routes(llm, chat, generates=assembly.speech is None, gate=gate, bodies=bodies),
        ]

    def _page_routes(self) -> list[Route]:
        if not self._config.http.page:
            return []
        media = self._assembly.media
        renderer = self._assembly.chat.renderer
        page = Page(
            self._assembly.engines.view,
            model=self._config.model.name,
            media=media.family.modalities if media is not None else (),
            speech=self._assembly.speech is not None,
            chat=bool(renderer.templates.source),
            tools=bool(renderer.templates.source) and renderer.takes_tools,
            serving=lambda: self._assembly.llm.serving,
            coordinator=self._coordinator_state,
            missing=self._assembly.engines.lost.missing,
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

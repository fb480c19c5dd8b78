"""HTTP server. The server serves ``/health``, ``/ping``, ``/metrics``, ``/openapi.json`` and the given routes, and
records HTTP telemetry.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock_common.addresses import resolve, take_both_families, warn_of_plaintext, with_port
from penstock_common.config.allowed_hosts import AllowedOrigins
from penstock_common.errors import ConfigError
from penstock_common.observability.logging import Caller, current_caller, get_logger, incident
from penstock_common.observability.tracing import Span, Tracer, current_call, trace_headers
from penstock_common.security.tls import Certificates, server_context
from penstock_frontend.api.http import openapi
from penstock_frontend.api.http.connection import HttpConnection, connection_class
from penstock_frontend.config import HttpConfig

_KEEP_ALIVE = 75
"""Number of seconds after which an idle connection is closed. This timeout is longer than the timeouts of clients and
load balancers, so that these close the connection first.
"""
_CLOSE_GRACE = 2
"""Number of seconds that clients have to read their last answers when the server stops."""


def make_app(
    registry: CollectorRegistry,
    not_ready: Callable[[], str],
    routes: Sequence[Route] = (),
    *,
    exception_handlers: Mapping[Any, Any] | None = None,
    allowed_origins: Sequence[str] = (),
    middleware: Sequence[Middleware] = (),
) -> Starlette:
    """Return the ASGI application of the HTTP listener.

    Args:
        registry: registry with the metrics that ``/metrics`` returns.
        not_ready: returns the reason why the server is not ready. ``/health`` and ``/ping`` answer with status 503 and
            this reason, or with status 200 if the reason is empty.
        routes: the other routes of the application. ``/openapi.json`` also describes these routes.
        exception_handlers: Starlette's exception handlers.
        allowed_origins: origins of web pages that may call (CORS).
        middleware: middleware that runs inside the CORS middleware.
    """

    async def health(_: Request) -> Response:
        if why := not_ready():
            return PlainTextResponse(f"not serving: {why}\n", status_code=503)
        return PlainTextResponse("serving\n")

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    origins = AllowedOrigins(allowed_origins)
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins.exact,
        allow_origin_regex=origins.pattern,
        allow_methods=["*"],
        allow_headers=["*"],
    )
    looks = [Route("/health", health), Route("/ping", health, methods=["GET", "POST"]), Route("/metrics", metrics)]
    served = [*looks, *routes]
    app = Starlette(
        routes=[*served, openapi.route(served)],
        middleware=[Middleware(_WithoutSlash), *([cors] if allowed_origins else []), *middleware],
        exception_handlers=exception_handlers,
    )
    app.router.redirect_slashes = False
    return app


class _WithoutSlash:
    """Middleware that ignores slashes at the end of a path.

    A redirect to the path without slashes would not work, because clients may drop the body or the method when they
    follow a redirect.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Remove slashes at the end of the path, and call the application."""
        path = scope.get("path", "")
        if len(path) > 1 and path.endswith("/"):
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await self._app(scope, receive, send)


class HttpServer:
    """A uvicorn server in the running event loop. If the port is -1, there is no server."""

    def __init__(self, config: HttpConfig, app: ASGIApp, certificates: Certificates | None = None) -> None:
        """Create the HTTP server. ``certificates`` records when the TLS certificates of this listener expire."""
        self._config = config
        self._certificates = certificates
        self._connection = connection_class(config)
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                http=self._connection,
                ws="none",
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_CLOSE_GRACE,
            )
        )
        self.task: asyncio.Task[None] | None = None
        """Task that serves connections; it ends only when it is stopped. None if the server is not running."""
        self.port = -1

    async def start(self) -> int:
        """Start to listen, and return the port. Raises ConfigError if the port cannot be bound, or if a certificate
        cannot be used.
        """
        if self._config.port < 0:
            return -1
        if self._config.tls.enabled:
            context = server_context(self._config.tls, field="http.tls", certificates=self._certificates)
            self._server.config.ssl_context_factory = lambda *_: context
        else:
            warn_of_plaintext(self._config.host, field="http")
        listener = _listen(self._config)
        self.port = listener.getsockname()[1]
        self.task = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")
        get_logger().info("serving HTTP", address=with_port(self._config.host, self.port))
        return self.port

    def drain(self) -> None:
        """Close each connection after its next answer. Idle connections stay open, because their clients may be sending
        a request at this moment.
        """
        self._connection.max_age = 0.0
        for connection in self._open():
            connection.end_with_next_answer()

    @property
    def num_left(self) -> int:
        """Number of connections that have a request in progress. If connections have a maximum age, idle connections
        are counted too.
        """
        idle_ones = bool(self._config.max_connection_age)
        return sum(idle_ones or connection.busy for connection in self._open())

    def _open(self) -> list[HttpConnection]:
        return [each for each in self._server.server_state.connections if isinstance(each, HttpConnection)]

    async def stop(self) -> None:
        """Finish running requests, and close the port. Idempotent."""
        if self.task is not None:
            self._server.should_exit = True
            await self.task
            self.task = None


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing when uvicorn wants to handle signals. The frontend handles signals, and stops this server itself."""
        yield


def _listen(config: HttpConfig) -> socket.socket:
    try:
        family, address = resolve(config.host, config.port)
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as e:
        raise ConfigError(f"cannot use http.host {config.host!r}: {e}") from None
    try:
        # Share the port only if reuse_port is set, because two servers on one port would receive each other's clients.
        option = socket.SO_REUSEPORT if config.reuse_port else socket.SO_REUSEADDR
        listener.setsockopt(socket.SOL_SOCKET, option, 1)
        take_both_families(listener)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as e:
        listener.close()
        raise ConfigError(
            f"cannot bind http.port {config.port} on {config.host}: {e.strerror or e}; set another port, or -1 to disable HTTP"
        ) from None
    return listener


# The code below records metrics and traces of HTTP requests.

_UNTRACED = ("/health", "/ping", "/metrics")
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class HttpTelemetry:
    """ASGI middleware that counts requests by route, method and status class, and creates a trace span for each
    request.

    The span's parent comes from the header ``traceparent``.
    """

    def __init__(self, app: ASGIApp, registry: CollectorRegistry, tracer: Tracer | None = None) -> None:
        self._app = app
        self._requests = Counter(
            "http_requests", "HTTP requests ended", ("handler", "method", "status"), registry=registry
        )
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, and record its metrics and its trace span. An error of the application counts as status
        500.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        host, port = scope.get("client") or ("", 0)
        # Every request has its own task, so there is no need to restore the old value at the end.
        current_caller.set(Caller(scope["path"], with_port(host, port) if host else ""))
        span = self._begin(scope)
        status = 500

        async def noted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted_send)
        finally:
            try:
                self._end(scope, status, span)
            except Exception as e:  # an error of telemetry must not replace the answer
                incident(e, request="", doing="observing the end of an HTTP request")

    def _begin(self, scope: Scope) -> Span | None:
        try:
            return self._span(scope)
        except Exception as e:
            incident(e, request="", doing="observing the start of an HTTP request")
            return None

    def _end(self, scope: Scope, status: int, span: Span | None) -> None:
        handler, method = _handler(scope), scope["method"] if scope["method"] in _METHODS else "other"
        self._requests.labels(handler, method, f"{status // 100}xx").inc()
        if span is not None:
            attributes: dict[str, str | int] = {"http.route": handler, "http.response.status_code": status}
            span.end(attributes, error=str(status) if status >= 500 else "")

    def _span(self, scope: Scope) -> Span | None:
        if self._tracer is None or scope["path"] in _UNTRACED:
            return None
        headers = trace_headers({key.lower(): value for key, value in HTTPConnection(scope).headers.items()})
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
        span = self._tracer.start(f"{scope['method']} {scope['path']}", headers, server=True, attributes=attributes)
        current_call.set(span.headers)
        return span


def _handler(scope: Scope) -> str:
    """Return the path of the route, with the names of its parameters. For an unknown path, return the label ``none``."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else "none"

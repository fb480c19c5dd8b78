"""What is counted and traced of HTTP requests."""

from prometheus_client import CollectorRegistry, Counter
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock_common.addresses import with_port
from penstock_common.observability.caller import Caller, current_caller
from penstock_common.observability.incidents import incident
from penstock_common.observability.tracing import Span, Tracer, current_call, trace_headers

_UNTRACED = ("/health", "/ping", "/metrics")
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class HttpTelemetry:
    """Wraps an application: counts its requests by route, method and class of status, and makes a span of each.

    The parent is in the header ``traceparent``.
    """

    def __init__(self, app: ASGIApp, registry: CollectorRegistry, tracer: Tracer | None = None) -> None:
        self._app = app
        self._requests = Counter(
            "http_requests", "HTTP requests ended", ("handler", "method", "status"), registry=registry
        )
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; an application error is a 500."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        host, port = scope.get("client") or ("", 0)
        # Every request has a task of its own: there is nobody to put the old value back for.
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
            except Exception as e:  # who only looks on spoils no answer
                incident(e, request="", doing="observing the end of an HTTP request")

    def _begin(self, scope: Scope) -> Span | None:
        try:
            return self._span(scope)
        except Exception as e:
            incident(e, request="", doing="observing the begin of an HTTP request")
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
    """The route's path with its parameters' names: paths that clients make up are all ``none``."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else "none"

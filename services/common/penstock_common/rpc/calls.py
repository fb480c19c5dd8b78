"""What is counted and traced of gRPC calls."""

from collections.abc import Mapping

import grpc
from prometheus_client import CollectorRegistry, Counter

from penstock_common.observability.caller import Caller, current_caller, peer_address
from penstock_common.observability.tracing import Headers, Span, Tracer, current_call, trace_headers
from penstock_common.rpc.interceptor import CallEnd, Context

_SERVER_ERRORS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
"""Codes that OpenTelemetry's conventions take for a server's error."""


class CallTelemetry:
    """Counts calls under the names that gRPC's Prometheus interceptors use, and makes a span of each that is one request.

    A call's parent is in the message's ``routing.trace_context``, else in its metadata. A stream of requests has no span:
    each of them brings its own context.
    """

    def __init__(self, registry: CollectorRegistry, tracer: Tracer | None = None) -> None:
        labels = ("grpc_type", "grpc_service", "grpc_method")
        self._started = Counter("grpc_server_started", "Calls begun", labels, registry=registry)
        self._handled = Counter("grpc_server_handled", "Calls ended", (*labels, "grpc_code"), registry=registry)
        self._tracer = tracer

    def started(self, method: str, kind: str, request: object, context: Context) -> CallEnd:
        """Count a call that begins, and begin its span where it is one request. What is returned is told the status code."""
        _, service, name = method.split("/", 2)
        self._started.labels(kind, service, name).inc()
        # The task belongs to the call: there is nobody to put the old value back for.
        current_caller.set(Caller(method, peer_address(context.peer())))
        span = self._span(service, name, request, context) if kind in ("unary", "server_stream") else None

        def ended(code: str) -> None:
            self._handled.labels(kind, service, name, code).inc()
            if span is not None:
                status: int = grpc.StatusCode[code].value[0]
                span.end({"rpc.grpc.status_code": status}, error=code if code in _SERVER_ERRORS else "")

        return ended

    def _span(self, service: str, name: str, request: object, context: Context) -> Span | None:
        if self._tracer is None:
            return None
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}
        span = self._tracer.start(f"{service}/{name}", _parent(request, context), server=True, attributes=attributes)
        current_call.set(span.headers)
        return span


def _parent(request: object, context: Context) -> Headers:
    hints: object = getattr(getattr(request, "routing", None), "trace_context", None)
    if isinstance(hints, Mapping) and hints:
        return trace_headers(hints)
    return trace_headers({key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)})

"""OpenTelemetry tracer. Only this module imports OpenTelemetry. The module ``tracer`` imports this module if tracing is
configured.
"""

import threading
from collections.abc import Sequence
from functools import cached_property

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock_common.config.sections import TracingConfig
from penstock_common.observability.metrics import service_version
from penstock_common.observability.tracing import Attributes, Headers

_EXPORT_TIMEOUT = 5.0
"""Maximum seconds to export a batch to the collector, including retries."""
_FLUSH_TIMEOUT = 2.0
"""Maximum seconds that a process waits at exit for its last spans to be exported."""
_NANOSECONDS = 1_000_000_000
_w3c = TraceContextTextMapPropagator()


class OtelSpan:
    """OpenTelemetry span that implements ``tracing.Span``."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @cached_property
    def headers(self) -> Headers:
        """Context of the span as W3C headers for child spans. Cached."""
        headers: dict[str, str] = {}
        _w3c.inject(headers, trace.set_span_in_context(self._span))
        return headers

    @property
    def recording(self) -> bool:
        return self._span.is_recording()

    def end(self, attributes: Attributes, *, error: str = "") -> None:
        """End the span. If the span is sampled, pass it to the exporter's thread. Later calls have no effect.

        ``error`` is the status text, or empty.
        """
        if not self._span.is_recording():
            return
        self._span.set_attributes(dict(attributes))
        _set_error(self._span, error)
        self._span.end()


class OtelTracer:
    """Tracer that creates OpenTelemetry spans and exports them to a collector over OTLP. Implements ``tracing.Tracer``.

    Other settings, such as headers and certificates for the collector, are OpenTelemetry's own environment variables
    (``OTEL_EXPORTER_OTLP_*``, ``OTEL_RESOURCE_ATTRIBUTES``).
    """

    def __init__(self, config: TracingConfig, *, service: str, instance: str) -> None:
        resource = Resource.create(
            {
                SERVICE_NAME: config.service_name or f"penstock-{service}",
                SERVICE_INSTANCE_ID: instance,
                SERVICE_VERSION: service_version(),
            }
        )
        sampler = ParentBased(TraceIdRatioBased(config.sample_ratio))
        self._provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter(
            config.endpoint, insecure=not config.endpoint.startswith("https://"), timeout=_EXPORT_TIMEOUT
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("penstock", service_version())

    def start(
        self, name: str, parent: Headers, *, server: bool = False, attributes: Attributes | None = None
    ) -> OtelSpan:
        """Start a span now, as a child of ``parent`` if the parent is valid.

        The parent decides whether the span is sampled. Without a valid parent, the configured ratio applies.
        """
        kind = trace.SpanKind.SERVER if server else trace.SpanKind.INTERNAL
        context = _w3c.extract(parent)
        return OtelSpan(self._tracer.start_span(name, context, kind, dict(attributes or {})))

    def record(
        self,
        name: str,
        parent: Headers,
        *,
        began: float,
        ended: float,
        attributes: Attributes,
        events: Sequence[tuple[str, float]] = (),
        error: str = "",
    ) -> None:
        """Add a span that has ended. Times are seconds since the Unix epoch."""
        span = self._tracer.start_span(
            name, _w3c.extract(parent), attributes=dict(attributes), start_time=int(began * _NANOSECONDS)
        )
        for event, time in events:
            span.add_event(event, timestamp=int(time * _NANOSECONDS))
        _set_error(span, error)
        span.end(int(ended * _NANOSECONDS))

    def shutdown(self) -> None:
        """Export the remaining spans, for at most ``_FLUSH_TIMEOUT`` seconds. Blocks."""
        flushing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        flushing.start()
        flushing.join(_FLUSH_TIMEOUT)
        if flushing.is_alive():
            self._exporter.shutdown()  # cancel pending export attempts


def _set_error(span: trace.Span, error: str) -> None:
    if error:
        span.set_status(trace.Status(trace.StatusCode.ERROR, error))

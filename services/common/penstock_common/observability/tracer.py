"""Factory of a process's tracer. OpenTelemetry is imported only if an endpoint is configured."""

from penstock_common.config.sections import TracingConfig
from penstock_common.observability.tracing import Tracer


def make_tracer(config: TracingConfig, *, service: str, instance: str) -> Tracer | None:
    """Return the tracer of this process, or None if no endpoint is configured.

    Args:
        config: Tracing settings.
        service: "frontend", "enginecore" or "coordinator".
        instance: Name of this instance of the service.
    """
    if not config.endpoint:
        return None
    from penstock_common.observability.otel import (
        OtelTracer,  # OpenTelemetry costs start time and memory, so import it only if tracing is on.
    )

    return OtelTracer(config, service=service, instance=instance)

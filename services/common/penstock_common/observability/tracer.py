"""The tracer of a process: nothing of OpenTelemetry is imported until an endpoint is configured."""

from penstock_common.config.sections import TracingConfig
from penstock_common.observability.tracing import Tracer


def make_tracer(config: TracingConfig, *, service: str, instance: str) -> Tracer | None:
    """The tracer of this process, None when no endpoint is configured.

    ``service``: frontend, enginecore or coordinator; ``instance``: which of them.
    """
    if not config.endpoint:
        return None
    from penstock_common.observability.otel import (
        OtelTracer,  # costs time and memory that only those pay who asked for it
    )

    return OtelTracer(config, service=service, instance=instance)

"""Tracing interfaces of the services.

Between and inside processes, the context of a span is passed as the two headers of the W3C trace context.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Protocol

Headers = Mapping[str, str]
"""Headers ``traceparent`` and ``tracestate``. Either header may be missing."""
Attributes = Mapping[str, str | int | float | bool | Sequence[str]]

HEADER_NAMES = ("traceparent", "tracestate")

current_call: ContextVar[Headers | None] = ContextVar("current_call", default=None)
"""Trace headers of the call that the current task serves, or None."""


class Span(Protocol):
    """Span of an operation in progress. Child spans use its ``headers`` as their parent."""

    @property
    def headers(self) -> Headers:
        """Trace context of the span, for child spans."""

    @property
    def recording(self) -> bool:
        """Whether the span is sampled. If False, callers need not collect attributes."""

    def end(self, attributes: Attributes, *, error: str = "") -> None:
        """End the span. ``error`` describes a failure, or is empty. Idempotent."""


class Tracer(Protocol):
    """Interface of a tracer, which creates spans and exports them in batches from a separate thread."""

    def start(self, name: str, parent: Headers, *, server: bool = False, attributes: Attributes | None = None) -> Span:
        """Start a span now. Without a valid parent, the span begins a new trace if sampling selects it.

        ``server`` means that the span is the server side of a call.
        """

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
        """Add a span that has ended. All times, including the times of ``events``, are seconds since the Unix epoch."""

    def shutdown(self) -> None:
        """Export the remaining spans. Blocks for seconds if the collector does not answer."""


def is_sampled(headers: Headers) -> bool:
    """Return whether a trace context is valid and marks its trace as sampled."""
    parts = headers.get("traceparent", "").split("-")
    try:
        return len(parts) >= 4 and len(parts[3]) == 2 and bool(int(parts[3], 16) & 1)
    except ValueError:
        return False


def trace_headers(carrier: Mapping[str, str]) -> dict[str, str]:
    """Return only the trace context headers of ``carrier``."""
    return {name: carrier[name] for name in HEADER_NAMES if name in carrier}

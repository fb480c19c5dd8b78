"""Traces, as the services see them.

Spans are handed on as the two headers of the W3C trace context, between processes and inside them alike.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Protocol

Headers = Mapping[str, str]
"""``traceparent`` and ``tracestate``, as far as they are there."""
Attributes = Mapping[str, str | int | float | bool | Sequence[str]]

HEADER_NAMES = ("traceparent", "tracestate")

current_call: ContextVar[Headers | None] = ContextVar("current_call", default=None)
"""The span of the call that the current task serves."""


class Span(Protocol):
    """Something under way. ``headers`` make others its children."""

    @property
    def headers(self) -> Headers:
        """Its context, to hand on."""

    @property
    def recording(self) -> bool:
        """Whether it was sampled: otherwise attributes need not be gathered."""

    def end(self, attributes: Attributes, *, error: str = "") -> None:
        """It is over. ``error``: what went wrong, empty when nothing did. Idempotent."""


class Tracer(Protocol):
    """Makes spans and sends them, in batches, from a thread of its own."""

    def start(self, name: str, parent: Headers, *, server: bool = False, attributes: Attributes | None = None) -> Span:
        """Begin a span now; one without a valid parent begins a trace, if sampling says so. ``server``: of a call."""

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
        """Add a span that is over. Times, also those of ``events``, are seconds since the Unix epoch."""

    def shutdown(self) -> None:
        """Send what is left. Blocks, for seconds if the collector does not answer."""


def is_sampled(headers: Headers) -> bool:
    """Whether a trace context says that its trace is recorded. What is not a trace context is not."""
    parts = headers.get("traceparent", "").split("-")
    try:
        return len(parts) >= 4 and len(parts[3]) == 2 and bool(int(parts[3], 16) & 1)
    except ValueError:
        return False


def trace_headers(carrier: Mapping[str, str]) -> dict[str, str]:
    """The headers of the trace context among others."""
    return {name: carrier[name] for name in HEADER_NAMES if name in carrier}

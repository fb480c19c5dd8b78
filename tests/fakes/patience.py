"""Timeouts of tests: for events that must happen, and for deadlines that must pass."""

from collections.abc import Iterator

PATIENCE = 300.0
"""Seconds until a test stops waiting for an event that must happen. Long enough for a busy machine."""


def deadlines(first: float = 0.2) -> Iterator[float]:
    """Yield increasing deadlines in seconds, for a request that must have started when its deadline passes.

    The time until a request starts depends on the machine. If it has not started in time, the test retries with the
    next deadline.
    """
    seconds = first
    while seconds < PATIENCE:
        yield seconds
        seconds *= 4
    raise AssertionError(f"no request began within {seconds / 4:g} s")

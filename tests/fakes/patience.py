"""Timeouts of tests: for events that must happen, and for deadlines that must pass."""

from collections.abc import Iterator

PATIENCE = 300.0
"""Seconds until a test stops waiting for an event that must happen: more than it takes on a busy machine."""


def deadlines(first: float = 0.2) -> Iterator[float]:
    """Ever longer ones, in seconds, for a request that must have begun when its deadline passes: try again with the next
    until it has. How long the first steps of a request take depends on the machine.
    """
    seconds = first
    while seconds < PATIENCE:
        yield seconds
        seconds *= 4
    raise AssertionError(f"no request began within {seconds / 4:g} s")

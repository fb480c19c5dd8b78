"""How fast work leaves a bounded queue, and so when there will be room in it."""

import math

MIN_RETRY_AFTER = 0.1
MAX_RETRY_AFTER = 60.0
"""Bounds of what clients are told to wait, in seconds."""

_MEMORY = 10.0
"""Seconds of work after which an observation counts a third (1/e)."""


class DrainRate:
    """Requests and units (tokens, characters) that leave a queue per second, weighted towards the latest.

    Rates are averages with weights that fall exponentially with age: what has left, over the time in which there was
    something to leave. Time with nothing there says nothing about the speed, so it neither counts nor ages what was
    observed. All times are seconds of one monotonic clock.
    """

    __slots__ = ("_last", "_requests", "_seconds", "_units")

    def __init__(self) -> None:
        self._last = 0.0
        self._seconds = 0.0
        self._requests = 0.0
        self._units = 0.0

    def begin(self, now: float) -> None:
        """Something has come into the empty queue."""
        self._last = now

    def left(self, now: float, units: float, requests: float = 1.0) -> None:
        """A request, or so many, with so many units has left."""
        self._advance(now)
        self._requests += requests
        self._units += units

    def time_for(self, now: float, requests: float, units: float) -> float | None:
        """Seconds until so many requests and so many units have left; None when nothing has been observed.

        A queue that nothing leaves any more gets slower with every second.
        """
        self._advance(now)
        if not self._requests:
            return None
        of_requests = requests * self._seconds / self._requests
        of_units = units * self._seconds / self._units if self._units else 0.0
        return max(of_requests, of_units)

    def _advance(self, now: float) -> None:
        elapsed, self._last = now - self._last, now
        if elapsed <= 0.0:
            return
        kept = math.exp(-elapsed / _MEMORY)
        self._seconds = self._seconds * kept + _MEMORY * (1.0 - kept)
        self._requests *= kept
        self._units *= kept


def retry_after(seconds: float) -> float:
    """What a client is told for a wait of so many seconds."""
    return min(max(seconds, MIN_RETRY_AFTER), MAX_RETRY_AFTER)

"""Warnings about events that a stranger can cause as often as it likes."""

import logging
import time
from collections.abc import Callable


class LimitedLog:
    """Writes each event at most once per interval, and counts those that it leaves out. One thread at a time."""

    def __init__(
        self, logger: logging.Logger, interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``interval_s``: least seconds between two lines of one event. ``clock`` returns seconds."""
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._events: dict[str, tuple[float, int]] = {}
        """When each event was last written, and how often it was left out since then."""

    def warning(self, event: str, **fields: object) -> None:
        """Log ``event`` with its fields. The field ``left_out`` says how many of the same event came since the last line."""
        now = self._clock()
        written, left_out = self._events.get(event, (now - self._interval_s, 0))
        if now - written < self._interval_s:
            self._events[event] = written, left_out + 1
            return
        self._events[event] = now, 0
        self._logger.warning(event, extra={**fields, "left_out": left_out} if left_out else fields)

"""When a worker says what it does, and how long steps take to reach it."""

import time
from collections.abc import Callable

import msgspec

from penstock_common.observability.histogram import Buckets
from penstock_enginecore.core.worker_stats import WorkerStats

_INTERVAL = 1.0
"""Seconds between two reports, at least."""
_SECONDS = (2.5e-5, 5e-5, 1e-4, 1.5e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)


class WorkerReports:
    """Reports are due while something has changed since the last: a worker that waits for calls is not woken for nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._broadcast = Buckets(_SECONDS)
        self._waiting_since = clock()
        self._next = 0.0
        self._changed = False

    def waits(self) -> None:
        """The worker is ready for a call."""
        self._waiting_since = self._clock()

    def received(self, sent: float) -> None:
        """A step is there that was ``sent`` at that time. What the worker still had to do before is not the step's way."""
        self._broadcast.observe(max(self._clock() - max(sent, self._waiting_since), 0.0))
        self.changed()

    def changed(self) -> None:
        """There is something to tell."""
        self._changed = True

    def due_in(self) -> float | None:
        """Seconds until the next report; 0 for one that is due, None when there is nothing to tell."""
        return max(self._next - self._clock(), 0.0) if self._changed else None

    def report(self, stats: WorkerStats) -> WorkerStats:
        """``stats`` with what is known here. The next report is due an interval later."""
        self._next = self._clock() + _INTERVAL
        self._changed = False
        return msgspec.structs.replace(stats, step_broadcast=self._broadcast.counts())

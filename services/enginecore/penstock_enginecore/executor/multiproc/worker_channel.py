"""Connection of a worker process to the engine, and timing of the worker's reports."""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

import msgspec

from penstock_common.observability.metrics import Buckets
from penstock_common.process import end_with_parent
from penstock_enginecore.core.worker_stats import WorkerStats
from penstock_enginecore.executor.multiproc.calls import DUMP_STACKS
from penstock_enginecore.executor.multiproc.ring import RingMemory, RingReader, RingWriter
from penstock_enginecore.worker.messages import Start, decode_call


def open_channel(descriptor: int) -> tuple[Start, RingReader, RingWriter]:
    """Read the ``Start`` message for this worker from a file, and open the rings for messages from and to the engine.

    After this call, the process ends when the engine ends, ignores signals that the engine handles, and writes stack
    traces on request. ``descriptor`` is the descriptor of the file.
    """
    with os.fdopen(descriptor, "rb") as file:
        start = msgspec.msgpack.decode(file.read(), type=Start)
    end_with_parent()
    threading.Thread(target=partial(_end_with, start.engine), name="engine-watch", daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine, not a signal, decides when its workers stop
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(DUMP_STACKS, file=start.stacks, all_threads=True)
    calls = RingReader(RingMemory(start.calls), start.config.place, rehearse=decode_call)
    answers = RingWriter(RingMemory(start.answers))
    for inherited in (start.calls, start.answers):
        os.close(inherited)
    return start, calls, answers


def _end_with(engine: int) -> None:
    """Wait until the process at the other end of the pipe has ended, then exit this process immediately."""
    os.read(engine, 1)
    os._exit(1)


# Reports of a worker. The reports contain the time from when the engine sends a step until the worker receives the
# step.

_INTERVAL = 1.0
"""Minimum number of seconds between two reports of a worker."""
_SECONDS = (2.5e-5, 5e-5, 1e-4, 1.5e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)


class WorkerReports:
    """Decides when a worker sends reports of its statistics. A report is due only if the statistics have changed, so an
    idle worker keeps sleeping.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._broadcast = Buckets(_SECONDS)
        self._waiting_since = clock()
        self._next = 0.0
        self._changed = False
        self._waited = 0.0
        self._first_began: float | None = None
        self._last_ended = self._computed = 0.0

    def waits(self) -> None:
        """Record that the worker now waits for a call."""
        self._waiting_since = self._clock()

    def received(self, sent: float) -> float:
        """Record that the worker has received a step, which the engine sent at time ``sent``. Returns the current time.

        If the worker began to wait only after ``sent``, the measured latency begins when the worker began to wait. So
        the latency excludes the worker's earlier work.
        """
        now = self._clock()
        self._broadcast.observe(max(now - max(sent, self._waiting_since), 0.0))
        self.changed()
        return now

    def computed(self, began: float) -> None:
        """Record that the worker has completed a part of a step, which it began at time ``began``."""
        if self._first_began is None:
            self._first_began = began
        self._last_ended = self._clock()
        self._computed += self._last_ended - began

    def changed(self) -> None:
        """Record that the worker's statistics have changed."""
        self._changed = True

    def due_in(self) -> float | None:
        """Return the number of seconds until the next report is due, 0 if a report is due now, or None if the
        statistics have not changed.
        """
        return max(self._next - self._clock(), 0.0) if self._changed else None

    def report(self, stats: WorkerStats) -> WorkerStats:
        """Return ``stats`` with the latencies of steps and the idle fraction of the stage added. The next report is due
        at least ``_INTERVAL`` seconds later.
        """
        self._next = self._clock() + _INTERVAL
        self._changed = False
        return msgspec.structs.replace(
            stats, step_broadcast=self._broadcast.counts(), stage_idle=self._stage_idle(stats.waited_for_stages)
        )

    def _stage_idle(self, waited: float | None) -> float | None:
        """Return the fraction of time in which this pipeline stage was idle. The time is from the start of the first
        step since the last report to the end of the last step.
        """
        began, self._first_began = self._first_began, None
        computed, self._computed = self._computed, 0.0
        if waited is None:
            return None
        waited, self._waited = waited - self._waited, waited
        spent = 0.0 if began is None else self._last_ended - began
        return min(max(1 - (computed - waited) / spent, 0.0), 1.0) if spent > 0 else 0.0

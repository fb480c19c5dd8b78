"""Progress of a process that runs rows of a phase, according to its records."""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_STACK_SECONDS = 1.0
"""Seconds for a process to write its stack before it is killed."""


class Task:
    """A process for ``rows`` of a phase.

    Args:
        number: Number of the process in records and for the nursery.
        phase: Name of the phase.
        rows: Names of rows, in order.
        until: ``time.monotonic()`` after which no row begins.
        start_limit: Maximum seconds until the first row begins, and between the end of a row and the next row's begin.
        log: File for the process's output.
    """

    def __init__(
        self, number: int, phase: str, rows: Sequence[str], *, until: float, start_limit: float, log: Path
    ) -> None:
        self.number = number
        self.phase = phase
        self.rows = rows
        self.until = until
        self.log = log
        self.left = list(rows)
        """Rows that have not ended."""
        self.current: str | None = None
        """Name of the current row. Building and closing count as rows."""
        self.pid: int | None = None
        self.killed = ""
        """Reason why the process was killed; empty if it was not killed."""
        self._start_limit = start_limit
        self._since = time.monotonic()
        self._limit = start_limit
        self._kill_at: float | None = None

    def follow(self, record: dict[str, Any]) -> None:
        """Update the progress from a record of the process."""
        name = record["row"]
        if record["kind"] == "begin":
            self.current, self._since, self._limit = name, record["at"], record["limit"]
            return
        if name in self.left:
            self.left.remove(name)
        if name == self.current:
            self.current, self._since, self._limit = None, time.monotonic(), self._start_limit

    def check(self, now: float, budget_end: float) -> None:
        """Kill the process if a row takes too long or the budget has ended.

        The process first writes its threads' stacks.
        """
        if self.pid is None:
            return
        if self._kill_at is not None:
            if now >= self._kill_at:
                self._signal(signal.SIGKILL, group=True)
            return
        if now >= budget_end:
            self.killed = "the budget was over"
        elif now - self._since > self._limit:
            self.killed = f"not within {self._limit:.0f} s"
        else:
            return
        self._signal(signal.SIGUSR1)
        self._kill_at = now + _STACK_SECONDS

    def kill(self) -> None:
        """Kill the process and its children immediately."""
        self._signal(signal.SIGKILL, group=True)

    def _signal(self, number: signal.Signals, *, group: bool = False) -> None:
        if self.pid is None:
            return
        with suppress(ProcessLookupError):
            if group:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)


def status_words(status: int) -> str:
    """Return an exit status as text. Negative numbers are signals."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"

"""When workers have taken too long for a call."""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock_enginecore.core.scheduler.base import Clock
from penstock_enginecore.executor.multiproc.calls import Oldest

_LOOK = 0.25
"""Seconds between two looks at the states of workers that may take as long as they need."""


class Overdue:
    """A step has ``timeout`` seconds, a call with a limit has that. Any other may take as long as it needs, as one that loads a
    model; so it is looked whether one of the workers is stopped, which never ends it.
    """

    def __init__(self, timeout: float, oldest: Callable[[], Oldest | None], clock: Clock = time.monotonic) -> None:
        """``oldest``: the call that the workers are at."""
        self._timeout = timeout
        self._oldest = oldest
        self._clock = clock
        self._stopped: dict[int, float] = {}

    def look_in(self) -> float:
        """Seconds until ``reason`` may have one, 0 or less when it has."""
        call = self._oldest()
        if call is None:
            return self._timeout
        limit = self._limit(call)
        return _LOOK if limit is None else limit - call.waited

    def reason(self, pids: Sequence[int], first_rank: int = 0) -> str | None:
        """Why the workers, processes from ``first_rank`` on, are given up; None when they are not."""
        call = self._oldest()
        limit = None if call is None else self._limit(call)
        if call is None or limit is not None:
            self._stopped.clear()
        if call is None:
            return None
        if limit is None:
            return self._stopped_for_long(pids, first_rank)
        if call.waited < limit:
            return None
        if call.timed:
            return f"a step did not end within executor.step_timeout ({limit:g} s)"
        return f"the workers did not do within {limit:g} s what they were told"

    def _limit(self, call: Oldest) -> float | None:
        return self._timeout if call.timed else call.limit

    def _stopped_for_long(self, pids: Sequence[int], first_rank: int) -> str | None:
        now = self._clock()
        for rank, pid in enumerate(pids, first_rank):
            if not is_stopped(pid):
                self._stopped.pop(rank, None)
            elif now - self._stopped.setdefault(rank, now) >= self._timeout:
                return f"worker {rank} (pid {pid}) is stopped, longer than executor.step_timeout ({self._timeout:g} s)"
        return None


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; False for one that has ended."""
    return _state(pid) == "T"


def has_ended(pid: int) -> bool:
    """Whether a process has, waited for or not."""
    return _state(pid) in ("", "Z", "X")


def _state(pid: int) -> str:
    """The kernel's letter; empty where there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""

"""When workers have taken too long for a call, and where their threads are then."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock_common.process import cpu_seconds
from penstock_enginecore.core.scheduler.base import Clock
from penstock_enginecore.executor.multiproc.calls import Oldest

_LOOK = 0.25
"""Seconds between two looks at the states of workers that may take as long as they need."""
_IDLE_AT_LEAST = 60.0
"""Seconds in which no worker computes, at least, before they are given up: a machine may have much else to do."""
_COMPUTED = 0.05
"""Seconds of processor time that show that workers compute."""


class Overdue:
    """A step has ``timeout`` seconds, a call with a limit has that. Any other may take as long as it needs, as one that loads a
    model; so it is looked whether one of the workers is stopped, which never ends it. Where one of them should compute all the
    time, it is also looked whether none does: then they wait for each other.
    """

    def __init__(self, timeout: float, oldest: Callable[[], Oldest | None], clock: Clock = time.monotonic) -> None:
        """``oldest``: the call that the workers are at."""
        self._timeout = timeout
        self._oldest = oldest
        self._clock = clock
        self._stopped: dict[int, float] = {}
        self._computed = self._computed_at = 0.0

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
            return self._stopped_for_long(pids, first_rank) or (
                self._idle_for_long(call, pids) if call.computes else None
            )
        if call.waited < limit:
            return None
        if call.timed:
            return f"a step did not end within executor.step_timeout ({limit:g} s)"
        return f"the workers did not do within {limit:g} s what they were told"

    def _limit(self, call: Oldest) -> float | None:
        return self._timeout if call.timed else call.limit

    def _idle_for_long(self, call: Oldest, pids: Sequence[int]) -> str | None:
        now, computed = self._clock(), sum(map(cpu_seconds, pids))
        if not 0 <= computed - self._computed < _COMPUTED:
            self._computed, self._computed_at = computed, now
        limit = max(self._timeout, _IDLE_AT_LEAST)
        if min(now - self._computed_at, call.waited) < limit:
            return None
        return (
            f"no worker has computed anything for {limit:g} s, while the model was loaded or prepared: they wait for each other, "
            "or for files that do not come (executor.step_timeout, at least 60 s)"
        )

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


# Where the threads of workers are, which the workers write when they are asked to.

DUMP_STACKS = signal.SIGUSR1
"""Has a worker write where its threads are."""
_PATIENT, _QUIET = 1.0, 0.25
"""Seconds without a word after which nothing more is waited for: until each worker that is not stopped has begun, and then."""
_MOST = 64 * 1024


def read_stacks(pipes: Sequence[int], pids: Sequence[int]) -> list[str]:
    """Ask all workers, and read what they write. ``pipes``: a descriptor of each. Returns a text of each; one says so where
    a worker has written nothing.
    """
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, DUMP_STACKS)
    texts = [b""] * len(pipes)
    places = {pipe: i for i, pipe in enumerate(pipes)}
    poll = select.poll()
    for pipe in pipes:
        poll.register(pipe, select.POLLIN)
    silent = {i for i, pid in enumerate(pids) if not is_stopped(pid) and not has_ended(pid)}
    while ready := poll.poll(1000 * (_PATIENT if silent else _QUIET)):
        for pipe, _ in ready:
            read = os.read(pipe, _MOST)
            texts[places[pipe]] += read
            silent.discard(places[pipe])
            if not read:
                poll.unregister(pipe)
    return [text.decode(errors="replace") or _silence(pid) for text, pid in zip(texts, pids, strict=True)]


def _silence(pid: int) -> str:
    return "it has ended" if has_ended(pid) else "it does not answer: it is stopped"

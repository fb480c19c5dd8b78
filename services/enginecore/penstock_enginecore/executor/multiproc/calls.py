"""The calls that workers were given and have not all answered, and those that take too long."""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from penstock_common.process import cpu_seconds
from penstock_enginecore.core.scheduler.base import Clock
from penstock_enginecore.worker.failures import WorkersGone


class Oldest(NamedTuple):
    """The call that workers are at. ``waited``: seconds that they have had for it. ``timed``, ``limit``, ``computes``: see
    ``Calls.begin``.
    """

    waited: float
    timed: bool
    limit: float | None
    computes: bool = False


class _Call:
    def __init__(self, num_workers: int, *, timed: bool, limit: float | None, computes: bool) -> None:
        self.future: Future[list[Any]] = Future()
        self.answers: list[Any] = [None] * num_workers
        self.missing = set(range(num_workers))
        self.error: Exception | None = None
        self.timed = timed
        self.limit = limit
        self.computes = computes


class Calls:
    """From any thread. Calls are numbered, and each worker answers in their order."""

    def __init__(self, num_workers: int, clock: Clock = time.monotonic) -> None:
        self._num_workers = num_workers
        self._clock = clock
        self._lock = threading.Lock()
        self._failing = threading.Condition(self._lock)
        self._calls: dict[int, _Call] = {}
        self._left_alone: set[tuple[int, int]] = set()
        self._last = 0
        self._oldest_since = 0.0
        self._failed: Exception | None = None

    def begin(
        self, *, timed: bool, limit: float | None = None, computes: bool = False
    ) -> "tuple[int, Future[list[Any]]]":
        """The next number, and what becomes of the call: the answers by worker, or the first error that came. Raises the error
        of ``fail``. ``timed``: a step, which ends when all have answered; what is not ends with its first error, since others
        may wait for the worker that had it. ``limit``: seconds for what is no step, None for as long as it takes.
        ``computes``: of what may take as long as it needs, whether a worker computes all the time until it is over.
        """
        with self._lock:
            if self._failed is not None:
                raise self._failed
            self._last += 1
            if not self._calls:
                self._oldest_since = self._clock()
            call = self._calls[self._last] = _Call(self._num_workers, timed=timed, limit=limit, computes=computes)
            return self._last, call.future

    def answered(self, worker: int, number: int, answer: Any) -> None:
        """A worker's answer; an Exception: the call failed there. Numbers that are not waited for are ignored."""
        with self._lock:
            call = self._calls.get(number)
            if call is None:
                self._left_alone.discard((number, worker))
                return
            if worker not in call.missing:
                return
            call.missing.discard(worker)
            call.answers[worker] = answer
            if isinstance(answer, Exception) and call.error is None:
                call.error = answer
            if call.missing and (call.error is None or call.timed):
                return
            self._left_alone.update((number, other) for other in call.missing)
            del self._calls[number]
            self._oldest_since = self._clock()
        if call.error is not None:
            call.future.set_exception(call.error)
        else:
            call.future.set_result(call.answers)

    def fail(self, error: Exception) -> None:
        """Nothing is answered any more: end every call, also those to come, with ``error``. The first one counts."""
        with self._lock:
            self._failed = self._failed or error
            self._failing.notify_all()
            calls = list(self._calls.values())
            self._calls.clear()
        for call in calls:
            call.future.set_exception(error)

    def check(self) -> None:
        """Raise the error of ``fail``, if that was called."""
        with self._lock:
            if self._failed is not None:
                raise self._failed

    @property
    def has_failed(self) -> bool:
        """Whether ``fail`` was called."""
        with self._lock:
            return self._failed is not None

    def failed(self) -> Exception:
        """The error of ``fail``, which was called or is about to be."""
        with self._lock:
            while self._failed is None:
                self._failing.wait()
            return self._failed

    def oldest(self) -> Oldest | None:
        """The oldest call that not all have answered, None when there is none."""
        with self._lock:
            call = next(iter(self._calls.values()), None)
            if call is None:
                return None
            return Oldest(self._clock() - self._oldest_since, call.timed, call.limit, call.computes)

    @property
    def parted(self) -> bool:
        """Whether a worker has not answered a call that has failed elsewhere: it may wait for the others."""
        with self._lock:
            return bool(self._left_alone)

    def missing(self) -> set[int]:
        """Workers that have not answered the oldest call."""
        with self._lock:
            oldest = next(iter(self._calls.values()), None)
            return set() if oldest is None else set(oldest.missing)


T = TypeVar("T")


def agreed(what: str, answers: Sequence[T], first_rank: int = 0) -> T:
    """The answer of all workers, which are those from ``first_rank`` on. Raises WorkersGone, naming a worker and what differs,
    where they are not the same.
    """
    first = answers[0]
    for rank, other in enumerate(answers, first_rank):
        if other != first:
            name, ours, theirs = _difference(msgspec.to_builtins(first), msgspec.to_builtins(other))
            raise WorkersGone(
                f"worker {rank} differs from worker {first_rank} in {what}: {name} is {theirs!r} and not {ours!r}"
            )
    return first


def _difference(one: Any, other: Any, name: str = "") -> tuple[str, Any, Any]:
    """Where two values differ first."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            if one.get(key) != other.get(key):
                return _difference(one.get(key), other.get(key), f"{name}.{key}" if name else str(key))
    return name or "it", one, other


# When workers have taken too long for a call, and where their threads are then.

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

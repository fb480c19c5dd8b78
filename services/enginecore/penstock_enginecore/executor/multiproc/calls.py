"""Calls that the engine sends to workers and that at least one worker has not answered yet, and detection of calls that
take too long.
"""

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
    """Oldest call that at least one worker has not answered.

    Attributes:
        waited: Seconds since the previous call was answered, or since this call was sent if no other call was
            unanswered.
        timed: See ``Calls.begin``.
        limit: See ``Calls.begin``.
        computes: See ``Calls.begin``.
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
    """Tracks numbered calls to the workers. Each worker answers the calls in order. Thread-safe."""

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
        """Register a call. Returns the call's number, and a future with the answers of all workers or with the first
        error.

        If ``fail`` was called, raises the error that was passed to ``fail``.

        Args:
            timed: True for a step, which ends when all workers have answered. Any other call ends with its first error,
                because other workers may wait for the worker that raised it.
            limit: Timeout in seconds for a call that is not a step, or None for no timeout.
            computes: For a call without a timeout, whether at least one worker is computing at every moment until the
                call ends.
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
        """Record the answer of a worker to call ``number``. If ``answer`` is an Exception, the call failed on this
        worker. Numbers of unknown calls are ignored.
        """
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
        """Fail all pending and future calls with ``error``. If ``fail`` was called before, future calls fail with the
        error of the first call of ``fail``.
        """
        with self._lock:
            self._failed = self._failed or error
            self._failing.notify_all()
            calls = list(self._calls.values())
            self._calls.clear()
        for call in calls:
            call.future.set_exception(error)

    def check(self) -> None:
        """If ``fail`` was called, raise the error that was passed to ``fail``."""
        with self._lock:
            if self._failed is not None:
                raise self._failed

    @property
    def has_failed(self) -> bool:
        """Whether ``fail`` was called."""
        with self._lock:
            return self._failed is not None

    def failed(self) -> Exception:
        """Wait until ``fail`` is called, and return the error that was passed to ``fail``."""
        with self._lock:
            while self._failed is None:
                self._failing.wait()
            return self._failed

    def oldest(self) -> Oldest | None:
        """Return the oldest call that at least one worker has not answered, or None if all calls are answered."""
        with self._lock:
            call = next(iter(self._calls.values()), None)
            if call is None:
                return None
            return Oldest(self._clock() - self._oldest_since, call.timed, call.limit, call.computes)

    @property
    def parted(self) -> bool:
        """Whether a worker has not answered a call that failed on another worker. The worker that has not answered may
        be waiting for other workers.
        """
        with self._lock:
            return bool(self._left_alone)

    def missing(self) -> set[int]:
        """Return the workers that have not answered the oldest unanswered call."""
        with self._lock:
            oldest = next(iter(self._calls.values()), None)
            return set() if oldest is None else set(oldest.missing)


T = TypeVar("T")


def agreed(what: str, answers: Sequence[T], first_rank: int = 0) -> T:
    """Return the answer, which must be the same from all workers. ``first_rank`` is the rank of the worker that gave
    the first answer.

    Raises WorkersGone if the answers differ. The message names a worker and the difference.
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
    """Return the name of the first field in which two structs differ, and the field's value in both structs."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            if one.get(key) != other.get(key):
                return _difference(one.get(key), other.get(key), f"{name}.{key}" if name else str(key))
    return name or "the value", one, other


# Timeouts of calls to workers, and stack traces of workers.

_LOOK = 0.25
"""Seconds between two checks of the workers during a call without a timeout."""
_IDLE_AT_LEAST = 60.0
"""Minimum time in seconds in which no worker computes, before the engine considers the workers hung.

During a shorter time, other processes may keep the machine busy.
"""
_COMPUTED = 0.05
"""Processor time in seconds. If all workers together have used at least this time, they count as computing."""


class Overdue:
    """Detects workers that hang.

    A step must end within ``timeout`` seconds, and a call with a limit within its limit. Other calls, such as loading a
    model, have no timeout. During a call without a timeout, the workers count as hung if a signal has stopped a worker.
    If ``computes`` is true for the call, the workers also count as hung if no worker computes for a long time. The
    workers then wait for each other.
    """

    def __init__(self, timeout: float, oldest: Callable[[], Oldest | None], clock: Clock = time.monotonic) -> None:
        """Watch the oldest unanswered call, which ``oldest`` returns."""
        self._timeout = timeout
        self._oldest = oldest
        self._clock = clock
        self._stopped: dict[int, float] = {}
        self._computed = self._computed_at = 0.0

    def look_in(self) -> float:
        """Return the number of seconds until ``reason`` may find hung workers. A value of 0 or less means that the
        caller should call ``reason`` now.
        """
        call = self._oldest()
        if call is None:
            return self._timeout
        limit = self._limit(call)
        return _LOOK if limit is None else limit - call.waited

    def reason(self, pids: Sequence[int], first_rank: int = 0) -> str | None:
        """Return the reason why the workers count as hung, or None if the workers do not count as hung.

        ``pids`` are the process IDs of the workers, from rank ``first_rank`` on.
        """
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
        return f"the workers did not complete a call within {limit:g} s"

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
            f"no worker has computed anything for {limit:g} s, while the model was loaded or prepared; the workers wait for each "
            "other or for files that cannot be read (the limit is executor.step_timeout, at least 60 s)"
        )

    def _stopped_for_long(self, pids: Sequence[int], first_rank: int) -> str | None:
        now = self._clock()
        for rank, pid in enumerate(pids, first_rank):
            if not is_stopped(pid):
                self._stopped.pop(rank, None)
            elif now - self._stopped.setdefault(rank, now) >= self._timeout:
                return (
                    f"worker {rank} (pid {pid}) was stopped by a signal for longer than executor.step_timeout "
                    f"({self._timeout:g} s)"
                )
        return None


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped (paused) a process. Returns False for a process that has ended."""
    return _state(pid) == "T"


def has_ended(pid: int) -> bool:
    """Return whether a process has ended. A process whose parent has not collected its exit status counts as ended."""
    return _state(pid) in ("", "Z", "X")


def _state(pid: int) -> str:
    """Return the operating system's letter for the state of a process, or an empty text if the process does not exist."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


# Stack traces, which workers write on request.

DUMP_STACKS = signal.SIGUSR1
"""Signal that makes a worker write the stack traces of its threads."""
_PATIENT, _QUIET = 1.0, 0.25
"""Seconds without new output from workers after which ``read_stacks`` stops reading.

``_PATIENT`` applies until every running worker has written something, and ``_QUIET`` applies afterwards.
"""
_MOST = 64 * 1024


def read_stacks(pipes: Sequence[int], pids: Sequence[int]) -> list[str]:
    """Ask all workers for stack traces, and return the text from each worker. ``pipes`` has one descriptor for each
    worker.

    If a worker writes nothing, the text for this worker gives the reason.
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
    return "the process has ended" if has_ended(pid) else "the process does not answer because it is stopped"

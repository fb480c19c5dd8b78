"""The calls that workers were given and have not all answered, and what all must answer alike."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import msgspec

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

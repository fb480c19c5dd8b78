"""Bounded submission: runs a limited number of inputs concurrently, and reads further inputs only when they can run."""

import queue
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, Generic, TypeVar

from penstock_common.errors import RequestFailed, Unavailable

T = TypeVar("T")
R = TypeVar("R")

Submit = Callable[[Callable[[], Coroutine[Any, Any, Any]]], "Future[Any]"]
"""Function that calls its argument in the event loop's thread and runs the returned coroutine.

Cancelling the future cancels the coroutine.
"""

_HELD_PER_RUNNING = 4
_TICK = 0.2
"""Seconds between calls of ``tick``."""


class Window(Generic[T, R]):
    """Runner that calls ``one`` for each input and its index on the event loop's thread, with limited concurrency.

    Inputs are read in the thread that reads the results. If results are read slowly, inputs are also read slowly, so
    memory use does not grow with the number of inputs. ``tick`` is called repeatedly during the wait for results.
    """

    def __init__(self, submit: Submit, one: Callable[[int, T], Coroutine[Any, Any, R]], *, at_once: int) -> None:
        self._submit = submit
        self._one = one
        self.tick: Callable[[], None] = lambda: None
        self._at_once = at_once
        self._running: dict[int, Future[R]] = {}
        self._ended: queue.SimpleQueue[tuple[int, Future[R]]] = queue.SimpleQueue()

    def results(self, inputs: Iterator[T | RequestFailed]) -> Generator[tuple[int, R | RequestFailed], None, None]:
        """Yield each input's index and its result or failure, in the order in which they end.

        An invalid input yields its error. Errors of reading the inputs are raised. When the generator ends for any
        reason, running inputs are cancelled.
        """
        try:
            yield from self._results(enumerate(inputs), lambda: 0)
        finally:
            self._end()

    def in_order(self, inputs: Iterator[T | RequestFailed]) -> Generator[tuple[int, R | RequestFailed], None, None]:
        """Yield the pairs of ``results`` in the order of the inputs. The number of results that wait for an earlier
        result is also limited.
        """
        held: dict[int, R | RequestFailed] = {}
        due = 0
        try:
            for index, result in self._results(enumerate(inputs), lambda: len(held)):
                held[index] = result
                while due in held:
                    yield due, held.pop(due)
                    due += 1
        finally:
            self._end()

    def _results(
        self, inputs: Iterator[tuple[int, T | RequestFailed]], held: Callable[[], int]
    ) -> Iterator[tuple[int, R | RequestFailed]]:
        more = True
        while more or self._running:
            while more and len(self._running) < self._at_once and self._has_room(held()):
                index, value = next(inputs, (-1, None))
                more = index >= 0
                if isinstance(value, RequestFailed):
                    yield index, value
                elif value is not None:
                    self._start(index, value)
                if not self._ended.empty():  # a slow source of inputs must not delay results that are ready
                    break
            if self._running:
                yield self._next()

    def _has_room(self, held: int) -> bool:
        return len(self._running) + held < _HELD_PER_RUNNING * self._at_once or not self._running

    def _start(self, index: int, value: T) -> None:
        future = self._running[index] = self._submit(partial(self._one, index, value))
        future.add_done_callback(lambda ended: self._ended.put((index, ended)))

    def _next(self) -> tuple[int, R | RequestFailed]:
        """Wait for the next result."""
        while True:
            try:
                index, future = self._ended.get(timeout=_TICK)
                break
            except queue.Empty:
                self.tick()
        del self._running[index]
        try:
            return index, future.result()
        except RequestFailed as e:
            return index, e
        except CancelledError:
            return index, Unavailable("this LLM was closed", reason="CLOSED")

    def _end(self) -> None:
        for future in self._running.values():
            future.cancel()
        self._running.clear()

"""The one thread that computes: steps run on it in the order in which they are handed over."""

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from penstock_enginecore.worker.result_futures import CompletionThread, Late

T = TypeVar("T")


class DeviceThread:
    """Runs calls one after the other. A daemon: a call that never returns does not keep the process alive.

    A call may give a ``Late``, where it has only told a device what to do: the thread goes on, and another one waits for it.
    """

    def __init__(self, name: str = "device") -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._next: deque[Callable[[], None]] = deque()
        self._completions: CompletionThread | None = None  # belongs to the thread
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], "T | Late[T]"]) -> "Future[T]":
        """Queue a call. What it raises comes out of the future, and what a late result brings or raises."""
        future: Future[T] = Future()
        self._calls.put(partial(self._run_into, future, call))
        return future

    def submit_next(self, call: Callable[[], T]) -> "Future[T]":
        """The same before the calls that are queued, behind that which runs."""
        future: Future[T] = Future()
        self._next.append(partial(self._run_into, future, call))
        self._calls.put(self._run_next)
        return future

    def call(self, call: Callable[[], T]) -> T:
        """Run a call behind those that are queued, and wait for its result."""
        return self.submit(call).result()

    def stop(self) -> None:
        """End the thread behind the calls that are queued. Nothing may be submitted afterwards."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._run_next()
            call()
            del call  # or the last call's result lives on while the thread waits
        if self._completions is not None:
            self._completions.stop()

    def _run_next(self) -> None:
        while self._next:
            self._next.popleft()()

    def _run_into(self, future: "Future[T]", call: Callable[[], "T | Late[T]"]) -> None:
        try:
            result = call()
            if not isinstance(result, Late):
                future.set_result(result)
                return
            if self._completions is None:
                self._completions = CompletionThread()
            self._completions.resolve(future, result)
        except BaseException as e:  # the future's reader decides what it means
            future.set_exception(e)
            # The error knows this frame: what the frame knows would live on with what the failed step holds.
            del future, call

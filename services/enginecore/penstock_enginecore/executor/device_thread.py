"""The one thread that computes: steps run on it in the order in which they are handed over."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class DeviceThread:
    """Runs calls one after the other. A daemon: a call that never returns does not keep the process alive."""

    def __init__(self, name: str = "device") -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Queue a call. What it raises comes out of the future."""
        future: Future[T] = Future()
        self._calls.put(partial(_run_into, future, call))
        return future

    def call(self, call: Callable[[], T]) -> T:
        """Run a call behind those that are queued, and wait for its result."""
        return self.submit(call).result()

    def stop(self) -> None:
        """End the thread behind the calls that are queued. Nothing may be submitted afterwards."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # or the last call's result lives on while the thread waits


def _run_into(future: "Future[T]", call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as e:  # the future's reader decides what it means
        future.set_exception(e)
        # The error knows this frame: what the frame knows would live on with what the failed step holds.
        del future, call

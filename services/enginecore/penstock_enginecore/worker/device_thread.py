"""The device thread, which runs all computation, and the thread that waits for device results."""

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy.typing as npt
import torch

# Another thread waits for results, so that the device thread can continue.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Late(Generic[T]):
    """A result that is not ready yet. ``wait`` returns the result once it is ready, or raises the error of the work.
    Thread-safe.
    """

    wait: Callable[[], T]


class Arrival(Protocol):
    """A copy of numbers from a device to the host. Thread-safe, and may be queried repeatedly."""

    def arrived(self) -> bool:
        """Return whether ``wait`` would return immediately."""

    def wait(self) -> npt.NDArray[Any]:
        """Return the numbers in their original shape. Raises the error of the work that produces them."""


BeginCopy = Callable[[torch.Tensor], Arrival]
"""Function that begins to copy a tensor to the host, after the work that computes the tensor."""


def begin_copy(tensor: torch.Tensor) -> Arrival:
    """Begin to copy ``tensor`` to the host, without waiting for its device.

    Work that overwrites the tensor may be launched immediately after this call.
    """
    return _Copied(tensor) if tensor.device.type == "cpu" else _PinnedCopy(tensor)


class _PinnedCopy:
    """A copy to page-locked memory. A CUDA event marks its end, and waiting for the event uses no CPU time."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        make_event: Any = torch.cuda.Event
        self._event = make_event(blocking=True)
        self._event.record(torch.cuda.current_stream(tensor.device))

    def arrived(self) -> bool:
        """Return whether the event has occurred."""
        return bool(self._event.query())

    def wait(self) -> npt.NDArray[Any]:
        """Return the page-locked memory, once the copy is complete."""
        self._event.synchronize()
        return self._host.numpy()


class _Copied:
    """A copy of a CPU tensor, which is complete immediately."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._numbers = tensor.clone().numpy()

    def arrived(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> npt.NDArray[Any]:
        """Return the copy."""
        return self._numbers


class CompletionThread:
    """Waits for late results in the order in which they are submitted, and resolves their futures.

    The thread is a daemon thread, so a result that never arrives does not keep the process alive.
    """

    def __init__(self, name: str = "completion") -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def resolve(self, future: "Future[T]", late: Late[T]) -> None:
        """Resolve ``future`` with the result or the error of ``late``."""
        self._waiting.put(partial(run_into, future, late.wait))

    def stop(self) -> None:
        """End the thread after the submitted results. No later call is allowed."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (resolve := self._waiting.get()) is not None:
            resolve()
            del resolve  # Otherwise the last result stays alive while the thread waits.


def run_into(future: "Future[T]", call: Callable[[], T]) -> None:
    """Resolve ``future`` with the result or the error of ``call``."""
    try:
        future.set_result(call())
    except BaseException as e:  # The future's reader handles the error.
        future.set_exception(e)
        # The error references this frame, and the frame would keep the failed step's objects alive.
        del future, call


class DeviceThread:
    """Runs calls one after the other, on a daemon thread. A call that never returns does not keep the process alive.

    A call that only launches work on a device may return a ``Late``. The thread then continues, and another thread
    waits for the result.
    """

    def __init__(self, name: str = "device") -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._next: deque[Callable[[], None]] = deque()
        self._completions: CompletionThread | None = None  # Used only by the thread.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], "T | Late[T]"]) -> "Future[T]":
        """Queue a call. The future gets its result or its error, also if the result is a ``Late``."""
        future: Future[T] = Future()
        self._calls.put(partial(self._run_into, future, call))
        return future

    def submit_next(self, call: Callable[[], T]) -> "Future[T]":
        """Queue a call before all queued calls, after the running one."""
        future: Future[T] = Future()
        self._next.append(partial(self._run_into, future, call))
        self._calls.put(self._run_next)
        return future

    def call(self, call: Callable[[], T]) -> T:
        """Queue a call, and wait for its result."""
        return self.submit(call).result()

    def stop(self) -> None:
        """End the thread after the queued calls. No later call is allowed."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._run_next()
            call()
            del call  # Otherwise the last call's result stays alive while the thread waits.
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
        except BaseException as e:  # The future's reader handles the error.
            future.set_exception(e)
            # The error references this frame, and the frame would keep the failed step's objects alive.
            del future, call

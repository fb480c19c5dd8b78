"""The device thread, which runs all work on a device, and the thread that waits for results from the device."""

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

# Results that are not ready yet. Another thread waits for these results, so that the device thread can continue.

T = TypeVar("T")


def use_device(device: torch.device) -> None:
    """Make ``device`` the current device of this thread. Does nothing for a CPU.

    Triton launches kernels on the current device, and torch creates streams, events and graphs there. The current
    device belongs to a thread and is device 0 in a new thread. Therefore each thread that uses a GPU calls this
    function before its first CUDA call. Otherwise the thread also creates a CUDA context on device 0.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


@dataclass(frozen=True, slots=True)
class Late(Generic[T]):
    """Result that is not ready yet. ``wait`` waits until the result is ready, and returns the result or raises the
    error of the work. Thread-safe.
    """

    wait: Callable[[], T]


class Arrival(Protocol):
    """Copy of a tensor from a device to the host, which may still be running. Thread-safe. The methods may be called
    repeatedly.
    """

    def arrived(self) -> bool:
        """Return whether ``wait`` would return immediately."""

    def wait(self) -> npt.NDArray[Any]:
        """Wait until the copy is complete, and return the numbers in the shape of the tensor. Raises the error of the
        work that computes the tensor.
        """


BeginCopy = Callable[[torch.Tensor], Arrival]
"""Function that begins to copy a tensor to the host. The copy runs after the work that computes the tensor."""


def begin_copy(tensor: torch.Tensor) -> Arrival:
    """Begin to copy ``tensor`` to the host, without waiting for its device.

    Work that overwrites the tensor may be launched immediately after this call.
    """
    return _Copied(tensor) if tensor.device.type == "cpu" else _PinnedCopy(tensor)


class _PinnedCopy:
    """``Arrival`` of a copy to page-locked memory. A CUDA event marks the end of the copy, and waiting for the event
    uses no CPU time.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._device = tensor.device
        self._host.copy_(tensor, non_blocking=True)
        make_event: Any = torch.cuda.Event
        self._event = make_event(blocking=True)
        self._event.record(torch.cuda.current_stream(tensor.device))

    def arrived(self) -> bool:
        """Return whether the copy is complete."""
        return bool(self._event.query())

    def wait(self) -> npt.NDArray[Any]:
        """Wait until the copy is complete, and return the page-locked memory."""
        use_device(self._device)
        self._event.synchronize()
        return self._host.numpy()


class _Copied:
    """``Arrival`` of a copy of a CPU tensor, which is complete immediately."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._numbers = tensor.clone().numpy()

    def arrived(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> npt.NDArray[Any]:
        """Return the copy."""
        return self._numbers


class CompletionThread:
    """Thread that waits for ``Late`` results in the order in which callers submit them, and sets the futures of the
    results.

    The thread is a daemon thread, so a result that never arrives does not keep the process alive.
    """

    def __init__(self, name: str = "completion") -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def resolve(self, future: "Future[T]", late: Late[T]) -> None:
        """Wait for ``late`` on the thread, and set its result or its error as the result or error of ``future``."""
        self._waiting.put(partial(run_into, future, late.wait))

    def stop(self) -> None:
        """End the thread after all submitted results. Methods must not be called afterwards."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (resolve := self._waiting.get()) is not None:
            resolve()
            del resolve  # Without this line, the last result would stay in memory while the thread waits.


def run_into(future: "Future[T]", call: Callable[[], T]) -> None:
    """Run ``call``, and set its result or its error as the result or error of ``future``."""
    try:
        future.set_result(call())
    except BaseException as e:  # The caller that reads the future handles the error.
        future.set_exception(e)
        # The error references this frame, so without this line the frame would keep objects of the failed step in
        # memory.
        del future, call


class DeviceThread:
    """Daemon thread that runs calls one after the other. A call that never returns does not keep the process alive.

    A call that only launches work on a device may return a ``Late``. The device thread then runs the next call, and
    another thread waits for the result.
    """

    def __init__(self, name: str = "device") -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._next: deque[Callable[[], None]] = deque()
        self._completions: CompletionThread | None = None  # Only the device thread uses this attribute.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], "T | Late[T]"]) -> "Future[T]":
        """Queue a call, and return its future. If the call returns a ``Late``, the future gets the result of the
        ``Late``.
        """
        future: Future[T] = Future()
        self._calls.put(partial(self._run_into, future, call))
        return future

    def submit_next(self, call: Callable[[], T]) -> "Future[T]":
        """Queue a call before all other queued calls, so that it runs directly after the running call."""
        future: Future[T] = Future()
        self._next.append(partial(self._run_into, future, call))
        self._calls.put(self._run_next)
        return future

    def call(self, call: Callable[[], T]) -> T:
        """Queue a call, and wait for its result. Returns the result or raises the error of the call."""
        return self.submit(call).result()

    def stop(self) -> None:
        """End the thread after all queued calls. Methods must not be called afterwards."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._run_next()
            call()
            del call  # Without this line, the result of the last call would stay in memory while the thread waits.
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
        except BaseException as e:  # The caller that reads the future handles the error.
            future.set_exception(e)
            # The error references this frame, so without this line the frame would keep objects of the failed step in
            # memory.
            del future, call

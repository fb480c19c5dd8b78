"""The one thread that computes, and the results that a device has been told to make."""

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

# Results are waited for on a thread of their own, while the device thread goes on.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Late(Generic[T]):
    """A result that is not there yet. ``wait``: on any thread, gives it once it is, or raises what its making failed with."""

    wait: Callable[[], T]


class Arrival(Protocol):
    """Numbers on their way from a device to the host. Any thread may ask, any number of times."""

    def arrived(self) -> bool:
        """Whether ``wait`` returns at once."""

    def wait(self) -> npt.NDArray[Any]:
        """The numbers, in the shape that they had. Raises what the work before them failed with."""


BeginCopy = Callable[[torch.Tensor], Arrival]
"""Begins to copy a tensor to the host, behind the work that makes it."""


def begin_copy(tensor: torch.Tensor) -> Arrival:
    """Begin to copy ``tensor`` to the host, without waiting for what is under way on its device. What overwrites it may be
    launched at once.
    """
    return _Copied(tensor) if tensor.device.type == "cpu" else _PinnedCopy(tensor)


class _PinnedCopy:
    """Into page-locked memory; a CUDA event tells the end. Waiting for it takes no time of a processor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        make_event: Any = torch.cuda.Event
        self._event = make_event(blocking=True)
        self._event.record(torch.cuda.current_stream(tensor.device))

    def arrived(self) -> bool:
        """Whether the event has happened."""
        return bool(self._event.query())

    def wait(self) -> npt.NDArray[Any]:
        """The page-locked memory."""
        self._event.synchronize()
        return self._host.numpy()


class _Copied:
    """A CPU's: there when it is begun."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._numbers = tensor.clone().numpy()

    def arrived(self) -> bool:
        """Always."""
        return True

    def wait(self) -> npt.NDArray[Any]:
        """The copy."""
        return self._numbers


class CompletionThread:
    """Resolves futures with late results, in the order in which they are handed over. A daemon: what never arrives does not keep
    the process alive.
    """

    def __init__(self, name: str = "completion") -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def resolve(self, future: "Future[T]", late: Late[T]) -> None:
        """Give ``future`` what ``late`` brings, or what it raises."""
        self._waiting.put(partial(run_into, future, late.wait))

    def stop(self) -> None:
        """End the thread behind what was handed over. Nothing may follow."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (resolve := self._waiting.get()) is not None:
            resolve()
            del resolve  # or the last result lives on while the thread waits


def run_into(future: "Future[T]", call: Callable[[], T]) -> None:
    """Resolve ``future`` with what ``call`` returns or raises."""
    try:
        future.set_result(call())
    except BaseException as e:  # the future's reader decides what it means
        future.set_exception(e)
        # The error knows this frame: what the frame knows would live on with what the failed step holds.
        del future, call


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

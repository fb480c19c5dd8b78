"""A stream of a device whose work runs as late as a real device may run it: when a thread waits for the work."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class DeferredStream:
    """``CopyStream`` for CPU tensors.

    Attributes:
        calls: Names of the methods that were called, and ``run`` for each piece of work that ran.
        fail_at: Index of the work that raises OSError, or None.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail_at: int | None = None
        self._queued: deque[Callable[[], Any]] = deque()
        self._launched = self._run = 0
        self._lock = threading.RLock()

    def launched(self) -> int:
        """Return the event 0, which is always over."""
        return 0

    @contextmanager
    def after(self, event: int) -> Iterator[None]:
        """Return a context that does nothing."""
        yield

    def launch(self, work: Callable[[], Any]) -> None:
        """Queue ``work``. Raises OSError instead if ``fail_at`` is the index of the work."""
        with self._lock:
            if self._launched == self.fail_at:
                self.fail_at = None
                raise OSError("the device refuses the work")
            self.calls.append("launch")
            self._launched += 1
            self._queued.append(work)

    def mark(self) -> int:
        """Return the number of launched pieces of work as an event."""
        return self._launched

    def wait(self, event: int) -> None:
        """Run the work that was launched before the event."""
        with self._lock:
            self.calls.append("wait")
            while self._run < event:
                self._run += 1
                with torch.inference_mode():  # A device knows no such mode, and another thread may run the work here.
                    self._queued.popleft()()
                self.calls.append("run")

    def join(self, event: int) -> None:
        """Run the work now, because the work of tests runs at once."""
        self.wait(event)

    @property
    def running(self) -> int:
        """Number of pieces of work that did not run yet."""
        return len(self._queued)

"""Return of freed memory to the operating system while an engine is idle."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from penstock_common import memory as allocator

_LOOK = 0.5
"""Time between two checks whether the engine is idle, in seconds."""
_WORTH_IT = 64 * 1024 * 1024
"""Minimum number of freed bytes that are returned. For fewer bytes, the page faults in the next step would take too
much time for the gain.
"""


class Loop(Protocol):
    """The attributes of a BusyLoop that ``IdleMemory`` reads from another thread."""

    last_step_time: float
    """Time at which the engine's last step ended."""

    @property
    def has_work(self) -> bool:
        """Whether the engine has requests or events to process."""


class IdleMemory:
    """Returns freed memory to the operating system. ``look`` must be called periodically.

    Memory is returned only under two conditions. The engine was idle in two consecutive checks. Since the last return
    of memory, the engine has run a step or dropped tensors that frontends had sent.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        num_drops: Callable[[], int] = lambda: 0,
        free_bytes: Callable[[], int] = allocator.free_bytes,
        give_back: Callable[[], None] = allocator.give_back_free,
    ) -> None:
        """Create the check. ``num_drops`` returns how often the engine has dropped unused tensors that frontends had
        sent.
        """
        self._loop = loop
        self._num_drops = num_drops
        self._free_bytes = free_bytes
        self._give_back = give_back
        self._seen = self._done = self._state()

    def look(self) -> None:
        """Check whether the engine is idle. Return freed memory to the operating system if the conditions of this class
        are met and at least the minimum number of bytes can be returned.
        """
        last, self._seen = self._seen, self._state()
        if self._loop.has_work or last != self._seen or self._seen == self._done:
            return
        self._done = self._seen
        if self._free_bytes() >= _WORTH_IT:
            self._give_back()

    def _state(self) -> tuple[float, int]:
        return self._loop.last_step_time, self._num_drops()


@contextmanager
def idle_memory_given_back(loop: Loop, num_drops: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Check ``loop`` on a separate thread, twice a second, while the ``with`` block runs. See ``IdleMemory``."""
    memory, over = IdleMemory(loop, num_drops=num_drops), threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK):
            memory.look()

    thread = threading.Thread(target=watch, name="penstock-memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

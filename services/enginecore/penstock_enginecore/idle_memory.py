"""Gives memory back to the system that an engine's steps have freed, once it has nothing to do."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from penstock_common import memory as allocator

_LOOK = 0.5
"""Seconds between two looks at the engine."""
_WORTH_IT = 64 * 1024 * 1024
"""Bytes of freed memory for which the next step's page faults are worth it."""


class Loop(Protocol):
    """What is looked at of a BusyLoop, from another thread."""

    last_step_time: float
    """When the last step ended."""

    @property
    def has_work(self) -> bool:
        """Whether the engine has something to do."""


class IdleMemory:
    """``look`` now and then: it acts when the engine was idle at two looks in a row, and has stepped or dropped tensors of
    frontends since it last acted.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        num_drops: Callable[[], int] = lambda: 0,
        free_bytes: Callable[[], int] = allocator.free_bytes,
        give_back: Callable[[], None] = allocator.give_back_free,
    ) -> None:
        """``num_drops``: how often tensors of frontends were dropped that no request had referred to."""
        self._loop = loop
        self._num_drops = num_drops
        self._free_bytes = free_bytes
        self._give_back = give_back
        self._seen = self._done = self._state()

    def look(self) -> None:
        """Give back what is free, if it is time for that and there is enough."""
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
    """Look at ``loop`` on a thread of its own, twice a second, as long as the block runs. See ``IdleMemory``."""
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

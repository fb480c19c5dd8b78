"""Gives memory back to the system that an engine's steps have freed, once it has nothing to do."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from penstock_common import allocator

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
    """``look`` now and then: it acts when the engine was idle at two looks in a row and has stepped since it last acted."""

    def __init__(
        self,
        loop: Loop,
        *,
        free_bytes: Callable[[], int] = allocator.free_bytes,
        give_back: Callable[[], None] = allocator.give_back_free,
    ) -> None:
        self._loop = loop
        self._free_bytes = free_bytes
        self._give_back = give_back
        self._seen = loop.last_step_time
        self._done = loop.last_step_time

    def look(self) -> None:
        """Give back what is free, if it is time for that and there is enough."""
        last, self._seen = self._seen, self._loop.last_step_time
        if self._loop.has_work or last != self._seen or self._seen == self._done:
            return
        self._done = self._seen
        if self._free_bytes() >= _WORTH_IT:
            self._give_back()


@contextmanager
def idle_memory_given_back(loop: Loop) -> Iterator[None]:
    """Look at ``loop`` on a thread of its own, twice a second, as long as the block runs."""
    memory, over = IdleMemory(loop), threading.Event()

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

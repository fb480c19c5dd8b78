"""Requests that no engine has."""

import asyncio
from collections.abc import Callable

from penstock_frontend.engine.journal import JournalEntry


class HeldRequests:
    """In the order in which they lost their engines, each for ``timeout`` seconds at most; then ``on_timeout`` is called."""

    def __init__(self, timeout: float, on_timeout: Callable[[JournalEntry], None]) -> None:
        self._timeout = timeout
        self._on_timeout = on_timeout
        self._timers: dict[JournalEntry, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def add(self, entry: JournalEntry) -> None:
        """Hold an entry that is not held."""
        self._timers[entry] = asyncio.get_running_loop().call_later(self._timeout, self._give_up, entry)

    def discard(self, entry: JournalEntry) -> bool:
        """Hold it no longer. Returns whether it was held."""
        timer = self._timers.pop(entry, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def take_all(self) -> list[JournalEntry]:
        """Let go of all."""
        timers, self._timers = self._timers, {}
        for timer in timers.values():
            timer.cancel()
        return list(timers)

    def _give_up(self, entry: JournalEntry) -> None:
        del self._timers[entry]
        self._on_timeout(entry)

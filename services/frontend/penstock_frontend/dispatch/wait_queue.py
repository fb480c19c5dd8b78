"""Requests that wait outside of any engine."""

import asyncio
from collections.abc import Callable

from penstock_frontend.dispatch.journal_entry import JournalEntry


class HeldRequests:
    """In the order in which they came. What has waited for ``timeout`` seconds goes to ``on_timeout``.

    A request's clock stands still while it is on an engine and goes on when it is held again; only new output of it, or its
    end, sets it back. So no event, however often it comes, keeps a request waiting for longer than ``timeout`` in all.
    """

    def __init__(self, timeout: float, on_timeout: Callable[[JournalEntry], None]) -> None:
        self._timeout = timeout
        self._on_timeout = on_timeout
        self._timers: dict[JournalEntry, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def add(self, entry: JournalEntry) -> None:
        """Hold an entry that is not held."""
        left = max(self._timeout - entry.held_for, 0.0)
        self._timers[entry] = asyncio.get_running_loop().call_later(left, self._give_up, entry)

    def discard(self, entry: JournalEntry) -> bool:
        """Hold it no longer. Returns whether it was held."""
        timer = self._timers.pop(entry, None)
        if timer is None:
            return False
        entry.held_for = self._timeout - max(timer.when() - asyncio.get_running_loop().time(), 0.0)
        timer.cancel()
        return True

    def take_first(self) -> JournalEntry:
        """Let go of the one that has been here longest. Raises StopIteration when there is none."""
        entry = next(iter(self._timers))
        self.discard(entry)
        return entry

    def take_all(self) -> list[JournalEntry]:
        """Let go of all."""
        return self.take(lambda _: True)

    def take(self, which: Callable[[JournalEntry], bool]) -> list[JournalEntry]:
        """Let go of those."""
        entries = [entry for entry in self._timers if which(entry)]
        for entry in entries:
            self.discard(entry)
        return entries

    def _give_up(self, entry: JournalEntry) -> None:
        self.discard(entry)
        self._on_timeout(entry)

"""Requests that no engine has, by what they wait for."""

import asyncio
import math
from collections.abc import Callable, Iterable

from penstock_frontend.dispatch.journal import JournalEntry


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


class Waiting:
    """``for_engine``: no engine takes them now; ``for_trial``: it is another suspect's turn; ``for_verdict``: until it is known
    what became of engines that they lost. Each waits ``timeout`` seconds at most, see ``HeldRequests``, and is then given up or,
    where a verdict is due, presumed to be what its engines died of.

    ``on_readmitted``: an engine that some were kept from may have room again.
    """

    def __init__(
        self,
        timeout: float,
        *,
        give_up: Callable[[JournalEntry], None],
        presume: Callable[[JournalEntry], None],
        on_readmitted: Callable[[], None],
    ) -> None:
        self.for_engine = HeldRequests(timeout, give_up)
        self.for_trial = HeldRequests(timeout, give_up)
        self.for_verdict = HeldRequests(timeout, presume)
        self._on_readmitted = on_readmitted
        self._readmission: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self.for_engine) + len(self.for_trial) + len(self.for_verdict)

    def discard(self, entry: JournalEntry) -> bool:
        """Let go of an entry. Returns whether it waited."""
        return any(held.discard(entry) for held in (self.for_engine, self.for_trial, self.for_verdict))

    def hold(self, entries: Iterable[JournalEntry]) -> None:
        """No engine takes these. Where some are kept from an engine for a time, that is tried again then."""
        ends = []
        for entry in entries:
            self.for_engine.add(entry)
            ends += [end for end in entry.excluded.values() if end < math.inf]
        if ends:
            self._readmit_at(min(ends))

    def _readmit_at(self, when: float) -> None:
        """Try held requests again at this time of the loop."""
        pending = self._readmission
        if pending is not None and not pending.cancelled():
            if pending.when() <= when:
                return
            pending.cancel()
        self._readmission = asyncio.get_running_loop().call_at(when, self._readmit)

    def _readmit(self) -> None:
        self._readmission = None
        self._on_readmitted()

"""Queues of sequences that wait for an engine, with one queue per reason for waiting."""

import asyncio
import math
from collections.abc import Callable, Iterable

from penstock_frontend.dispatch.journal import JournalEntry


class HeldRequests:
    """Queue of held entries (sequences without an engine) in order of arrival.

    An entry that has waited ``timeout`` seconds is passed to ``on_timeout``.

    If an entry is held several times, its waiting times are added up. New output of the sequence resets the sum to 0.
    Between two outputs, a request therefore never waits longer than ``timeout`` seconds in total.
    """

    def __init__(self, timeout: float, on_timeout: Callable[[JournalEntry], None]) -> None:
        self._timeout = timeout
        self._on_timeout = on_timeout
        self._timers: dict[JournalEntry, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def add(self, entry: JournalEntry) -> None:
        """Add an entry to the end of the queue. The entry must not be in the queue already."""
        left = max(self._timeout - entry.held_for, 0.0)
        self._timers[entry] = asyncio.get_running_loop().call_later(left, self._give_up, entry)

    def discard(self, entry: JournalEntry) -> bool:
        """Remove an entry from the queue. Return True if the entry was in the queue."""
        timer = self._timers.pop(entry, None)
        if timer is None:
            return False
        entry.held_for = self._timeout - max(timer.when() - asyncio.get_running_loop().time(), 0.0)
        timer.cancel()
        return True

    def take_first(self) -> JournalEntry:
        """Remove and return the oldest entry. Raises StopIteration if the queue is empty."""
        entry = next(iter(self._timers))
        self.discard(entry)
        return entry

    def take_all(self) -> list[JournalEntry]:
        """Remove and return all entries of the queue."""
        return self.take(lambda _: True)

    def take(self, which: Callable[[JournalEntry], bool]) -> list[JournalEntry]:
        """Remove and return the entries for which ``which`` returns True."""
        entries = [entry for entry in self._timers if which(entry)]
        for entry in entries:
            self.discard(entry)
        return entries

    def _give_up(self, entry: JournalEntry) -> None:
        self.discard(entry)
        self._on_timeout(entry)


class Waiting:
    """All held entries of a ``Dispatch``. Each entry waits at most ``timeout`` seconds; see ``HeldRequests``.

    Attributes:
        for_engine: entries that wait because no engine accepts them now.
        for_trial: suspects that wait for the trial of another suspect.
        for_verdict: entries that wait until the frontend knows whether their lost engines died.

    Args:
        timeout: maximum number of seconds that an entry waits.
        give_up: called with an entry that has waited too long in ``for_engine`` or ``for_trial``.
        presume: called with an entry that has waited too long in ``for_verdict``. The callback counts the lost engines
            of this entry as dead.
        on_readmitted: called when an engine that was excluded for an entry may be used for it again.
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
        """Remove an entry from its queue. Return True if the entry was in a queue."""
        return any(held.discard(entry) for held in (self.for_engine, self.for_trial, self.for_verdict))

    def hold(self, entries: Iterable[JournalEntry]) -> None:
        """Hold entries that no engine accepts now.

        If an engine is excluded for an entry until some time, retry the entries at that time.
        """
        ends = []
        for entry in entries:
            self.for_engine.add(entry)
            ends += [end for end in entry.excluded.values() if end < math.inf]
        if ends:
            self._readmit_at(min(ends))

    def _readmit_at(self, when: float) -> None:
        """Schedule a retry of held entries at the time ``when`` on the event loop's clock."""
        pending = self._readmission
        if pending is not None and not pending.cancelled():
            if pending.when() <= when:
                return
            pending.cancel()
        self._readmission = asyncio.get_running_loop().call_at(when, self._readmit)

    def _readmit(self) -> None:
        self._readmission = None
        self._on_readmitted()

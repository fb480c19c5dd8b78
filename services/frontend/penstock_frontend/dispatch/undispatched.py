"""Sequences that no engine has, by what they wait for."""

import asyncio
import math
from collections.abc import Callable, Iterable

from penstock_frontend.dispatch.journal_entry import JournalEntry
from penstock_frontend.dispatch.wait_queue import HeldRequests


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

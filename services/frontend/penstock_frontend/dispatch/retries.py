"""How often a request may lose its engine, and what becomes of one that engines die of. Does no I/O."""

import enum

from penstock_common.errors import Internal, RequestFailed, Unavailable
from penstock_frontend.config import RetriesConfig
from penstock_frontend.dispatch.journal import JournalEntry

_MAX_CERTAIN = 2
"""Engines that a request may fail where nothing else can have been the cause."""


class Blame(enum.Enum):
    """What an engine that a request leaves says of the request.

    NONE: it is full or drained; SHARED: it failed, maybe because of this request; ALONE: it failed and had nothing but this
    request's call; STEP: it lives, and found that no step with this request succeeds.
    """

    NONE = enum.auto()
    SHARED = enum.auto()
    ALONE = enum.auto()
    STEP = enum.auto()


class Retries:
    """The budget of a request, and the trial of a suspect.

    An engine that is lost may have died of any request that it had brought nothing new for: each of those counts the loss, and
    what it brings later sets its count back. A request one loss below the limit is a suspect. Suspects are sent out one at a
    time, each until it brings something: so the one that engines die of is found while it alone is tried, and those that
    merely were beside it go on. What was alone when its engine died is tried once more, and so is what an engine found to
    fail its steps.

    An engine whose connection broke may live, and the network be at fault. Its loss counts in doubt: it makes suspects, and a
    request whose losses are enough only with those in doubt goes nowhere until it is known what became of the engines. Of one
    that lives the loss is taken back.
    """

    def __init__(self, config: RetriesConfig) -> None:
        self._config = config
        self._on_trial: JournalEntry | None = None

    def verdict(self, entry: JournalEntry, why: str, blame: Blame, *, in_doubt: bool = False) -> RequestFailed | None:
        """An entry is about to leave its engine, lost or not: what it ends with if it may not go on. ``in_doubt``: nobody knows
        whether the engine failed.
        """
        entry.last_loss = why
        if blame is Blame.STEP:
            entry.failed_steps += 1
        elif entry.progressed:
            _clear(entry)
        elif blame is not Blame.NONE:
            entry.losses += 1
            entry.losses_alone += blame is Blame.ALONE
            if in_doubt:
                entry.doubts[entry.engine] = blame is Blame.ALONE
        if (quarantined := self._quarantined(entry)) is not None:
            return quarantined
        if entry.num_moves >= self._config.max_moves:
            return Unavailable(
                f"the request has lost {entry.num_moves + 1} engines; retries.max_moves is {self._config.max_moves}. "
                f"The last: {why}",
                reason="RETRIES_EXHAUSTED",
                retry_after=1.0,
            )
        return None

    def _quarantined(self, entry: JournalEntry) -> Internal | None:
        """What it ends with if the losses that are certain are enough."""
        losses, alone = entry.losses - len(entry.doubts), entry.losses_alone - sum(entry.doubts.values())
        guilt = self._guilt(entry, losses, alone)
        if guilt is None:
            return None
        return Internal(f"{guilt}; it is not tried again. The last: {entry.last_loss}", reason="QUARANTINED")

    def _guilt(self, entry: JournalEntry, losses: int, losses_alone: int) -> str | None:
        if entry.failed_steps >= _MAX_CERTAIN:
            return f"the request failed the step of {entry.failed_steps} engines"
        if losses >= self._config.max_strikes:
            return (
                f"{losses} engines in a row failed before they brought anything for this request, "
                "which is retries.max_strikes"
            )
        if losses_alone >= _MAX_CERTAIN:
            return f"{losses_alone} engines in a row failed while they had nothing but this request"
        return None

    def is_in_doubt(self, entry: JournalEntry) -> bool:
        """Whether an entry has lost enough engines to go nowhere any more, if they have all died."""
        return bool(entry.doubts) and self._guilt(entry, entry.losses, entry.losses_alone) is not None

    def acquit(self, entry: JournalEntry, engine: str) -> None:
        """An engine that an entry lost lives: it was not because of the entry."""
        alone = entry.doubts.pop(engine, None)
        if alone is not None:
            entry.losses -= 1
            entry.losses_alone -= alone

    def accuse(self, entry: JournalEntry, engine: str) -> RequestFailed | None:
        """An engine that an entry lost has died. Returns what the entry ends with, if that is one too many."""
        return None if entry.doubts.pop(engine, None) is None else self._quarantined(entry)

    def presume(self, entry: JournalEntry) -> RequestFailed | None:
        """Of the engines that an entry lost nothing has been heard for too long: they have died. Returns as ``accuse``."""
        entry.doubts.clear()
        return self._quarantined(entry)

    def handed_over(self, entry: JournalEntry) -> None:
        """An entry leaves its engine as it was to: that says something for it where the engine has brought something."""
        if entry.progressed:
            _clear(entry)

    def may_leave(self, entry: JournalEntry) -> bool:
        """Whether an entry would go on if it left an engine that is well."""
        return entry.num_moves < self._config.max_moves

    def is_suspect(self, entry: JournalEntry) -> bool:
        """Whether it goes out alone."""
        return entry.losses >= self._config.max_strikes - 1

    def may_go(self, entry: JournalEntry) -> bool:
        """Whether an entry may be sent now; a suspect that may not waits until ``trial_over``."""
        if not self.is_suspect(entry) or entry is self._on_trial:
            return True
        if self._on_trial is None:
            self._on_trial = entry
            return True
        return False

    def trial_over(self) -> bool:
        """Whether the next suspect may be sent: the one on trial has brought something, ended, or has to wait for a verdict."""
        current = self._on_trial
        if current is not None and (current.ended or current.progressed or self.is_in_doubt(current)):
            self._on_trial = None
        return self._on_trial is None


def _clear(entry: JournalEntry) -> None:
    """An engine has brought something for an entry since the losses that it counts."""
    entry.losses = entry.losses_alone = 0
    entry.doubts.clear()

"""Retry limits of a request, and quarantine of requests that crash engines. Does no I/O."""

import enum

from penstock_common.errors import Internal, RequestFailed, Unavailable
from penstock_frontend.config import RetriesConfig
from penstock_frontend.dispatch.journal import JournalEntry

_MAX_CERTAIN = 2
"""Maximum number of engines a request may fail if nothing else can be the cause."""


class Blame(enum.Enum):
    """Says how far a request may be responsible for the loss of its engine.

    - NONE: not at all; the engine is full or drains.
    - SHARED: possibly; the engine failed while it also had other requests.
    - ALONE: the engine failed and had only requests of this call.
    - STEP: the engine is alive and reports that every step with this request fails.
    """

    NONE = enum.auto()
    SHARED = enum.auto()
    ALONE = enum.auto()
    STEP = enum.auto()


class Retries:
    """Decides whether a request may be retried on another engine. ``Dispatch`` uses it.

    A lost engine may have crashed because of any request for which it had not yet produced output. The loss counts for
    each of these requests. New output resets the count of a request. A request one loss below the limit is a suspect.
    Suspects are sent out one at a time, until each produces output. This finds the request that crashes engines, and
    the other requests survive. A request that was the only one on a crashed engine is retried once more. The same holds
    for a request whose steps failed on an engine.

    An engine whose connection broke may still be alive. The loss is in doubt until the engine's state is known.
    Doubtful losses make a request a suspect. If a request reaches the limit only with doubtful losses, it waits until
    the engines' state is known. If an engine turns out to be alive, its loss is subtracted again.
    """

    def __init__(self, config: RetriesConfig) -> None:
        self._config = config
        self._on_trial: JournalEntry | None = None

    def verdict(self, entry: JournalEntry, why: str, blame: Blame, *, in_doubt: bool = False) -> RequestFailed | None:
        """Record that an entry leaves its engine. Return the error with which the request ends, or None if it may be
        retried.

        Args:
            entry: the sequence that leaves.
            why: the reason, for messages.
            blame: how far the request may be responsible.
            in_doubt: True if it is not known whether the engine failed.
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
                f"the request has lost {entry.num_moves + 1} engines; retries.max_moves is "
                f"{self._config.max_moves}. The last: {why}",
                reason="RETRIES_EXHAUSTED",
                retry_after=1.0,
            )
        return None

    def _quarantined(self, entry: JournalEntry) -> Internal | None:
        """Return the error with which the entry ends if its confirmed losses reach a limit, else None."""
        losses, alone = entry.losses - len(entry.doubts), entry.losses_alone - sum(entry.doubts.values())
        guilt = self._guilt(entry, losses, alone)
        if guilt is None:
            return None
        return Internal(f"{guilt}; it is not retried. The last: {entry.last_loss}", reason="QUARANTINED")

    def _guilt(self, entry: JournalEntry, losses: int, losses_alone: int) -> str | None:
        if entry.failed_steps >= _MAX_CERTAIN:
            return f"the request made steps fail on {entry.failed_steps} engines"
        if losses >= self._config.max_strikes:
            return (
                f"{losses} engines in a row failed before they produced output for this request, which is the "
                "limit retries.max_strikes"
            )
        if losses_alone >= _MAX_CERTAIN:
            return f"{losses_alone} engines in a row failed while this was their only request"
        return None

    def is_in_doubt(self, entry: JournalEntry) -> bool:
        """Return True if an entry reaches a limit only when its doubtful losses count."""
        return bool(entry.doubts) and self._guilt(entry, entry.losses, entry.losses_alone) is not None

    def acquit(self, entry: JournalEntry, engine: str) -> None:
        """Subtract a doubtful loss from an entry, because that engine is alive."""
        alone = entry.doubts.pop(engine, None)
        if alone is not None:
            entry.losses -= 1
            entry.losses_alone -= alone

    def accuse(self, entry: JournalEntry, engine: str) -> RequestFailed | None:
        """Confirm a doubtful loss of an entry, because that engine has died. Return the error that ends the entry, if
        it reached a limit.
        """
        return None if entry.doubts.pop(engine, None) is None else self._quarantined(entry)

    def presume(self, entry: JournalEntry) -> RequestFailed | None:
        """Confirm all doubtful losses of an entry after a timeout. Return as ``accuse`` does."""
        entry.doubts.clear()
        return self._quarantined(entry)

    def handed_over(self, entry: JournalEntry) -> None:
        """Reset the losses of an entry that its engine hands over, if the engine produced output for it."""
        if entry.progressed:
            _clear(entry)

    def may_leave(self, entry: JournalEntry) -> bool:
        """Return True if an entry may leave a healthy engine, which uses up a move."""
        return entry.num_moves < self._config.max_moves

    def is_suspect(self, entry: JournalEntry) -> bool:
        """Return True if an entry must be tried alone."""
        return entry.losses >= self._config.max_strikes - 1

    def may_go(self, entry: JournalEntry) -> bool:
        """Return True if an entry may be sent now. Otherwise it is a suspect that must wait until ``trial_over``."""
        if not self.is_suspect(entry) or entry is self._on_trial:
            return True
        if self._on_trial is None:
            self._on_trial = entry
            return True
        return False

    def trial_over(self) -> bool:
        """Return True if the next suspect may be sent.

        The trial of the current suspect is over if it produced output, ended, or waits for doubtful losses to be
        resolved.
        """
        current = self._on_trial
        if current is not None and (current.ended or current.progressed or self.is_in_doubt(current)):
            self._on_trial = None
        return self._on_trial is None


def _clear(entry: JournalEntry) -> None:
    """Reset the counted losses of an entry, because an engine has produced output for it."""
    entry.losses = entry.losses_alone = 0
    entry.doubts.clear()

"""Retry limits of a request, and quarantine of requests that crash engines. Does no I/O."""

import enum

from penstock_common.errors import Internal, RequestFailed, Unavailable
from penstock_frontend.config import RetriesConfig
from penstock_frontend.dispatch.journal import JournalEntry

_MAX_CERTAIN = 2
"""Maximum number of engine failures of which the request is the only possible cause."""


class Blame(enum.Enum):
    """Degree to which a request may be responsible for the loss of its engine.

    - NONE: the request is not responsible; the engine is full or drains.
    - SHARED: the engine failed while it also had requests of other calls.
    - ALONE: the engine failed and had only requests of this call.
    - STEP: the engine is alive and reports that every step with this request fails.
    """

    NONE = enum.auto()
    SHARED = enum.auto()
    ALONE = enum.auto()
    STEP = enum.auto()


class Retries:
    """Decides whether a request may be retried on another engine. ``Dispatch`` uses this class.

    An engine may have crashed because of any request for which it had not produced output yet. The loss counts for each
    of these requests. New output resets the number of losses of a request. A request with one loss less than the limit
    is a suspect. Only one suspect is sent to an engine at a time. The next suspect is sent when the current suspect has
    produced output. These trials find the request that crashes engines, and the other requests survive. A request that
    was the only request on a crashed engine is retried once more. A request whose steps failed on an engine is also
    retried once more.

    An engine whose connection broke may still be alive. The loss is in doubt until the engine's state is known. A loss
    in doubt makes a request a suspect. If a request reaches the limit only with losses in doubt, it waits until the
    state of the lost engines is known. If an engine is alive, its loss is subtracted again.
    """

    def __init__(self, config: RetriesConfig) -> None:
        self._config = config
        self._on_trial: JournalEntry | None = None

    def verdict(self, entry: JournalEntry, why: str, blame: Blame, *, in_doubt: bool = False) -> RequestFailed | None:
        """Record that an entry leaves its engine.

        Return the error that ends the request, or None if the request may be retried.

        Args:
            entry: the sequence that leaves its engine.
            why: reason why the sequence leaves, for messages.
            blame: how far the request may be responsible for the loss of the engine.
            in_doubt: True if it is not known yet whether the engine died.
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
                f"{self._config.max_moves}. Last loss: {why}",
                reason="RETRIES_EXHAUSTED",
                retry_after=1.0,
            )
        return None

    def _quarantined(self, entry: JournalEntry) -> Internal | None:
        """Return the error that ends the entry if its confirmed losses reach a limit, else None."""
        losses, alone = entry.losses - len(entry.doubts), entry.losses_alone - sum(entry.doubts.values())
        guilt = self._guilt(entry, losses, alone)
        if guilt is None:
            return None
        return Internal(f"{guilt}; the request is not retried. Last loss: {entry.last_loss}", reason="QUARANTINED")

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
        """Return True if an entry reaches a limit with its losses in doubt, but not without them."""
        return bool(entry.doubts) and self._guilt(entry, entry.losses, entry.losses_alone) is not None

    def acquit(self, entry: JournalEntry, engine: str) -> None:
        """Subtract a loss in doubt from an entry, because the engine is alive."""
        alone = entry.doubts.pop(engine, None)
        if alone is not None:
            entry.losses -= 1
            entry.losses_alone -= alone

    def accuse(self, entry: JournalEntry, engine: str) -> RequestFailed | None:
        """Confirm a loss in doubt of an entry, because the engine has died.

        If the entry has now reached a limit, return the error that ends the entry.
        """
        return None if entry.doubts.pop(engine, None) is None else self._quarantined(entry)

    def presume(self, entry: JournalEntry) -> RequestFailed | None:
        """Confirm all losses in doubt of an entry after a timeout. Return the same values as ``accuse``."""
        entry.doubts.clear()
        return self._quarantined(entry)

    def handed_over(self, entry: JournalEntry) -> None:
        """Reset the losses of a handed-over entry, if the engine had produced output for the entry."""
        if entry.progressed:
            _clear(entry)

    def may_leave(self, entry: JournalEntry) -> bool:
        """Return True if an entry may leave a healthy engine.

        Leaving counts as one of the entry's ``max_moves`` moves.
        """
        return entry.num_moves < self._config.max_moves

    def is_suspect(self, entry: JournalEntry) -> bool:
        """Return True if an entry is a suspect, which must be sent while no other suspect is on trial."""
        return entry.losses >= self._config.max_strikes - 1

    def may_go(self, entry: JournalEntry) -> bool:
        """Return True if an entry may be sent now.

        Otherwise the entry is a suspect, and must wait until ``trial_over`` returns True.
        """
        if not self.is_suspect(entry) or entry is self._on_trial:
            return True
        if self._on_trial is None:
            self._on_trial = entry
            return True
        return False

    def trial_over(self) -> bool:
        """Return True if the next suspect may be sent.

        The trial of the current suspect is over if the suspect produced output, ended, or waits until its losses in
        doubt are resolved.
        """
        current = self._on_trial
        if current is not None and (current.ended or current.progressed or self.is_in_doubt(current)):
            self._on_trial = None
        return self._on_trial is None


def _clear(entry: JournalEntry) -> None:
    """Reset the counted losses of an entry, because an engine has produced output for it."""
    entry.losses = entry.losses_alone = 0
    entry.doubts.clear()

"""Retry limits of a request, and quarantine of requests that crash engines. Does no I/O."""

import enum

from penstock_common.errors import Internal, RequestFailed, Unavailable
from penstock_frontend.config import RetriesConfig
from penstock_frontend.dispatch.journal import JournalEntry

_MAX_CERTAIN = 2
"""Number of failed engines at which a request is quarantined, if it was the only possible cause of each failure."""


class Blame(enum.Enum):
    """Degree to which a request may have caused its engine to fail.

    - NONE: the request is not responsible, because the engine is full or drains.
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

    Any request for which a crashed engine had not produced output yet may have caused the crash. The loss of the engine
    therefore counts against each of these requests. When a request produces new output, its number of losses is reset
    to 0. A request whose number of losses is one below the limit ``retries.max_strikes`` is a suspect. Only one suspect
    runs at a time. The next suspect is sent when the current suspect has produced output or ended. In this way, the
    request that crashes engines is found, and the other requests survive. A request that was the only request on a
    crashed engine is retried once more. A request whose steps failed on an engine is also retried once more.

    An engine whose connection broke may still be alive. Until the frontend knows whether the engine died, its loss is
    in doubt. A loss in doubt also counts when the frontend decides whether a request is a suspect. If a request reaches
    the limit only because of losses in doubt, it waits until the frontend knows whether these engines died. If an
    engine is alive, its loss is subtracted again.
    """

    def __init__(self, config: RetriesConfig) -> None:
        self._config = config
        self._on_trial: JournalEntry | None = None

    def verdict(self, entry: JournalEntry, why: str, blame: Blame, *, in_doubt: bool = False) -> RequestFailed | None:
        """Record that a sequence leaves its engine.

        Return the error that ends the request, or None if the request may be retried.

        Args:
            entry: the sequence that leaves its engine.
            why: reason why the sequence leaves its engine, for messages.
            blame: degree to which the request may have caused the loss of the engine.
            in_doubt: True if the frontend does not know yet whether the engine died.
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
                f"the request could not finish on {entry.num_moves + 1} engines; the limit of moves to other engines, "
                f"retries.max_moves, is {self._config.max_moves}. Last loss: {why}",
                reason="RETRIES_EXHAUSTED",
                retry_after=1.0,
            )
        return None

    def _quarantined(self, entry: JournalEntry) -> Internal | None:
        """Return the error that ends the sequence if its losses without the losses in doubt reach a limit. Otherwise
        return None.
        """
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
            return f"{losses_alone} engines in a row failed while this request was the only request on the engine"
        return None

    def is_in_doubt(self, entry: JournalEntry) -> bool:
        """Return True if a sequence reaches a loss limit only because its losses in doubt are counted too."""
        return bool(entry.doubts) and self._guilt(entry, entry.losses, entry.losses_alone) is not None

    def acquit(self, entry: JournalEntry, engine: str) -> None:
        """Subtract the loss of ``engine`` from the losses of a sequence, because the engine is alive."""
        alone = entry.doubts.pop(engine, None)
        if alone is not None:
            entry.losses -= 1
            entry.losses_alone -= alone

    def accuse(self, entry: JournalEntry, engine: str) -> RequestFailed | None:
        """Confirm that a lost engine of a sequence has died, so that the loss is no longer in doubt.

        If the sequence has now reached a loss limit, return the error that ends the sequence.
        """
        return None if entry.doubts.pop(engine, None) is None else self._quarantined(entry)

    def presume(self, entry: JournalEntry) -> RequestFailed | None:
        """Confirm all losses in doubt of a sequence, because it has waited too long. Return the same values as
        ``accuse``.
        """
        entry.doubts.clear()
        return self._quarantined(entry)

    def handed_over(self, entry: JournalEntry) -> None:
        """Reset the losses of a handed-over sequence, if the engine that handed it over had produced output for it."""
        if entry.progressed:
            _clear(entry)

    def may_leave(self, entry: JournalEntry) -> bool:
        """Return True if a sequence may leave a healthy engine.

        Leaving an engine counts as one of the ``retries.max_moves`` moves that a sequence may make.
        """
        return entry.num_moves < self._config.max_moves

    def is_suspect(self, entry: JournalEntry) -> bool:
        """Return True if a sequence is a suspect. A suspect must be sent only while no other suspect is on trial."""
        return entry.losses >= self._config.max_strikes - 1

    def may_go(self, entry: JournalEntry) -> bool:
        """Return True if a sequence may be sent to an engine now.

        If the result is False, the sequence is a suspect. The suspect must wait until ``trial_over`` returns True.
        """
        if not self.is_suspect(entry) or entry is self._on_trial:
            return True
        if self._on_trial is None:
            self._on_trial = entry
            return True
        return False

    def trial_over(self) -> bool:
        """Return True if the next suspect may be sent to an engine.

        The trial of the current suspect is over if the suspect has produced output, has ended, or waits to know whether
        its lost engines died.
        """
        current = self._on_trial
        if current is not None and (current.ended or current.progressed or self.is_in_doubt(current)):
            self._on_trial = None
        return self._on_trial is None


def _clear(entry: JournalEntry) -> None:
    """Reset the counted losses of a sequence, because an engine has produced output for the sequence."""
    entry.losses = entry.losses_alone = 0
    entry.doubts.clear()

"""How many drafts are worth their time."""

from collections.abc import Sequence

from penstock_enginecore.speculation.core.history import TRIAL, DraftHistory, Prior
from penstock_enginecore.speculation.core.step_cost import StepCost

_RATE = 0.1
_FALLING_RATE = 0.5
"""Faster than it grows: a drafter that had prompts to read, or others beside it, took longer than drafts take."""
_FADING_RATE = 0.005
"""What is not measured any more because it seemed too dear becomes cheaper by this, until it is tried again."""
_MARGIN = 1.01
"""What drafts must bring at least: estimates are not exact."""


class DraftPolicy:
    """Slots of all requests compete: the draft at a place brings a token with the probability that it and all before it hold.
    They are taken, the likeliest first, as far as the step's expected tokens per second grow, so that an engine with many
    requests, where a row costs as much as a token brings, drafts less, down to none. ``adaptive`` False: always as many as
    there may be.
    """

    def __init__(self, max_drafts: int, adaptive: bool, cost: StepCost) -> None:
        self.cost = cost
        self._adaptive = adaptive
        self._max_drafts = max_drafts
        self._priors: dict[str, Prior] = {}
        self._seconds_per_draft = 0.0

    def begin(self, kind: str = "") -> DraftHistory:
        """That of a new request. ``kind``: of drafts that hold alike."""
        prior = self._priors.get(kind)
        if prior is None:
            # What a grammar forces is tokenized otherwise at worst.
            prior = self._priors[kind] = Prior(self._max_drafts, 0.9 if kind == "forced" else 0.6)
        return DraftHistory(prior)

    def choose(
        self, histories: Sequence[DraftHistory], limits: Sequence[int], num_rows: int, *, drafting: bool
    ) -> list[int]:
        """How many of ``limits`` tokens each request should have drafted (``drafting``), or verified, in a step that has
        ``num_rows`` rows besides. Not drafted, but there: their drafting costs nothing more.
        """
        if not self._adaptive:
            return list(limits)
        chosen = [0] * len(histories)
        slots: list[tuple[float, int, int]] = []
        for index, (history, limit) in enumerate(zip(histories, limits, strict=True)):
            if history.rest_left:
                continue
            survival = 1.0
            for place in range(min(limit, len(history.held))):
                survival *= history.held[place]
                slots.append((-survival, place, index))
        if not slots:
            return chosen
        per_draft = self._seconds_per_draft if drafting else 0.0
        slots.sort()
        best, tokens, longest = 0, float(num_rows), 0
        most = _MARGIN * tokens / self.cost.seconds(num_rows)
        known = max(self.cost.most_rows - num_rows, 0)
        for count, (negative, place, _) in enumerate(slots[:known], start=1):
            tokens -= negative
            longest = max(longest, place + 1)
            rate = tokens / (self.cost.seconds(num_rows + count) + per_draft * longest)
            if rate > most:
                best, most = count, rate
        for _, place, index in slots[:best]:
            chosen[index] = max(chosen[index], place + 1)
        if best < len(slots):
            self._rest(histories, limits, chosen, num_rows, per_draft, drafting=drafting)
        return chosen

    def drafting_took(self, num_requests: int, num_tokens: int, seconds: float) -> None:  # noqa: ARG002 - rows cost next to nothing
        """Drafts of ``num_tokens`` tokens for each of some requests took so long."""
        each = seconds / max(num_tokens, 1)
        known = self._seconds_per_draft
        rate = _RATE if each > known else _FALLING_RATE
        self._seconds_per_draft = each if not known else known + rate * (min(each, 4 * known) - known)

    def _rest(
        self,
        histories: Sequence[DraftHistory],
        limits: Sequence[int],
        chosen: list[int],
        num_rows: int,
        per_draft: float,
        *,
        drafting: bool,
    ) -> None:
        """Those that get nothing rest, if certain drafts would pay; those whose rest is over try."""
        certain = (num_rows + 1) / (self.cost.seconds(num_rows + 1) + per_draft)
        pays = certain > _MARGIN * num_rows / self.cost.seconds(num_rows)
        if drafting and not pays:
            self._seconds_per_draft *= 1 - _FADING_RATE
        for index, (history, limit) in enumerate(zip(histories, limits, strict=True)):
            if chosen[index] or not limit or history.rest_left:
                continue
            if history.tries:
                chosen[index] = min(limit, TRIAL) if pays else 0
            elif drafting:
                history.rest()

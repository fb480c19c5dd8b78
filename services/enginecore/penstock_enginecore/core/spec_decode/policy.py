"""How many drafts are worth their time."""

from collections.abc import Sequence

from penstock_enginecore.core.spec_decode.history import TRIAL, DraftHistory, Prior
from penstock_enginecore.core.spec_decode.step_cost import StepCost

_RATE = 0.1
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
        self._waits = [0.0, 0.0]
        """Seconds in which nothing is computed before a step, behind one without drafts, and one with, which no step overlaps."""

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
        idle, waits = self._waits if drafting else (0.0, 0.0)
        slots.sort()
        best, tokens, longest = 0, float(num_rows), 0
        most = _MARGIN * tokens / (self.cost.seconds(num_rows) + idle)
        for count, (negative, place, _) in enumerate(slots, start=1):
            tokens -= negative
            longest = max(longest, place + 1)
            rate = tokens / (self.cost.seconds(num_rows + count) + per_draft * longest + waits)
            if rate > most:
                best, most = count, rate
        for _, place, index in slots[:best]:
            chosen[index] = max(chosen[index], place + 1)
        if best < len(slots):
            certain = (num_rows + 1) / (self.cost.seconds(num_rows + 1) + per_draft + waits)
            pays = certain > _MARGIN * num_rows / (self.cost.seconds(num_rows) + idle)
            self._rest(histories, limits, chosen, pays=pays, drafting=drafting)
        return chosen

    def drafting_took(self, num_requests: int, num_tokens: int, seconds: float) -> None:  # noqa: ARG002 - rows cost next to nothing
        """Drafts of ``num_tokens`` tokens for each of some requests took so long."""
        each = seconds / max(num_tokens, 1)
        known = self._seconds_per_draft
        self._seconds_per_draft = each if not known else known + _RATE * (min(each, 4 * known) - known)

    def waited(self, seconds: float, *, drafted: bool) -> None:
        """A step was begun so long after the one before it was over, without the time in which drafts were made; ``drafted``:
        whether any were.
        """
        self._waits[drafted] += _RATE * (min(seconds, self.cost.seconds(1)) - self._waits[drafted])

    def _rest(
        self,
        histories: Sequence[DraftHistory],
        limits: Sequence[int],
        chosen: list[int],
        *,
        pays: bool,
        drafting: bool,
    ) -> None:
        """Those that get nothing rest, if a certain draft would pay (``pays``); those whose rest is over try."""
        for index, (history, limit) in enumerate(zip(histories, limits, strict=True)):
            if chosen[index] or not limit or history.rest_left:
                continue
            if history.tries:
                chosen[index] = min(limit, TRIAL) if pays else 0
            elif drafting:
                history.rest()

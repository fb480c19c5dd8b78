"""Number of drafts that pay off, from the acceptance of a request's drafts and the cost of a step by its number of
tokens.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

_SCALE_RATE = 0.05
_PLAUSIBLE = 4.0
_UNKNOWN = {1: 1.0, 64: 2.0}
"""Costs if the engine was not timed: the unit is arbitrary, and additional rows are cheap."""


class StepCost:
    """Estimates the seconds of a step by its number of rows.

    Between and beyond the points that were timed at startup, the estimate is linear. A scale factor, which steps keep
    up to date, accounts for what was not timed: long contexts, sampling, and other load on the machine.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        """Args:
        points: Seconds by number of rows. More rows never count as cheaper.
        """
        known = sorted((points if len(points) > 1 else _UNKNOWN).items())
        self._rows = [rows for rows, _ in known]
        self._seconds: list[float] = []
        for _, seconds in known:
            self._seconds.append(max(seconds, self._seconds[-1] if self._seconds else 1e-9))
        self._scale = 1.0
        self._begun = False

    @property
    def most_rows(self) -> int:
        """Largest number of rows with a usable estimate: twice the largest that was timed."""
        return 2 * self._rows[-1]

    def seconds(self, rows: int) -> float:
        """Return the estimated seconds of a step with ``rows`` rows, at least one."""
        return self._scale * self._timed(rows)

    def took(self, rows: int, seconds: float) -> None:
        """Update the scale with a measured step. Steps with far more rows than were timed, and implausibly slow steps,
        are ignored.
        """
        if rows > self.most_rows:
            return
        ratio = seconds / self._timed(rows)
        if not self._begun:
            self._begun, self._scale = True, ratio
        elif ratio < _PLAUSIBLE * self._scale:
            self._scale += _SCALE_RATE * (ratio - self._scale)

    def _timed(self, rows: int) -> float:
        known, seconds = self._rows, self._seconds
        place = min(max(bisect_left(known, rows), 1), len(known) - 1)
        first, last = known[place - 1], known[place]
        slope = (seconds[place] - seconds[place - 1]) / (last - first)
        return max(seconds[place - 1] + slope * (rows - first), seconds[0])


# Timing of steps at startup.

_CAREFUL_SECONDS, _MAX_SECONDS = 0.2, 0.4
"""Time limits in seconds. Until the first, each number of tokens is timed in three passes, then in two. After the
second, timing stops. The first pass of each size grows buffers and is slow: with 32 rows it takes twice as long as the
next.
"""


def time_steps(
    fastest: Callable[[int, int], float],
    num_tokens: Sequence[int],
    max_len: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Return the seconds of forward passes by number of tokens, for as many sizes as fit into half a second.

    The engine decides how many passes to run, by its own clock. Workers that share a model's layers wait for each other
    in each pass, so all must run the same passes. If each worker decided by its own clock, one could wait forever.

    Args:
        fastest: Runs passes. Takes the number of tokens and the number of passes, and returns the seconds of the fastest.
        num_tokens: Numbers of tokens, in ascending order.
        max_len: Tokens of the longest sequence that the model allows.
        clock: Returns seconds.
    """
    began = clock()
    found: dict[int, float] = {}
    for count in num_tokens:
        passed = clock() - began
        if count > max_len or passed > _MAX_SECONDS:
            break
        found[count] = fastest(count, 3 if passed < _CAREFUL_SECONDS else 2)
    return found


# Acceptance of one request's drafts.

_FIRST_REST, _LONGEST_REST = 32, 512
_SLOWEST, _QUICKEST = 0.12, 0.5
_SHARED_RATE = 0.02
TRIAL = 2
"""Number of drafts in a trial after a rest."""


class Prior:
    """Acceptance at each place over all requests, with which a new request starts."""

    def __init__(self, num_places: int, held: float = 0.6) -> None:
        self.held = [held] * num_places


class DraftHistory:
    """Tracks, for each place in a draft, the probability that its token is accepted if all tokens before it are
    accepted.

    If drafts do not pay off, the request rests for 32 tokens, then tries again. Each rest is twice as long as the
    previous rest, up to 512 tokens.
    """

    __slots__ = ("_counts", "_prior", "held", "next_rest", "rest_left", "tries")

    def __init__(self, prior: Prior) -> None:
        self._prior = prior
        self.held = prior.held.copy()
        self._counts = [0] * len(self.held)
        self.rest_left = 0
        self.next_rest = _FIRST_REST
        self.tries = False
        """Whether a rest is over, and the next drafts decide whether the request rests again."""

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """Record that the first ``num_accepted`` of ``num_drafted`` drafts were accepted."""
        held, shared, counts = self.held, self._prior.held, self._counts
        for place in range(min(num_drafted, num_accepted + 1, len(held))):
            found = 1.0 if place < num_accepted else 0.0
            counts[place] += 1
            rate = _QUICKEST if self.tries else max(_SLOWEST, 1 / (counts[place] + 2))
            held[place] += rate * (found - held[place])
            shared[place] += _SHARED_RATE * (found - shared[place])
        if self.tries and num_drafted:
            self.tries = False
        if num_accepted:
            self.next_rest = _FIRST_REST

    def passed(self, num_tokens: int) -> None:
        """Record that ``num_tokens`` tokens were generated without drafts."""
        if self.rest_left:
            self.rest_left -= num_tokens
            if self.rest_left <= 0:
                self.rest_left = 0
                self.tries = True

    def rest(self) -> None:
        """Start a rest, because drafts do not pay off."""
        self.rest_left, self.next_rest = self.next_rest, min(2 * self.next_rest, _LONGEST_REST)
        self.tries = False


_RATE = 0.1
_FALLING_RATE = 0.5
"""Estimates fall faster than they grow. A slow drafter may have read prompts or shared the machine, which says little
about drafts.
"""
_FADING_RATE = 0.005
"""Decay of an estimate that is too high to be measured again, until drafting is tried again."""
_MARGIN = 1.01
"""Minimum gain of drafts, because estimates are not exact."""


class DraftPolicy:
    """Chooses how many tokens to draft or verify for each request.

    The draft slots of all requests compete. A slot's gain is the probability that its draft and all drafts before it
    are accepted. Slots are taken in order of probability while the step's expected tokens per second grow. So an engine
    with many requests, where a row costs as much as a token gains, drafts less or not at all. If ``adaptive`` is False,
    the limits are always used.
    """

    def __init__(self, max_drafts: int, adaptive: bool, cost: StepCost) -> None:
        self.cost = cost
        self._adaptive = adaptive
        self._max_drafts = max_drafts
        self._priors: dict[str, Prior] = {}
        self._seconds_per_draft = 0.0

    def begin(self, kind: str = "") -> DraftHistory:
        """Return the history of a new request. ``kind`` groups drafts with a similar acceptance."""
        prior = self._priors.get(kind)
        if prior is None:
            # Forced text is almost always accepted; at worst it is tokenized differently.
            prior = self._priors[kind] = Prior(self._max_drafts, 0.9 if kind == "forced" else 0.6)
        return DraftHistory(prior)

    def choose(
        self, histories: Sequence[DraftHistory], limits: Sequence[int], num_rows: int, *, drafting: bool
    ) -> list[int]:
        """Choose how many of ``limits`` tokens each request should draft or verify.

        Args:
            histories: History of each request.
            limits: Maximum number of tokens for each request.
            num_rows: Number of other rows in the step.
            drafting: True to draft. False to verify drafts that exist, whose drafting costs nothing more.
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
        """Record that drafting ``num_tokens`` tokens for each of some requests took ``seconds``."""
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
        """Start rests of requests that get no drafts, if certain drafts would pay off. Start trials of requests whose
        rest is over.
        """
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

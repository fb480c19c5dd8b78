"""Choice of the number of drafts with the best throughput. The choice depends on the acceptance of each request's
drafts, and on how the time of a step grows with its number of tokens.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

_SCALE_RATE = 0.05
_PLAUSIBLE = 4.0
_UNKNOWN = {1: 1.0, 64: 2.0}
"""Assumed time of a step by its number of rows (tokens), if steps were not timed. The unit is arbitrary. The values
assume that additional rows need little time.
"""


class StepCost:
    """Estimates the time of a step in seconds from its number of rows (tokens). Between and beyond the numbers that
    were timed at start-up, the estimate is linear. A scale factor covers effects that were not timed: long contexts,
    sampling, and other load on the machine. Each step updates the scale factor.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        """Args:
        points: Measured seconds by number of rows. If a larger number of rows took less time than a smaller number, the
            longer time is used for both.
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
        """Largest number of rows with a usable estimate, which is twice the largest number of rows that was timed."""
        return 2 * self._rows[-1]

    def seconds(self, rows: int) -> float:
        """Return the estimated seconds of a step with ``rows`` rows, at least one."""
        return self._scale * self._timed(rows)

    def took(self, rows: int, seconds: float) -> None:
        """Update the scale factor with the time of a measured step. Steps with far more rows than were timed at
        start-up, and implausibly slow steps, are ignored.
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


# Timing of steps at start-up.

_CAREFUL_SECONDS, _MAX_SECONDS = 0.2, 0.4
"""Two time limits in seconds. Before the first limit, each number of tokens is timed in three passes; after the first
limit, in two passes. After the second limit, timing stops. The first pass with each number of tokens is slow, because
it enlarges buffers: with 32 tokens, the first pass takes twice as long as the second.
"""


def time_steps(
    fastest: Callable[[int, int], float],
    num_tokens: Sequence[int],
    max_len: int,
) -> dict[int, float]:
    """Return the time of forward passes in seconds, by number of tokens, for as many of these numbers as can be timed
    within half a second.

    The half second does not include untimed passes, in which a GPU compiles kernels and captures graphs. Otherwise an
    engine without compiled kernels would time a single number.

    The engine decides how many passes to run. Workers with shards of the same model wait for each other in each pass,
    so all workers must run the same number of passes. If each worker decided, a worker could wait forever.

    Args:
        fastest: Function that gets the number of tokens and the number of passes. The function runs the passes and
            returns the time of the fastest pass in seconds.
        num_tokens: Numbers of tokens to time, in ascending order.
        max_len: Maximum sequence length in tokens.
    """
    spent = 0.0
    found: dict[int, float] = {}
    for count in num_tokens:
        if count > max_len or spent > _MAX_SECONDS:
            break
        passes = 3 if spent < _CAREFUL_SECONDS else 2
        found[count] = fastest(count, passes)
        spent += passes * found[count]
    return found


# Acceptance of one request's drafts.

_FIRST_REST, _LONGEST_REST = 32, 512
_SLOWEST, _QUICKEST = 0.12, 0.5
_SHARED_RATE = 0.02
TRIAL = 2
"""Number of drafts in a trial, which comes after a rest in which a request got no drafts."""


class Prior:
    """Acceptance probability at each draft position, measured over all requests. A new request starts with these
    values.
    """

    def __init__(self, num_places: int, held: float = 0.6) -> None:
        self.held = [held] * num_places


class DraftHistory:
    """Tracks the acceptance of one request's drafts. For each draft position, the history has the probability that the
    draft is accepted if all earlier drafts are accepted.

    If drafts make a request slower, the request rests, which means that it gets no drafts for 32 tokens. Then drafts
    are tried again. Each rest is twice as long as the previous rest, up to 512 tokens.
    """

    __slots__ = ("_counts", "_prior", "held", "next_rest", "rest_left", "tries")

    def __init__(self, prior: Prior) -> None:
        self._prior = prior
        self.held = prior.held.copy()
        self._counts = [0] * len(self.held)
        self.rest_left = 0
        self.next_rest = _FIRST_REST
        self.tries = False
        """Whether a rest has ended, and the next drafts decide whether the request rests again."""

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
        """Record that ``num_tokens`` tokens of the request were generated without drafts."""
        if self.rest_left:
            self.rest_left -= num_tokens
            if self.rest_left <= 0:
                self.rest_left = 0
                self.tries = True

    def rest(self) -> None:
        """Start a rest, because drafts make the request slower."""
        self.rest_left, self.next_rest = self.next_rest, min(2 * self.next_rest, _LONGEST_REST)
        self.tries = False


_RATE = 0.1
_FALLING_RATE = 0.5
"""Weight of a measurement that lowers an estimate. Estimates fall faster than they grow, because a slow measurement may
have other causes, such as prompts or other load on the machine.
"""
_FADING_RATE = 0.005
"""Decay of an estimate of the drafting time that is so high that nothing is drafted. When the estimate has become low
enough, drafting is tried and measured again.
"""
_MARGIN = 1.01
"""Minimum factor by which drafts must increase the expected throughput. The factor is above 1, because estimates are
not exact.
"""


class DraftPolicy:
    """Chooses how many tokens to draft or verify for each request.

    The draft positions of all requests compete. The gain of a draft position is the probability that its draft and all
    drafts before it are accepted. The policy adds draft positions in order of probability, as long as the expected
    tokens per second of the step grow. With many requests, an additional row can cost as much time as its expected
    token saves. The engine then drafts less or not at all. If ``adaptive`` is False, each request always gets its
    maximum number of drafts.
    """

    def __init__(self, max_drafts: int, adaptive: bool, cost: StepCost) -> None:
        self.cost = cost
        self._adaptive = adaptive
        self._max_drafts = max_drafts
        self._priors: dict[str, Prior] = {}
        self._seconds_per_draft = 0.0

    def begin(self, kind: str = "") -> DraftHistory:
        """Return the history of a new request. Requests of the same ``kind`` have drafts with a similar acceptance."""
        prior = self._priors.get(kind)
        if prior is None:
            # The model almost always accepts text that a grammar forces. A rejection means that the model tokenizes the
            # text differently.
            prior = self._priors[kind] = Prior(self._max_drafts, 0.9 if kind == "forced" else 0.6)
        return DraftHistory(prior)

    def choose(
        self, histories: Sequence[DraftHistory], limits: Sequence[int], num_rows: int, *, drafting: bool
    ) -> list[int]:
        """Choose how many tokens each request should draft or verify, up to its limit.

        Args:
            histories: History of each request.
            limits: Maximum number of tokens for each request.
            num_rows: Number of rows in the step that are not drafts.
            drafting: True if the tokens must still be drafted. False if the drafts exist, so that only verifying them
                costs time.
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
        """Start the rest of each request that gets no drafts although drafts would be chosen if their acceptance were
        certain. Start trials of requests whose rest has ended.
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

"""How many drafts are worth their time: how those of a request have held, and what a step takes by the number of its tokens."""

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

_SCALE_RATE = 0.05
_PLAUSIBLE = 4.0
_UNKNOWN = {1: 1.0, 64: 2.0}
"""Of an engine that was not timed: seconds mean nothing then, and rows cost little."""


class StepCost:
    """Seconds by rows, as they were timed at the start: between two points and beyond the last along a line. A scale, which steps
    keep current, stands for what was not timed: long contexts, sampling, others that compute on the machine.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        """``points``: seconds by rows. More rows never take less time."""
        known = sorted((points if len(points) > 1 else _UNKNOWN).items())
        self._rows = [rows for rows, _ in known]
        self._seconds: list[float] = []
        for _, seconds in known:
            self._seconds.append(max(seconds, self._seconds[-1] if self._seconds else 1e-9))
        self._scale = 1.0
        self._begun = False

    @property
    def most_rows(self) -> int:
        """Of a step of which something is known: twice those that were timed."""
        return 2 * self._rows[-1]

    def seconds(self, rows: int) -> float:
        """Of a step with so many rows, one at least."""
        return self._scale * self._timed(rows)

    def took(self, rows: int, seconds: float) -> None:
        """A step with so many rows took so long. One with far more rows than were timed, or a time out of all proportion, says
        nothing of the others.
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


# The measured seconds of steps.

_CAREFUL_SECONDS, _MAX_SECONDS = 0.2, 0.4
"""So long each number of tokens is timed in three passes, then in two; after so long no more numbers are. The first pass grows
buffers, and says little: of 32 rows twice what the next one does.
"""


def time_steps(
    fastest: Callable[[int, int], float],
    num_tokens: Sequence[int],
    max_len: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Return the seconds of forward passes, by the number of their tokens, of as many numbers as half a second is enough for.

    The engine decides how many passes there are, by its one clock. Workers that share the layers of a model wait for each other
    in each pass, so that all of them must make the same passes: one that decided by its own clock could wait for ever.

    Args:
        fastest: Makes passes of so many tokens, so many times, and returns the seconds of the fastest.
        num_tokens: Numbers of tokens, in ascending order.
        max_len: Tokens of the longest sequence that the model allows.
        clock: Seconds.
    """
    began = clock()
    found: dict[int, float] = {}
    for count in num_tokens:
        passed = clock() - began
        if count > max_len or passed > _MAX_SECONDS:
            break
        found[count] = fastest(count, 3 if passed < _CAREFUL_SECONDS else 2)
    return found


# How the drafts of one request have held.

_FIRST_REST, _LONGEST_REST = 32, 512
_SLOWEST, _QUICKEST = 0.12, 0.5
_SHARED_RATE = 0.02
TRIAL = 2
"""Drafts of a try."""


class Prior:
    """How drafts held at each place, over all requests: what a new request begins with."""

    def __init__(self, num_places: int, held: float = 0.6) -> None:
        self.held = [held] * num_places


class DraftHistory:
    """The probability that a draft holds, by its place, where those before it held. A request whose drafts do not pay rests
    for 32 tokens, tries again, and rests twice as long each time, up to 512 tokens.
    """

    __slots__ = ("_counts", "_prior", "held", "next_rest", "rest_left", "tries")

    def __init__(self, prior: Prior) -> None:
        self._prior = prior
        self.held = prior.held.copy()
        self._counts = [0] * len(self.held)
        self.rest_left = 0
        self.next_rest = _FIRST_REST
        self.tries = False
        """Whether a rest is over, and its next drafts are to show whether it need not rest again."""

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """Of ``num_drafted`` drafts the first ``num_accepted`` held."""
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
        """So many tokens came without drafts."""
        if self.rest_left:
            self.rest_left -= num_tokens
            if self.rest_left <= 0:
                self.rest_left = 0
                self.tries = True

    def rest(self) -> None:
        """Its drafts do not pay."""
        self.rest_left, self.next_rest = self.next_rest, min(2 * self.next_rest, _LONGEST_REST)
        self.tries = False


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

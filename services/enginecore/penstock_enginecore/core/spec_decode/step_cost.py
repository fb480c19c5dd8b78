"""How long a step takes by the number of its tokens."""

from bisect import bisect_left
from collections.abc import Mapping

_PLAUSIBLE = 4.0
_SPREADS = (0.05, 1.0)
"""How far scale and overhead may be from what was timed: variances, the overhead's in steps of one row."""
_NOISE = 0.02
"""Variance of a step's time, in its own length."""
_LEAST = 0.05
"""Scale."""
_KEPT = 0.999
"""What is left of all that was seen after each step."""
_UNKNOWN = {1: 1.0, 64: 2.0}
"""Of an engine that was not timed: seconds mean nothing then, and rows cost little."""


class StepCost:
    """Seconds by rows, as they were timed at the start: between two points and beyond the last along a line. What steps take
    keeps two numbers current, by a Kalman filter: an overhead that a step has however many rows there are (scheduling, sampling,
    frontends that need the processors between steps), to which what is not explained goes first, and a scale, which is told
    from it once steps have other numbers of rows (long contexts, others that compute on the machine).
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        """``points``: seconds by rows. More rows never take less time."""
        self._known = len(points) > 1
        known = sorted((points if self._known else _UNKNOWN).items())
        self._rows = [rows for rows, _ in known]
        self._seconds: list[float] = []
        for _, seconds in known:
            self._seconds.append(max(seconds, self._seconds[-1] if self._seconds else 1e-9))
        self._scale, self._overhead = 1.0, 0.0  # the overhead in steps of one row
        self._variances = (_SPREADS[0], 0.0, _SPREADS[1])
        self._begun = False

    def seconds(self, rows: int) -> float:
        """Of a step with so many rows, one at least."""
        return self._scale * self._timed(rows) + self._overhead * self._seconds[0]

    def took(self, rows: int, seconds: float) -> None:
        """A step with so many rows took so long. One with far more rows than were timed, or a time out of all proportion, says
        nothing of the others.
        """
        if rows > 2 * self._rows[-1]:
            return
        if not self._known:
            self._known, ratio = True, seconds / self._timed(rows)
            self._seconds = [each * ratio for each in self._seconds]
        expected = self.seconds(rows)
        if self._begun and seconds > _PLAUSIBLE * expected:
            return
        self._begun = True
        unit = self._seconds[0]
        timed, missed = self._timed(rows) / unit, (seconds - expected) / unit
        first, both, second = (_KEPT * _KEPT * each for each in self._variances)
        first += (1 - _KEPT * _KEPT) * _SPREADS[0]
        second += (1 - _KEPT * _KEPT) * _SPREADS[1]
        to_scale, to_overhead = first * timed + both, both * timed + second
        total = to_scale * timed + to_overhead + _NOISE * (expected / unit) ** 2
        self._scale += to_scale / total * missed
        self._overhead += to_overhead / total * missed
        self._variances = (
            first - to_scale * to_scale / total,
            both - to_scale * to_overhead / total,
            second - to_overhead * to_overhead / total,
        )
        if self._overhead < 0:  # steps are faster than they were
            self._scale, self._overhead = self._scale + self._overhead / timed, 0.0
        self._scale = max(self._scale, _LEAST)

    def _timed(self, rows: int) -> float:
        known, seconds = self._rows, self._seconds
        place = min(max(bisect_left(known, rows), 1), len(known) - 1)
        first, last = known[place - 1], known[place]
        slope = (seconds[place] - seconds[place - 1]) / (last - first)
        return max(seconds[place - 1] + slope * (rows - first), seconds[0])

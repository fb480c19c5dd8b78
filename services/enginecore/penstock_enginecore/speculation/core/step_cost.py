"""How long a step takes by the number of its tokens."""

from bisect import bisect_left
from collections.abc import Mapping

_RATE = 0.05
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
            self._scale += _RATE * (ratio - self._scale)

    def _timed(self, rows: int) -> float:
        known, seconds = self._rows, self._seconds
        place = min(max(bisect_left(known, rows), 1), len(known) - 1)
        first, last = known[place - 1], known[place]
        slope = (seconds[place] - seconds[place - 1]) / (last - first)
        return max(seconds[place - 1] + slope * (rows - first), seconds[0])

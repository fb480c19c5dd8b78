"""How often engines report and frontends are sent views."""

import math

import msgspec

_STEP = 1.25
"""Between two intervals of reports that engines are told: a pool that grows by one engine tells nobody anything new."""
_CHANGES_PER_VIEW = 10
_SHORTEST = 0.01
"""Seconds; no engine reports more often."""
_MOST_BETWEEN_CHANGES = 0.1


class Pace(msgspec.Struct, frozen=True):
    """Intervals in seconds, which grow with the number of engines: so many reports a second are taken, and no view is sent more
    often than the engines in it report.
    """

    view_interval: float
    """Between two views in which nothing but loads has changed, of few engines."""
    max_reports_per_second: float
    """Of all engines of a pool."""

    def of_reports(self, num_engines: int) -> float:
        """Between two reports of an engine of a pool of so many; 0: as the engine likes."""
        interval = num_engines / self.max_reports_per_second
        if interval < _SHORTEST:
            return 0.0
        steps = math.ceil(round(math.log(interval / _SHORTEST, _STEP), 6))
        return _SHORTEST * _STEP**steps

    def of_views(self, num_engines: int) -> float:
        """Between two views of so many engines in which nothing but loads has changed."""
        return max(self.view_interval, num_engines / self.max_reports_per_second)

    def of_changes(self, num_engines: int) -> float:
        """Between two views of so many engines whose members change: many that join at once are told of together."""
        return min(num_engines / self.max_reports_per_second / _CHANGES_PER_VIEW, _MOST_BETWEEN_CHANGES)

"""Which pools are in use, or were a short time ago."""

import math
from collections.abc import Mapping

from penstock_coordinator.scaling.pools import PoolLoad


class Activity:
    """Remembers when each pool last had something to do. Times are seconds of one monotonic clock that the caller passes in.

    It forgets with the coordinator: of engines that are there at its first look nobody knows how long they have been idle, so
    that they count as in use until then. A pool without engines and requests does not: it would be woken for nothing.
    """

    def __init__(self) -> None:
        self._busy: dict[str, bool] = {}
        self._busy_at: dict[str, float] = {}

    def take(self, pools: Mapping[str, PoolLoad], now: float) -> bool:
        """Note who has something to do now. Returns whether that, or the pools, have changed."""
        first = not self._busy_at and not self._busy
        busy = {name: pool.busy for name, pool in pools.items()}
        for name, pool in pools.items():
            if pool.busy or self._busy.get(name) or (first and pool.num_engines):
                self._busy_at[name] = now
        changed = busy != self._busy
        self._busy = busy
        return changed

    def active_for(self, pool: str, idle_seconds: float, now: float) -> float:
        """Seconds for which a pool stays in use if nothing comes: infinite while it has something to do, 0 when it is not in use.

        ``idle_seconds``: how long it counts as in use behind its last request.
        """
        if self._busy.get(pool):
            return math.inf
        if pool not in self._busy_at:
            return 0.0
        return max(self._busy_at[pool] + idle_seconds - now, 0.0)

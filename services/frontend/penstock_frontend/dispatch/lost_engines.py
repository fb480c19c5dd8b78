"""The engines that this frontend has lost lately."""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

KEPT_SECONDS = 600.0
MAX_KEPT = 20
"""Losses at once; the oldest go first."""


class LostEngine(NamedTuple):
    """An engine whose session ended although the engine had not said that it would stop."""

    engine_id: str
    address: str
    why: str
    at: float
    """When, in seconds of the clock."""
    num_moved: int
    """Sequences of this frontend that left the engine and go on elsewhere."""


class LostEngines:
    """Remembers losses for ten minutes, also of engines that have come back. ``clock``: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lost: deque[LostEngine] = deque(maxlen=MAX_KEPT)

    def add(self, engine_id: str, address: str, why: str, num_moved: int) -> None:
        """An engine was lost now."""
        self._lost.append(LostEngine(engine_id, address, why, self._clock(), num_moved))

    def recent(self) -> list[tuple[LostEngine, float]]:
        """The losses and the seconds since each, the latest first."""
        now = self._clock()
        while self._lost and now - self._lost[0].at > KEPT_SECONDS:
            self._lost.popleft()
        return [(lost, now - lost.at) for lost in reversed(self._lost)]

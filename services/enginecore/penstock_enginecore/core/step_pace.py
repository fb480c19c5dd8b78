"""How long steps take, one behind the other."""

import time
from collections.abc import Callable
from typing import NamedTuple


class StepTime(NamedTuple):
    """``waited``: seconds between the end of the step before and the beginning of this one; 0 where it had begun by then, None
    where the engine had been idle. ``computed``: seconds from then on until it was over.
    """

    waited: float | None
    computed: float


class StepPace:
    """Tells what steps take of the time between them. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._over: float | None = None

    def begin(self) -> float:
        """When a step is handed to the workers, maybe while others run."""
        return self._clock()

    def over(self, began: float) -> StepTime:
        """The oldest step is over, which was begun then."""
        before, self._over = self._over, self._clock()
        if before is None:
            return StepTime(None, self._over - began)
        return StepTime(max(began - before, 0.0), self._over - max(began, before))

    def idle(self) -> None:
        """There is no step, and none follows at once."""
        self._over = None

"""How long steps take, one behind the other."""

import time
from collections.abc import Callable


class StepPace:
    """Told when a step is started, when one is over, and when there is nothing to do: a step takes from the end of the one before
    it, with all that the host does in between, or from its own start where the engine was idle. ``clock``: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since: float | None = None

    def started(self) -> None:
        """A step was handed to the workers, maybe while others run."""
        if self._since is None:
            self._since = self._clock()

    def over(self) -> float:
        """The oldest step is over: seconds that it took."""
        now = self._clock()
        since, self._since = self._since, now
        return 0.0 if since is None else now - since

    def idle(self) -> None:
        """There is no step, and none follows at once."""
        self._since = None

"""How long to wait before the next attempt."""

import random


class Backoff:
    """Delays in seconds that double from ``initial`` up to ``maximum``, each shortened by up to a half at random.

    The randomness keeps the clients of a restarted server from coming back all at once.
    """

    def __init__(self, *, initial: float, maximum: float, rng: random.Random | None = None) -> None:
        self.maximum = maximum
        self._initial = initial
        self._next = initial
        self._rng = rng or random.Random()

    def next(self) -> float:
        """The delay before the attempt that comes now."""
        delay = min(self._next, self.maximum)
        self._next = delay * 2
        return delay * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start from the beginning: the last attempt was a success."""
        self._next = self._initial

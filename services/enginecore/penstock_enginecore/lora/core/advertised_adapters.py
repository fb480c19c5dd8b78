"""Which adapters the engine tells the cluster that it holds, and what loading one costs it."""

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from penstock_common.drain_rate import DrainRate
from penstock_common.lora.held import MAX_HELD, LoraHeld, short

_LATEST = 0.25
"""Weight of the latest load in the time that one takes."""


class LoraHoldings:
    """Makes what is told anew only where it has changed. Belongs to the busy loop's thread, but for ``of``, which may be called
    on any.
    """

    def __init__(self, max_loras: int, clock: Callable[[], float]) -> None:
        self._max_loras = max_loras
        self._clock = clock
        self._changes = 0
        self._rate = DrainRate()
        self._num_requests = 0
        self._load_seconds = 0.0
        self._request_seconds = 0.0
        self._told_at: tuple[int, Sequence[bytes]] = (-1, ())
        self._told = LoraHeld()
        self._lock = threading.Lock()  # of what is told

    def changed(self) -> None:
        """Adapters have come or gone, or are on their way."""
        self._changes += 1

    def loaded(self, seconds: float) -> None:
        """An adapter has come, in so many seconds."""
        self._load_seconds += (seconds - self._load_seconds) * (_LATEST if self._load_seconds else 1.0)
        self.changed()

    def began(self) -> None:
        """A request has its adapter."""
        if not self._num_requests:
            self._rate.begin(self._clock())
        self._num_requests += 1

    def ended(self) -> None:
        """A request is done with its adapter."""
        now = self._clock()
        self._num_requests -= 1
        self._rate.left(now, 0.0)
        self._request_seconds = self._rate.time_for(now, 1.0, 0.0) or 0.0

    def of(self, active: Sequence[bytes], held: Callable[[], Iterable[bytes]], *, full: bool = False) -> LoraHeld:
        """What is to be told. ``active``: digests of the adapters that have a slot; ``held``: those in memory and on their way,
        the most recently used first. ``full``: whether there is no room for another.
        """
        with self._lock:
            changes, told = self._changes, self._told
            if (changes, active) == self._told_at:
                return told
            news = changes != self._told_at[0]
            self._told_at = changes, active
            self._told = LoraHeld(
                version=told.version + 1,
                active=tuple(map(short, active[:MAX_HELD])),
                held=tuple(map(short, islice(dict.fromkeys(held()), MAX_HELD))) if news else told.held,
                max_loras=self._max_loras,
                requests_per_load=self._requests_per_load() if news else told.requests_per_load,
                full=full,
            )
            return self._told

    def _requests_per_load(self) -> float:
        return self._load_seconds / self._request_seconds if self._request_seconds else 0.0

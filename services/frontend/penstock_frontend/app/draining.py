"""When a frontend that was told to stop has nothing more to do. Does no I/O."""

from collections.abc import Iterable

JITTER = 0.1
"""Part of its age by which a connection may live longer, or shorter."""
QUIET = 2.0
"""Seconds without a call, or a connection on which one may come, after which none is expected: more than a round trip, in which a
client that was asked to open another connection still begins calls on the old one, or finds that there is no other frontend."""


class Draining:
    """A frontend serves on while calls run, and while connections are open on which more may come.

    gRPC connections are moved by their age: their clients begin no more calls on those that are older. They may stay open for
    calls that never end by themselves, as watches of the health service. ``now``: monotonic seconds, here and below; ``max_age``:
    of gRPC connections, in seconds; 0: they are not moved, and not waited for.
    """

    def __init__(self, now: float, *, timeout: float, max_age: float) -> None:
        self.deadline = now + timeout
        """When to end what is left."""
        self._max_age = max_age
        self._first_seen: dict[int, float] = {}
        self._quiet_since: float | None = None

    @property
    def moved_after(self) -> float:
        """Seconds after which every client has been asked to open another connection."""
        return self._max_age * (1.0 + JITTER)

    def done(self, now: float, *, calls: int, connections: Iterable[int]) -> bool:
        """Whether nothing runs and nothing can come. ``calls``: those that run; ``connections``: of gRPC, by number."""
        if not self._max_age:
            return not calls
        self._first_seen = {number: self._first_seen.get(number, now) for number in connections}
        if calls or any(now - seen < self.moved_after for seen in self._first_seen.values()):
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        return self._quiet_since is not None and now - self._quiet_since >= QUIET

"""Limits on the harm of hostile connections. All limits of the campaign are here; limits on resources equal those for
hostile requests.
"""

import math
from collections.abc import Iterator, Mapping

import msgspec

from tests.fuzz.campaign import FDS_TOLERANCE, RSS_TOLERANCE, TASKS_TOLERANCE, THREADS_TOLERANCE
from tests.fuzz.connections.system import Amounts


class Limits(msgspec.Struct, frozen=True):
    """Limits on neighbours' waits, and on the growth of a process's resources since the start.

    Args:
        gap: The longest time between two parts of a stream, in seconds.
        health: The longest time until ``/health`` is answered, in seconds.
        rss: Resident memory, in MiB.
        threads: Threads. Pools of threads fill on demand.
        fds: File descriptors.
        connections: Open connections.
        tasks: Asyncio tasks.
    """

    gap: float = 1.0
    health: float = 1.0
    rss: int = RSS_TOLERANCE
    threads: int = THREADS_TOLERANCE
    fds: int = FDS_TOLERANCE
    connections: int = 0
    tasks: int = TASKS_TOLERANCE

    def exceeded(self, waits: Mapping[str, float]) -> Iterator[str]:
        """Yield the problems with the longest waits, which are given by name."""
        for kind, seconds in sorted(waits.items()):
            limit = self.health if kind == "health" else self.gap
            if seconds > limit:
                what = "/health was answered after" if kind == "health" else f"{kind} stood still for"
                yield f"{what} {seconds:.2f} s; the limit is {limit:g} s"

    def kept(self, before: Mapping[str, Amounts], after: Mapping[str, Amounts]) -> Iterator[str]:
        """Yield the resources that processes hold in excess of earlier amounts and limits."""
        for name, old in before.items():
            new = after[name]
            pairs = (
                ("MiB of memory", old.held.rss, new.held.rss, self.rss),
                ("threads", old.held.threads, new.held.threads, self.threads),
                ("file descriptors", old.held.fds, new.held.fds, self.fds),
                ("connections", len(old.connections), len(new.connections), self.connections),
                ("asyncio tasks", old.held.tasks, new.held.tasks, self.tasks),
            )
            for what, a, b, more in pairs:
                if b > a + more:
                    new_ones = f": {sorted(new.connections - old.connections)}" if what == "connections" else ""
                    yield f"{name} holds {b} {what}; before it were {a}, and {more} more are allowed{new_ones}"


UNTIMED = Limits(gap=math.inf, health=math.inf)
"""Limits without times, for tests that must not depend on the machine's load."""

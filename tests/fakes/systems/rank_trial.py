"""Outcomes of 32 streams on the ranks of a group while faults hit some of the ranks."""

import time
from collections.abc import Sequence

from tests.fakes.processes import Service
from tests.fakes.systems.rank_group import RankGroup, metric
from tests.fakes.systems.streams import Streams

STREAMS = 32
FLAGS = {"cache__enable_prefix_caching": "false"}
"""Of the engines: what is computed again would not be seen otherwise."""


class Trial:
    """One round of streams. ``since``: when they had their first tokens, or later, when it happened."""

    def __init__(self, group: RankGroup, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> None:
        """``prompts`` are of one length, and so are their tokens, ``expected``."""
        self._group, self._prompts, self._expected = group, prompts, expected
        self._tokens = len(prompts[0]) + len(expected[0]) - 1
        self.since = 0.0

    async def begin(self) -> list[Service]:
        """Every stream has its first token, and there are as many on each rank. Returns the ranks in order."""
        await self._group.whole()
        order = await self._group.members()
        self._computed = {(engine, engine.pid): _computed(engine) for engine in self._group.engines}
        self._moved = metric(self._group.frontend, "penstock:requests_moved_total")
        self.streams = await Streams(self._group, self._prompts, self._expected, order, STREAMS).begin()
        self.since = time.monotonic()
        return [engine for engine, _ in order]

    async def end(self, lost: Sequence[Service] = ()) -> float:
        """All streams are right, of those on other ranks than the ``lost`` ones none has moved, and none was computed a second
        time. Returns the longest time in which one of them stood still, in seconds.
        """
        assert await self.streams.end() == 0
        moved = metric(self._group.frontend, "penstock:requests_moved_total") - self._moved
        own = sum(self.streams.placed_on(engine) for engine in lost)
        assert moved <= own * len(lost)  # from one to the next of them, too
        computed = 0.0
        for engine in self._group.engines:
            before = self._computed.get((engine, engine.pid))
            if before is None or engine not in lost:
                computed += _computed(engine) - (before or 0.0)
        # A stream that moves brings its tokens along, which are computed once more there instead of one after the other.
        assert computed == (STREAMS - max(own - moved, 0)) * self._tokens
        return self.streams.longest_gap(self.since, but=lost)


def _computed(engine: Service) -> float:
    """Tokens that the steps of an engine have computed; 0 of one that does not listen."""
    try:
        return metric(engine, "vllm:iteration_tokens_total_sum")
    except OSError:
        return 0.0

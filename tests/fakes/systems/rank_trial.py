"""Outcomes of 32 streams on the ranks of a group while faults hit some of the ranks."""

import time
from collections.abc import Sequence

from tests.fakes.processes import Service
from tests.fakes.systems.rank_group import RankGroup, metric
from tests.fakes.systems.streams import Streams

STREAMS = 32
FLAGS = {"cache__enable_prefix_caching": "false"}
"""Flags of the engines. Without prefix caching, tokens that are computed again are visible."""


class Trial:
    """One round of streams. ``since``: time of the first tokens, or, later, time of the fault."""

    def __init__(self, group: RankGroup, prompts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> None:
        """Create a round. All ``prompts`` have the same length, and so have their ``expected`` tokens."""
        self._group, self._prompts, self._expected = group, prompts, expected
        self._tokens = len(prompts[0]) + len(expected[0]) - 1
        self.since = 0.0

    async def begin(self) -> list[Service]:
        """Start the streams, the same number on each rank, and wait for their first tokens. Returns the ranks in order."""
        await self._group.whole()
        order = await self._group.members()
        self._computed = {(engine, engine.pid): _computed(engine) for engine in self._group.engines}
        self._moved = metric(self._group.frontend, "penstock:requests_moved_total")
        self.streams = await Streams(self._group, self._prompts, self._expected, order, STREAMS).begin()
        self.since = time.monotonic()
        return [engine for engine, _ in order]

    async def end(self, lost: Sequence[Service] = ()) -> float:
        """Wait for the streams, and check them. All must be right. Streams on ranks other than ``lost`` must not have
        moved or been recomputed.

        Returns the longest pause of a stream in seconds.
        """
        assert await self.streams.end() == 0
        moved = metric(self._group.frontend, "penstock:requests_moved_total") - self._moved
        own = sum(self.streams.placed_on(engine) for engine in lost)
        assert moved <= own * len(lost)  # a stream may also move from one lost rank to the next
        computed = 0.0
        for engine in self._group.engines:
            before = self._computed.get((engine, engine.pid))
            if before is None or engine not in lost:
                computed += _computed(engine) - (before or 0.0)
        # A stream that moves takes its tokens with it. The new rank recomputes them together, not one after the other.
        assert computed == (STREAMS - max(own - moved, 0)) * self._tokens
        return self.streams.longest_gap(self.since, but=lost)


def _computed(engine: Service) -> float:
    """Return the number of tokens that an engine's steps have computed, or 0 if the engine does not listen."""
    try:
        return metric(engine, "vllm:iteration_tokens_total_sum")
    except OSError:
        return 0.0

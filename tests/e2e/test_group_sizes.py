"""Data-parallel groups, as processes, that change their size during 32 streams.

The streams have transformers' tokens. The tests report the longest pauses of steps and streams.

Runs with ``PENSTOCK_GROUP_KILLS`` (make group-kills).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.test_data_parallel import KILLS
from tests.fakes.models.expert_model import Expected, save_expert_model
from tests.fakes.processes import Service
from tests.fakes.systems.cluster import read
from tests.fakes.systems.rank_group import RankGroup, metric
from tests.fakes.systems.streams import Load, greedy

COUNT, STREAMS, EXPERTS, FEWEST = 60, 32, 8, 2
CHANGES = 3
PROMPTS = [[1 + i, *range(2, 2 + 3 * i + 1), 5] for i in range(6)]
SHARED = {
    "data_parallel__min_size": FEWEST,
    "expert_parallel__enabled": "true",
    "expert_parallel__slots": EXPERTS // FEWEST + 1,
    "expert_parallel__window": 20,
    "expert_parallel__move_bytes_per_step": 1,
}

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not KILLS, reason="PENSTOCK_GROUP_KILLS is not set (make group-kills)"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    """Return a small model with many experts, and transformers' greedy tokens for the prompts."""
    return save_expert_model(tmp_path_factory.mktemp("experts"), PROMPTS, COUNT, num_experts=EXPERTS)


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[{}, SHARED], ids=["whole models", "shared experts"]
)
async def group(request: pytest.FixtureRequest, model: tuple[Path, Expected]) -> AsyncIterator[RankGroup]:
    """Yield two ranks, and two spare engines that wait for the group to grow."""
    async with RankGroup(model[0], size=2, spares=2, **request.param) as running:
        yield running


def switches(ranks: Sequence[Service]) -> dict[Service, tuple[float, float]]:
    """Return the number of planned changes of each rank, and the seconds for which they stopped its steps.

    Call it in a thread: it blocks, and a blocked event loop reads no stream.
    """
    names = [f"penstock:group_switch_seconds_{what}" for what in ("count", "sum")]
    return {rank: (metric(rank, names[0]), metric(rank, names[1])) for rank in ranks}


async def test_streams_go_on_while_a_group_goes_from_two_ranks_to_four_and_to_three(
    group: RankGroup, model: tuple[Path, Expected]
) -> None:
    calls = [group.stub.Generate(greedy(prompt, COUNT, int(i == 0))) for i, prompt in enumerate(PROMPTS)]
    assert [answer.token_ids for answer in await asyncio.gather(*map(read, calls))] == model[1]
    async with Load(group, PROMPTS, model[1], STREAMS) as load:
        await load.answered(STREAMS)
        began = time.monotonic()
        await load.answered(2 * STREAMS)
        print(f"\nnothing changes: streams stood still for {load.longest_gap(began):.3f} s")
        for _ in range(CHANGES):
            for size in (2, 4, 3):
                await load.answered(len(PROMPTS))
                inside = [engine for engine, _ in await group.members()]
                before = await asyncio.to_thread(switches, inside)
                began = time.monotonic()
                await group.scale(size)
                stayed = [engine for engine, _ in await group.members() if engine in before]
                after = await asyncio.to_thread(switches, stayed)
                stopped = []
                for rank in stayed:
                    count, seconds = (now - then for now, then in zip(after[rank], before[rank], strict=True))
                    assert (count > 0) == (size != len(inside))
                    stopped.append(seconds / max(count, 1))
                await load.answered(2 * STREAMS)
                gap = load.longest_gap(began)
                print(f"to {size} ranks: steps stopped for {1000 * max(stopped):.1f} ms, streams for {gap:.3f} s")
    print(f"{load.num_answers} answers")
    for engine, _ in await group.members():
        assert metric(engine, "penstock:exchange_seconds_count") > 0

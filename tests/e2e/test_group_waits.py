"""Data-parallel groups, as processes, with ``data_parallel.on_rank_loss`` set to ``wait``.

After losing a rank, the group waits until the rank returns.

Runs with ``PENSTOCK_GROUP_KILLS`` (make group-kills).
"""

from pathlib import Path

import pytest

from tests.e2e.test_data_parallel import KILLS, PROMPTS, Expected, model
from tests.fakes.systems import rank_trial
from tests.fakes.systems.rank_group import RankGroup, held, metric, resident, until
from tests.fakes.systems.rank_trial import STREAMS, Trial
from tests.fakes.systems.streams import Streams

__all__ = ["model"]
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not KILLS, reason="PENSTOCK_GROUP_KILLS is not set (make group-kills)"),
]
FLAGS = {"data_parallel__on_rank_loss": "wait", "expert_parallel__enabled": "true", **rank_trial.FLAGS}


async def test_requests_stay_until_a_replacement_is_there(model: tuple[Path, Expected]) -> None:
    async with RankGroup(model[0], size=2, data_parallel__move_after=600, **FLAGS) as group:
        trial = Trial(group, PROMPTS, model[1])
        for number in (0, 1):
            ranks = await trial.begin()
            killed, other = ranks[number], ranks[1 - number]
            holds, size = held(other), resident(other)
            await killed.kill()
            await until(lambda other=other: metric(other, "penstock:group_suspended") == 1)
            await killed.restart()
            print(f"\nthe rank beside rank {number}: {await trial.end([killed]):.3f} s")
            await group.until_idle()
            limits = [value + 4 for value in holds]
            await until(
                lambda other=other, limits=limits: all(
                    now <= most for now, most in zip(held(other), limits, strict=True)
                )
            )
            print(f"it had {size:.0f} MiB before and {resident(other):.0f} MiB after")


async def test_requests_leave_a_group_that_stands_still_for_another(model: tuple[Path, Expected]) -> None:
    group = RankGroup(model[0], size=2, spares=2, data_parallel__move_after=1, **FLAGS)
    group.spares = 0
    for engine in group.engines[2:]:
        engine.add_flag("pool", "others")
    async with group:
        await group.whole()
        order = await group.members()
        streams = await Streams(group, PROMPTS, model[1], order, STREAMS).begin()
        killed, other = order[0][0], order[1][0]
        await killed.kill()
        assert await streams.end() == 0
        assert metric(group.frontend, "penstock:requests_moved_total") >= STREAMS
        assert metric(other, "penstock:group_suspended") == 1
        await killed.restart()
        await group.whole()
        assert await (await Streams(group, PROMPTS, model[1], await group.members(), STREAMS).begin()).end() == 0

"""Ranks as processes whose connections with each other break off or carry nothing for a while; everybody else is reached.

Runs with ``PENSTOCK_GROUP_KILLS`` (make group-kills).
"""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.test_data_parallel import KILLS, PROMPTS, Expected, model
from tests.fakes.engines.rank_cables import NAME, VARIABLE, Cable
from tests.fakes.engines.worker_faults import installed
from tests.fakes.processes import Service
from tests.fakes.systems import rank_trial
from tests.fakes.systems.rank_group import RankGroup, metric
from tests.fakes.systems.rank_trial import Trial

__all__ = ["model"]
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not KILLS, reason="PENSTOCK_GROUP_KILLS is not set (make group-kills)"),
]
Cables = dict[Service, Cable]
CUT = 5.0
"""Seconds in which connections carry nothing."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cables() -> AsyncIterator[Cables]:
    """By engine."""
    laid: Cables = {}
    yield laid
    for cable in laid.values():
        await cable.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def group(
    cables: Cables, model: tuple[Path, Expected], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RankGroup]:
    running = RankGroup(model[0], size=3, plugins=f'["{NAME}"]', expert_parallel__enabled="true", **rank_trial.FLAGS)
    found = installed(tmp_path_factory.mktemp("plugin"), NAME, "tests.fakes.engines.rank_cables")
    for engine in running.engines:
        cables[engine] = cable = Cable()
        await cable.start()
        engine.environment = {**found, VARIABLE: str(cable.port)}
    async with running:
        yield running


@pytest.mark.parametrize("number", [1, 2], ids=["of rank 1 and rank 0", "of rank 2 and all others"])
async def test_connections_that_break_off_cost_a_step_and_no_rank(
    group: RankGroup, cables: Cables, model: tuple[Path, Expected], number: int
) -> None:
    trial = Trial(group, PROMPTS, model[1])
    ranks = await trial.begin()
    epoch = metric(ranks[0], "penstock:group_epoch")
    cables[ranks[number]].cut()
    print(f"\nstreams stood still for {await trial.end():.3f} s")
    await group.whole()
    assert [engine for engine, _ in await group.members()] == ranks
    assert metric(ranks[0], "penstock:group_epoch") > epoch


@pytest.mark.parametrize("number", [1, 2], ids=["of rank 1 and rank 0", "of rank 2 and all others"])
async def test_connections_that_carry_nothing_for_a_while_hold_the_group_up_so_long(
    group: RankGroup, cables: Cables, model: tuple[Path, Expected], number: int
) -> None:
    trial = Trial(group, PROMPTS, model[1])
    ranks = await trial.begin()
    epoch = metric(ranks[0], "penstock:group_epoch")
    unplugged = time.monotonic()
    cables[ranks[number]].unplug()
    await asyncio.sleep(CUT)
    cables[ranks[number]].plug_in()
    seconds = time.monotonic() - unplugged
    print(f"\nstreams stood still for {await trial.end():.3f} s, of which nothing passed in {seconds:.3f} s")
    assert metric(ranks[0], "penstock:group_epoch") == epoch

"""A group of expert-parallel ranks whose processes are killed and stopped during 32 streams.

Runs with ``PENSTOCK_GROUP_KILLS=N`` (make group-kills), which kills N ranks at random times. Every stream has
transformers' tokens, and surviving ranks recompute no tokens.
"""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.common.v1 import control_pb2
from tests.e2e.test_data_parallel import KILLS, PROMPTS, Expected, generate, model
from tests.fakes.systems import rank_trial
from tests.fakes.systems.cluster import read
from tests.fakes.systems.rank_group import LEASE, RankGroup, held, metric, resident, until
from tests.fakes.systems.rank_trial import STREAMS, Trial

__all__ = ["model"]
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not KILLS, reason="PENSTOCK_GROUP_KILLS is not set (make group-kills)"),
]
RANKS, SPARES = 3, 2
FLAGS = {"data_parallel__min_size": 2, "expert_parallel__enabled": "true", **rank_trial.FLAGS}
AWAY = 30.0
"""Seconds for which the coordinator is stopped."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def group(model: tuple[Path, Expected]) -> AsyncIterator[RankGroup]:
    """Yield three ranks and two spare engines, which replace lost ranks. Any two ranks together have all experts."""
    async with RankGroup(model[0], size=RANKS, spares=SPARES, **FLAGS) as running:
        yield running


@pytest.fixture
def trial(group: RankGroup, model: tuple[Path, Expected]) -> Trial:
    return Trial(group, PROMPTS, model[1])


def say(what: str, seconds: Sequence[float]) -> None:
    """Print the median, the 99th percentile and the maximum of some times."""
    ordered = sorted(seconds)
    median, p99 = ordered[len(ordered) // 2], ordered[-1 - len(ordered) // 100]
    print(f"{what}: {median:.3f} s (median), {p99:.3f} s (p99), {ordered[-1]:.3f} s (most)")


async def test_ranks_are_killed_whenever_and_no_stream_fails_or_differs(group: RankGroup, trial: Trial) -> None:
    chance = random.Random(KILLS)
    stood: list[float] = []
    recovered: list[float] = []
    restarts = []
    undisturbed = []
    for _ in range(3):
        await trial.begin()
        undisturbed.append(await trial.end())
    began = time.monotonic()
    for number in range(KILLS):
        ranks = await trial.begin()
        if number == KILLS // 2:  # the first rank survives from here on, so that its memory can be measured
            holds, size = held(ranks[0]), resident(ranks[0])
        victim = chance.choice(ranks[number >= KILLS // 2 :])
        others = [rank for rank in ranks if rank is not victim]
        before = [metric(rank, "penstock:group_recovery_seconds_sum") for rank in others]
        await asyncio.sleep(chance.uniform(0, 0.2))
        trial.since = time.monotonic()
        await victim.kill()
        stood.append(await trial.end([victim]))
        after = [metric(rank, "penstock:group_recovery_seconds_sum") for rank in others]
        recovered += [now - then for now, then in zip(after, before, strict=True)]
        restarts.append(asyncio.create_task(victim.restart()))
    await asyncio.gather(*restarts)
    await group.whole()
    print(f"\n{KILLS} kills in {time.monotonic() - began:.0f} s, {KILLS * STREAMS} streams, none failed or differed")
    say("streams that nothing befell stood still", undisturbed)
    say("streams of survivors, while killed ranks start again beside them", stood)
    say("from the loss of a group to the next one's first exchange", recovered)
    print(f"the first rank after half of the kills, and after all: {size:.0f} and {resident(ranks[0]):.0f} MiB")
    await group.until_idle()
    await until(lambda: all(now <= then + 4 for now, then in zip(held(ranks[0]), holds, strict=True)))


@pytest.mark.parametrize("number", [0, 1])
async def test_a_stopped_rank_holds_the_others_up_for_its_lease_and_can_be_one_again(
    group: RankGroup, trial: Trial, number: int
) -> None:
    ranks = await trial.begin()
    stopped = ranks[number]
    stopped.send_signal(signal.SIGSTOP)
    print(f"\nrank {number} stopped: {await trial.end([stopped]):.3f} s; the lease is {LEASE:g} s")
    await group.whole()
    inside = [engine for engine, _ in await group.members()]
    stopped.send_signal(signal.SIGCONT)
    await until(lambda: not metric(stopped, "vllm:num_requests_running"))
    killed = [engine for engine in group.engines if engine not in (*inside[1:], stopped)]
    await asyncio.gather(*(engine.kill() for engine in killed))  # no other engine can replace the stopped rank
    await trial.begin()
    await trial.end()
    assert stopped in [engine for engine, _ in await group.members()]
    await asyncio.gather(*(engine.restart() for engine in killed))


@pytest.mark.parametrize("wait", [False, True], ids=["two at once", "one, and another when the group has gone on"])
async def test_two_ranks_die_and_another_engine_takes_a_place_at_once(
    group: RankGroup, trial: Trial, wait: bool
) -> None:
    ranks = await trial.begin()
    epoch = metric(ranks[2], "penstock:group_epoch")
    await ranks[0].kill()
    if wait:
        await until(lambda: metric(ranks[2], "penstock:group_epoch") > epoch)
    await ranks[1].kill()
    print(f"\nthe last rank: {await trial.end(ranks[:2]):.3f} s")
    await asyncio.gather(*(rank.restart() for rank in ranks[:2]))


async def test_a_rank_and_the_coordinator_die_together(group: RankGroup, trial: Trial) -> None:
    ranks = await trial.begin()
    died = time.monotonic()
    await asyncio.gather(group.coordinator.kill(), ranks[0].kill())
    await group.coordinator.restart()
    back = time.monotonic() - died
    print(f"\nthe others: {await trial.end(ranks[:1]):.3f} s; the coordinator was back after {back:.3f} s")
    await ranks[0].restart()


async def test_idle_ranks_start_waves_pause_and_resume_while_the_coordinator_is_away(
    group: RankGroup, model: tuple[Path, Expected]
) -> None:
    await group.whole()
    order = await group.members()
    last, number = order[-1]
    epoch = metric(last, "penstock:group_epoch")
    await group.coordinator.kill()
    turns, over = 0, time.monotonic() + AWAY
    while time.monotonic() < over:
        for i, (_, rank) in enumerate(order):
            await group.until_idle()
            assert (await read(generate(group, i, rank))).token_ids == model[1][i]
        await group.admin.Pause(admin_pb.PauseRequest(mode=control_pb2.PAUSE_MODE_KEEP))
        answer = asyncio.ensure_future(read(generate(group, 0, number)))
        steps = [stats.step_counter for stats in await group.stats()]
        assert [stats.step_counter for stats in await group.stats()] == steps
        assert not answer.done()
        await group.admin.Resume(admin_pb.ResumeRequest())
        assert (await answer).token_ids == model[1][0]
        turns += 1
    await group.coordinator.restart()
    await group.whole()
    assert metric(last, "penstock:group_epoch") == epoch
    print(f"\n{turns * (RANKS + 1)} waves and {turns} pauses in {AWAY:g} s without a coordinator")

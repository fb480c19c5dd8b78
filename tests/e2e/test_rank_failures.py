"""Ranks of a data-parallel group are killed at every named point during 32 streams (make rank-failures).

Every stream has transformers' tokens, and requests of other ranks do not move. A replacement completes the group.
"""

import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.common.v1 import control_pb2
from tests.e2e.test_data_parallel import PROMPTS, Expected, model
from tests.fakes.engines.rank_faults import CHANGING, SERVING
from tests.fakes.systems.faulty_ranks import FaultyRanks
from tests.fakes.systems.rank_group import RankGroup, held, metric, until
from tests.fakes.systems.streams import Streams

__all__ = ["model"]
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.environ.get("PENSTOCK_RANK_FAILURES") != "full", reason="make rank-failures runs it"),
]
RANKS = 3
OUTSIDE = ("idle", "paused")
"""Points at which a rank runs no steps."""
CASES = list(itertools.product((*SERVING, *CHANGING, *OUTSIDE), (0, 1)))


class Row:
    """A row of the report."""

    def __init__(self) -> None:
        self.wrong = self.own = self.moved = 0
        self.stood = 0.0


def moved(cluster: RankGroup) -> float:
    """Return the number of requests that have moved to another engine so far."""
    return metric(cluster.frontend, "penstock:requests_moved_total")


@pytest.fixture(scope="module")
def report() -> Any:
    rows: dict[tuple[str, int], Row] = {}
    yield rows
    lines = [
        f"| {point} | {rank} | {row.wrong} | {row.own} | {row.moved} | {row.stood:.3f} |"
        for (point, rank), row in rows.items()
    ]
    head = "| point | rank | wrong | on the killed rank | moved | stood still, s |\n|---|--:|--:|--:|--:|--:|"
    print("", head, *lines, sep="\n")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ranks(model: tuple[Path, Expected], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultyRanks]:
    directory = tmp_path_factory.mktemp("faults")
    async with FaultyRanks(model[0], directory, size=RANKS, expert_parallel__enabled="true") as group:
        yield group


@pytest.mark.parametrize(("point", "rank"), CASES, ids=[f"{point.replace(' ', '-')}-{rank}" for point, rank in CASES])
async def test_every_stream_is_what_it_would_have_been(
    ranks: FaultyRanks, model: tuple[Path, Expected], report: dict[tuple[str, int], Row], point: str, rank: int
) -> None:
    row = report[point, rank] = Row()
    order = await ranks.members()
    (victim, _), (other, _) = order[rank], order[1 - rank]
    third = order[2][0]
    changing = point in CHANGING
    if changing:
        await third.kill()
        await until(lambda: metric(other, "penstock:group_ranks") == RANKS - 1)
        await ranks.until_engines_are_seen(RANKS - 1)
        order = await ranks.members()
    held_before, before = held(other), moved(ranks)
    waited = metric(other, "penstock:group_recovery_seconds_sum")
    epoch = metric(other, "penstock:group_epoch")
    streams = Streams(ranks, PROMPTS, model[1], [] if point == "idle" else order)
    row.own = streams.placed_on(victim)
    if point == "idle":
        await ranks.until_idle()
        await victim.kill()
        row.wrong = await (await streams.begin()).end()
    elif point == "paused":
        await streams.begin()
        await ranks.admin.Pause(admin_pb.PauseRequest(mode=control_pb2.PAUSE_MODE_KEEP))
        await victim.kill()
        await until(lambda: metric(other, "penstock:group_ranks") == RANKS - 1)
        await ranks.admin.Resume(admin_pb.ResumeRequest())
        row.wrong = await streams.end()
    else:
        await streams.begin()
        ranks.arm(victim, point)
        if changing:
            await third.start()
        row.wrong = await streams.end()
        while not ranks.fired(victim):  # a process takes longer to start than a stream lasts, so repeat the streams
            before = moved(ranks)
            try:
                await streams.begin()
            except grpc.aio.AioRpcError as refused:
                if refused.code() is not grpc.StatusCode.INVALID_ARGUMENT or not ranks.fired(victim):
                    raise
                break  # the frontend refuses requests for the rank that was just killed
            row.wrong += await streams.end()
    await victim.ended()
    assert not row.wrong
    row.moved = int(moved(ranks) - before)
    # With an idle rank, requests are still sent to the rank after its death.
    assert point == "idle" or row.moved <= row.own
    await until(lambda: metric(other, "penstock:group_epoch") > epoch)
    if changing:
        await third.serving()
    row.stood = metric(other, "penstock:group_recovery_seconds_sum") - waited
    await victim.start()
    await victim.serving()
    await ranks.until_engines_are_seen(RANKS)
    await ranks.whole()
    await ranks.until_idle()
    limits = [value + 4 for value in held_before]
    await until(lambda: all(now <= limit for now, limit in zip(held(other), limits, strict=True)))

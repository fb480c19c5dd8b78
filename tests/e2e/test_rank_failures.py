"""Ranks of a data-parallel group killed at every named point under 32 streams (make rank-failures).

Every stream is what transformers says; requests of the other ranks do not move; a replacement makes the group whole.
"""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.admin.v1 import service_pb2_grpc as admin_rpc
from penstock.common.v1 import control_pb2
from penstock_common.rpc.channel import make_channel
from tests.e2e.test_data_parallel import PROMPTS, Expected, generate, group_is_whole, members, metric, model, until
from tests.fakes.engines.rank_faults import CHANGING, NAME, SERVING, VARIABLE
from tests.fakes.engines.worker_faults import Fault, fired, installed
from tests.fakes.network.ports import free_port
from tests.fakes.processes import Service
from tests.fakes.systems.cluster import Cluster, read

__all__ = ["model"]
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(os.environ.get("PENSTOCK_RANK_FAILURES") != "full", reason="make rank-failures runs it"),
]
RANKS = 3
STREAMS = 32
OUTSIDE = ("idle", "paused")
"""Points at which a rank does nothing."""
CASES = list(itertools.product((*SERVING, *CHANGING, *OUTSIDE), (0, 1)))


class Row:
    """A line of the report."""

    def __init__(self) -> None:
        self.wrong = self.own = self.moved = 0
        self.stood = 0.0


class Calls:
    """Rounds of streams, dealt out to ``order``; where that is empty, the frontend chooses."""

    def __init__(self, cluster: Cluster, expected: Expected, order: list[tuple[Service, int]]) -> None:
        self._cluster, self._expected = cluster, expected
        self._placed = [order[i % len(order)] if order else None for i in range(STREAMS)]

    def placed_on(self, engine: Service) -> int:
        """Streams of a round that are this engine's."""
        return sum(place is not None and place[0] is engine for place in self._placed)

    async def begin(self) -> list[Any]:
        """Every stream has its first token."""
        streams = [
            generate(self._cluster, i % len(PROMPTS), None if place is None else place[1])
            for i, place in enumerate(self._placed)
        ]
        return list(zip(streams, await asyncio.gather(*(stream.read() for stream in streams)), strict=True))

    async def end(self, running: list[Any]) -> int:
        """How many are not what transformers says."""
        answers = await asyncio.gather(*(read(stream) for stream, _ in running))
        got = [[*first.token_ids, *answer.token_ids] for (_, first), answer in zip(running, answers, strict=True)]
        return sum(tokens != self._expected[i % len(PROMPTS)] for i, tokens in enumerate(got))


def held(engine: Service) -> tuple[int, int]:
    """Threads and file descriptors of a process."""
    return tuple(len(list(Path(f"/proc/{engine.pid}/{what}").iterdir())) for what in ("task", "fd"))  # type: ignore[return-value]


def moved(cluster: Cluster) -> float:
    """Requests that have left an engine so far."""
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
async def ranks(model: tuple[Path, Expected], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    directory = tmp_path_factory.mktemp("faults")
    flags = {"admin__port": free_port()}
    cluster = Cluster(
        model[0],
        engines=RANKS,
        lease_seconds=2,
        frontend_flags=flags,
        data_parallel__size=RANKS,
        expert_parallel__enabled="true",
        plugins=f'["{NAME}"]',
    )
    found = installed(directory / "plugin", NAME, "tests.fakes.engines.rank_faults")
    for engine in cluster.engines:
        engine.environment = {**found, VARIABLE: str(directory / str(engine.port))}
    cluster.faults = directory  # type: ignore[attr-defined]
    async with cluster:
        cluster.admin = f"127.0.0.1:{flags['admin__port']}"  # type: ignore[attr-defined]
        yield cluster


async def again(cluster: Cluster, engine: Service) -> None:
    """The rank's process starts anew; waits until it serves."""
    await engine.start()
    await engine.serving()


async def whole(cluster: Cluster) -> None:
    await cluster.until_engines_are_seen(RANKS)
    await group_is_whole(cluster, RANKS)


@pytest.mark.parametrize(("point", "rank"), CASES, ids=[f"{point.replace(' ', '-')}-{rank}" for point, rank in CASES])
async def test_every_stream_is_what_it_would_have_been(
    ranks: Cluster, model: tuple[Path, Expected], report: dict[tuple[str, int], Row], point: str, rank: int
) -> None:
    row = report[point, rank] = Row()
    order = await members(ranks)
    (victim, _), (other, _) = order[rank], order[1 - rank]
    third = order[2][0]
    armed = ranks.faults / str(victim.port)  # type: ignore[attr-defined]
    armed.with_suffix(".done").unlink(missing_ok=True)
    changing = point in CHANGING
    if changing:
        await third.kill()
        await until(lambda: metric(other, "penstock:group_ranks") == RANKS - 1)
        await ranks.until_engines_are_seen(RANKS - 1)
        order = await members(ranks)
    held_before, before = held(other), moved(ranks)
    waited = metric(other, "penstock:group_recovery_seconds_sum")
    epoch = metric(other, "penstock:group_epoch")
    calls = Calls(ranks, model[1], [] if point == "idle" else order)
    row.own = calls.placed_on(victim)
    if point == "idle":
        await ranks.until_idle()
        await victim.kill()
        row.wrong = await calls.end(await calls.begin())
    elif point == "paused":
        async with make_channel(ranks.admin) as channel:  # type: ignore[attr-defined]
            admin = admin_rpc.AdminServiceStub(channel)
            running = await calls.begin()
            await admin.Pause(admin_pb.PauseRequest(mode=control_pb2.PAUSE_MODE_KEEP))
            await victim.kill()
            await until(lambda: metric(other, "penstock:group_ranks") == RANKS - 1)
            await admin.Resume(admin_pb.ResumeRequest())
            row.wrong = await calls.end(running)
    else:
        running = await calls.begin()
        Fault(0, point, "kill").arm(armed)
        if changing:
            await third.start()
        row.wrong = await calls.end(running)
        while fired(armed) is None:  # a process starts for longer than a stream lasts
            before = moved(ranks)
            row.wrong += await calls.end(await calls.begin())
    await victim.ended()
    assert not row.wrong
    row.moved = int(moved(ranks) - before)
    assert point == "idle" or row.moved <= row.own  # those of an idle rank are sent to it after its death
    await until(lambda: metric(other, "penstock:group_epoch") > epoch)
    if changing:
        await third.serving()
    row.stood = metric(other, "penstock:group_recovery_seconds_sum") - waited
    await again(ranks, victim)
    await whole(ranks)
    await ranks.until_idle()
    limits = [value + 4 for value in held_before]
    await until(lambda: all(now <= limit for now, limit in zip(held(other), limits, strict=True)))

"""Ranks of a data-parallel group as processes: transformers' tokens, also if ranks or the coordinator fail.

With ``PENSTOCK_GROUP_KILLS`` (make group-kills), a test also changes the size of a group of ``penstock serve``.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.common.v1 import control_pb2
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc as rpc
from penstock_common.rpc.channel import make_channel
from tests.fakes.models.expert_model import Expected, save_expert_model
from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE
from tests.fakes.systems.cluster import read
from tests.fakes.systems.rank_group import RankGroup, metric, until
from tests.fakes.systems.streams import greedy

COUNT = 100
PROMPTS = [[1 + i, 2, 3, 4 + i, 5] for i in range(6)]
KILLS = int(os.environ.get("PENSTOCK_GROUP_KILLS", "0"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("warm_processes"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    """Return a tiny mixture-of-experts model, and transformers' greedy tokens for the prompts."""
    return save_expert_model(tmp_path_factory.mktemp("experts"), PROMPTS, COUNT)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def group(model: tuple[Path, Expected]) -> AsyncIterator[RankGroup]:
    """Yield two expert-parallel ranks. Each rank computes half of the experts."""
    async with RankGroup(model[0], size=2, expert_parallel__enabled="true") as running:
        yield running


def generate(
    cluster: RankGroup, index: int, rank: int | None = None
) -> "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]":
    return cluster.stub.Generate(greedy(PROMPTS[index], COUNT, rank))


async def test_ranks_under_uneven_load_give_transformers_tokens(group: RankGroup, model: tuple[Path, Expected]) -> None:
    for uneven in (lambda i: 0, lambda i: int(i == 0), lambda i: None):
        answers = await asyncio.gather(*(read(generate(group, i, uneven(i))) for i in range(len(PROMPTS))))
        assert [answer.token_ids for answer in answers] == model[1]
    assert sum(metric(engine, "penstock:dummy_steps_total") for engine in group.engines) >= COUNT
    assert metric(group.engines[0], "penstock:group_ranks") == 2


@pytest.mark.parametrize("mode", [control_pb2.PAUSE_MODE_KEEP, control_pb2.PAUSE_MODE_WAIT])
async def test_a_group_pauses_and_goes_on_as_one(group: RankGroup, model: tuple[Path, Expected], mode: int) -> None:
    running = generate(group, 0, 0)
    assert await running.read()
    await group.admin.Pause(admin_pb.PauseRequest(mode=mode))
    held = asyncio.ensure_future(read(generate(group, 1, 1)))
    steps = [stats.step_counter for stats in await group.stats()]
    assert [stats.step_counter for stats in await group.stats()] == steps
    assert not held.done()
    await group.admin.Resume(admin_pb.ResumeRequest())
    assert (await held).token_ids == model[1][1]
    assert (await read(running)).token_ids[-10:] == model[1][0][-10:]


async def test_an_idle_group_starts_without_its_coordinator_which_finds_it_again(
    group: RankGroup, model: tuple[Path, Expected]
) -> None:
    epoch = metric(group.engines[0], "penstock:group_epoch")
    with pytest.raises(
        grpc.aio.AioRpcError,
        match="replicas is 5; it must be at most 4, because each rank needs at least one of the model's 4 experts",
    ):
        await group.ask_for(5)
    assert await group.ask_for(3) == 2
    for engine in group.engines:
        await until(lambda rank: metric(rank, "penstock:group_target_ranks") == 3, engine)
    await group.coordinator.kill()
    for i in range(2):
        assert (await read(generate(group, i, i))).token_ids == model[1][i]
    await group.coordinator.start()
    await group.coordinator.serving()
    answers = await asyncio.gather(*(read(generate(group, i)) for i in range(len(PROMPTS))))
    assert [answer.token_ids for answer in answers] == model[1]
    await group.whole()
    assert metric(group.engines[0], "penstock:group_epoch") == epoch
    assert await group.ask_for(2) == 3  # the ranks remember the epoch and have sent it to the new coordinator


async def survive(group: RankGroup, expected: Expected, victim: int, *, on: int | None) -> float:
    """Kill a rank while requests run, and restart the rank.

    Args:
        on: Rank that runs the requests. None means all ranks.

    Returns the seconds for which the other rank ran no steps.
    """
    ranks = await group.members()
    killed, other = ranks[victim][0], ranks[1 - victim][0]
    before = metric(other, "penstock:group_recovery_seconds_sum")
    count = metric(other, "penstock:group_recovery_seconds_count")
    streams = [generate(group, i, ranks[i % 2 if on is None else on][1]) for i in range(4)]
    first = [await stream.read() for stream in streams]
    assert all(isinstance(piece, pb.GenerateResponse) for piece in first)
    await killed.kill()
    answers = await asyncio.gather(*map(read, streams))
    for piece, answer, wanted in zip(first, answers, expected, strict=False):
        assert [*piece.token_ids, *answer.token_ids] == wanted
    await until(lambda: metric(other, "penstock:group_recovery_seconds_count") > count)
    stood = metric(other, "penstock:group_recovery_seconds_sum") - before
    await killed.start()
    await killed.serving()
    await group.until_engines_are_seen(2)
    await group.whole()
    return stood


@pytest.mark.parametrize(
    ("victim", "on"),
    [(0, None), (1, 0)],
    ids=["the first rank, requests on both", "the last rank, requests on the first"],
)
async def test_a_rank_is_killed_in_a_wave_and_every_request_ends_as_it_would_have(
    group: RankGroup, model: tuple[Path, Expected], victim: int, on: int | None
) -> None:
    stood = await survive(group, model[1], victim, on=on)
    print(f"the survivor stood still for {stood:.3f} s")


async def test_a_rank_is_killed_while_all_are_idle(group: RankGroup, model: tuple[Path, Expected]) -> None:
    await group.until_idle()
    await group.engines[0].kill()
    assert (await read(generate(group, 0))).token_ids == model[1][0]
    await group.engines[0].start()
    await group.engines[0].serving()
    await group.until_engines_are_seen(2)
    await group.whole()
    answers = await asyncio.gather(*(read(generate(group, i)) for i in range(len(PROMPTS))))
    assert [answer.token_ids for answer in answers] == model[1]


@pytest.mark.skipif(not KILLS, reason="PENSTOCK_GROUP_KILLS is not set (make group-kills)")
async def test_a_served_group_changes_its_size_while_requests_run(model: tuple[Path, Expected]) -> None:
    ports = [free_port() for _ in range(3)]
    flags = [f"--{name}-port={port}" for name, port in zip(("grpc", "http", "admin"), ports, strict=True)]
    serve = ("serve", str(model[0]), "--data-parallel-size", "2", "--kv-cache-memory", "64MiB", *flags)
    admin = f"--admin-address=127.0.0.1:{ports[2]}"
    command = [sys.executable, "-m", "penstock_local"]
    process = await asyncio.create_subprocess_exec(*command, *serve)
    try:
        async with make_channel(f"127.0.0.1:{ports[0]}") as channel:
            stub = rpc.InferenceServiceStub(channel)
            models = pb.ListModelsRequest()
            async with asyncio.timeout(PATIENCE):
                while (await stub.ListModels(models, wait_for_ready=True)).models[0].num_engines < 2:
                    await asyncio.sleep(0.1)
            assert (await read(stub.Generate(greedy(PROMPTS[0], COUNT)))).token_ids == model[1][0]
            stopped = asyncio.Event()

            async def keep_asking(index: int) -> int:
                count = 0
                while not stopped.is_set():
                    answer = await read(stub.Generate(greedy(PROMPTS[index], COUNT)))
                    assert answer.token_ids == model[1][index]
                    count += 1
                return count

            asking = [asyncio.ensure_future(keep_asking(i)) for i in range(3)]
            for size in (4, 3):
                scaled = await asyncio.create_subprocess_exec(*command, "scale", str(size), "--wait", admin)
                assert await asyncio.wait_for(scaled.wait(), PATIENCE) == 0
            stopped.set()
            print(f"{sum(await asyncio.gather(*asking))} answers while the group went from 2 ranks to 4 and to 3")
            refused = await asyncio.create_subprocess_exec(*command, "scale", "0", admin)
            assert await refused.wait() == 1
    finally:
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0

"""Ranks of a data-parallel group as processes: transformers' tokens whatever happens to ranks and coordinator.

``PENSTOCK_GROUP_KILLS=N`` kills ranks N times more, whenever (make group-kills).
"""

import asyncio
import os
import random
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.admin.v1 import service_pb2_grpc as admin_rpc
from penstock.common.v1 import control_pb2
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc as rpc
from penstock_common.rpc.channel import make_channel
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE
from tests.fakes.processes import Service
from tests.fakes.systems.cluster import Cluster, read

COUNT = 100
PROMPTS = [[1 + i, 2, 3, 4 + i, 5] for i in range(6)]
KILLS = int(os.environ.get("PENSTOCK_GROUP_KILLS", "0"))

pytestmark = pytest.mark.asyncio(loop_scope="module")
Expected = list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    """A tiny model of experts, and transformers' greedy tokens for the prompts."""
    from tests.fakes.models.tiny_models import save_tiny_model  # here: torch, of one process that runs tests
    from tests.fakes.models.transformers_greedy import greedy_tokens

    folder = tmp_path_factory.mktemp("experts")
    made = save_tiny_model("qwen3_moe", folder)
    byte_level().save(str(folder / "tokenizer.json"))
    return folder, [greedy_tokens(made, prompt, COUNT) for prompt in PROMPTS]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def group(model: tuple[Path, Expected]) -> AsyncIterator[Cluster]:
    """Two ranks, which share experts: each computes half of every token's."""
    flags = {"admin__port": free_port()}
    flags_of_engines = {"data_parallel__size": 2, "expert_parallel__enabled": "true"}
    async with Cluster(model[0], engines=2, lease_seconds=2, frontend_flags=flags, **flags_of_engines) as running:
        running.admin = f"127.0.0.1:{flags['admin__port']}"  # type: ignore[attr-defined]
        yield running


def generate(
    cluster: Cluster, index: int, rank: int | None = None
) -> "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]":
    request = request_for(index)
    if rank is not None:
        request.routing.data_parallel_rank = rank
    return cluster.stub.Generate(request)


def request_for(index: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPTS[index]),
        sampling_params=SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True),
    )


def metric(engine: Service, name: str) -> float:
    """The engine's value of a metric that has one series."""
    with urllib.request.urlopen(f"http://127.0.0.1:{engine.metrics_port}/metrics") as response:
        lines = response.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"{name}{{")).rpartition(" ")[2])


async def members(cluster: Cluster) -> list[tuple[Service, int]]:
    """The engines in order of their ranks, each with the number under which requests may name it."""
    async with make_channel(cluster.admin) as channel:  # type: ignore[attr-defined]
        seen = await admin_rpc.AdminServiceStub(channel).GetCluster(admin_pb.GetClusterRequest())
    by_id = {f"engine-{number}": engine for number, engine in enumerate(cluster.engines)}
    index = {engine.engine_id: engine.index for engine in seen.engines}
    (told,) = seen.groups
    return [(by_id[member.engine_id], index[member.engine_id]) for member in told.group.members]


async def until(condition, *args) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await asyncio.to_thread(condition, *args):
            await asyncio.sleep(0.02)


async def group_is_whole(cluster: Cluster, size: int = 2) -> None:
    """Wait until all ranks are in one group of so many."""
    await until(
        lambda: (
            all(engine.alive and metric(engine, "penstock:group_ranks") == size for engine in cluster.engines)
            and len({metric(engine, "penstock:group_epoch") for engine in cluster.engines}) == 1
            and not any(metric(engine, "penstock:group_suspended") for engine in cluster.engines)
        )
    )


async def test_ranks_under_uneven_load_give_transformers_tokens(group: Cluster, model: tuple[Path, Expected]) -> None:
    for uneven in (lambda i: 0, lambda i: int(i == 0), lambda i: None):
        answers = await asyncio.gather(*(read(generate(group, i, uneven(i))) for i in range(len(PROMPTS))))
        assert [answer.token_ids for answer in answers] == model[1]
    assert sum(metric(engine, "penstock:dummy_steps_total") for engine in group.engines) >= COUNT
    assert metric(group.engines[0], "penstock:group_ranks") == 2


@pytest.mark.parametrize("mode", [control_pb2.PAUSE_MODE_KEEP, control_pb2.PAUSE_MODE_WAIT])
async def test_a_group_pauses_and_goes_on_as_one(group: Cluster, model: tuple[Path, Expected], mode: int) -> None:
    async with make_channel(group.admin) as channel:  # type: ignore[attr-defined]
        admin = admin_rpc.AdminServiceStub(channel)
        running = generate(group, 0, 0)
        assert await running.read()
        await admin.Pause(admin_pb.PauseRequest(mode=mode))
        held = asyncio.ensure_future(read(generate(group, 1, 1)))
        steps = [stats.step_counter for stats in await group.stats()]
        assert [stats.step_counter for stats in await group.stats()] == steps
        assert not held.done()
        await admin.Resume(admin_pb.ResumeRequest())
        assert (await held).token_ids == model[1][1]
        assert (await read(running)).token_ids[-10:] == model[1][0][-10:]


async def test_an_idle_group_starts_without_its_coordinator_which_finds_it_again(
    group: Cluster, model: tuple[Path, Expected]
) -> None:
    epoch = metric(group.engines[0], "penstock:group_epoch")
    await group.coordinator.kill()
    for i in range(2):
        assert (await read(generate(group, i, i))).token_ids == model[1][i]
    await group.coordinator.start()
    await group.coordinator.serving()
    answers = await asyncio.gather(*(read(generate(group, i)) for i in range(len(PROMPTS))))
    assert [answer.token_ids for answer in answers] == model[1]
    await group_is_whole(group)
    assert metric(group.engines[0], "penstock:group_epoch") == epoch


async def survive(group: Cluster, expected: Expected, victim: int, *, on: int | None, after: float = 0.0) -> float:
    """Kill a rank while requests run on ``on`` (None: on all), start it again. Returns how long the other stood still."""
    ranks = await members(group)
    killed, other = ranks[victim][0], ranks[1 - victim][0]
    before = metric(other, "penstock:group_recovery_seconds_sum")
    count = metric(other, "penstock:group_recovery_seconds_count")
    streams = [generate(group, i, ranks[i % 2 if on is None else on][1]) for i in range(4)]
    first = [await stream.read() for stream in streams]
    assert all(isinstance(piece, pb.GenerateResponse) for piece in first)
    await asyncio.sleep(after)
    await killed.kill()
    answers = await asyncio.gather(*map(read, streams))
    for piece, answer, wanted in zip(first, answers, expected, strict=False):
        assert [*piece.token_ids, *answer.token_ids] == wanted
    await until(lambda: metric(other, "penstock:group_recovery_seconds_count") > count)
    stood = metric(other, "penstock:group_recovery_seconds_sum") - before
    await killed.start()
    await killed.serving()
    await group.until_engines_are_seen(2)
    await group_is_whole(group)
    return stood


@pytest.mark.parametrize(
    ("victim", "on"),
    [(0, None), (1, 0)],
    ids=["the first rank, requests on both", "the last rank, requests on the first"],
)
async def test_a_rank_is_killed_in_a_wave_and_every_request_ends_as_it_would_have(
    group: Cluster, model: tuple[Path, Expected], victim: int, on: int | None
) -> None:
    stood = await survive(group, model[1], victim, on=on)
    print(f"the survivor stood still for {stood:.3f} s")


async def test_a_rank_is_killed_while_all_are_idle(group: Cluster, model: tuple[Path, Expected]) -> None:
    await group.until_idle()
    await group.engines[0].kill()
    assert (await read(generate(group, 0))).token_ids == model[1][0]
    await group.engines[0].start()
    await group.engines[0].serving()
    await group.until_engines_are_seen(2)
    await group_is_whole(group)
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
            assert (await read(stub.Generate(request_for(0)))).token_ids == model[1][0]
            stopped = asyncio.Event()

            async def keep_asking(index: int) -> int:
                count = 0
                while not stopped.is_set():
                    answer = await read(stub.Generate(request_for(index)))
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


@pytest.mark.skipif(not KILLS, reason="PENSTOCK_GROUP_KILLS is not set (make group-kills)")
async def test_ranks_are_killed_whenever(group: Cluster, model: tuple[Path, Expected]) -> None:
    chance = random.Random(KILLS)
    stood = []
    for _ in range(KILLS):
        stood.append(
            await survive(
                group, model[1], chance.randrange(2), on=chance.choice([0, 1, None]), after=chance.uniform(0, 0.1)
            )
        )
    stood.sort()
    median, p99 = stood[KILLS // 2], stood[-1 - KILLS // 100]
    print(
        f"{KILLS} kills; survivors stood still for {median:.3f} s (median), {p99:.3f} s (p99), {stood[-1]:.3f} s (most)"
    )

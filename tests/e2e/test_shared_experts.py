"""Processes that share the experts of a model: transformers' tokens while ranks die and come, each with a part of the experts.

Runs with ``PENSTOCK_GROUP_KILLS=N`` (make group-kills), which kills N ranks.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.admin.v1 import service_pb2_grpc as admin_rpc
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock.inference.v1 import messages_pb2 as pb
from penstock_common.rpc.channel import make_channel
from tests.e2e.test_data_parallel import KILLS, Expected, metric
from tests.fakes.models.small_tokenizers import byte_level
from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE
from tests.fakes.processes import Service
from tests.fakes.systems.cluster import Cluster, read

COUNT, STREAMS, EXPERTS, FEWEST = 60, 6, 8, 2
CHANGES = {"num_experts": EXPERTS}
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
    """A small model of many experts, and transformers' greedy tokens for the prompts."""
    from tests.fakes.models.tiny_models import save_tiny_model  # here: torch, of one process that runs tests
    from tests.fakes.models.transformers_greedy import greedy_tokens

    folder = tmp_path_factory.mktemp("experts")
    made = save_tiny_model("qwen3_moe", folder, **CHANGES)
    byte_level().save(str(folder / "tokenizer.json"))
    return folder, [greedy_tokens(made, prompt(i), COUNT) for i in range(STREAMS)]


def prompt(index: int) -> list[int]:
    return [1 + index, *range(2, 2 + 3 * index + 1), 5]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def group(model: tuple[Path, Expected]) -> AsyncIterator[Cluster]:
    """Two ranks, and two engines that wait for the group to grow."""
    flags = {"admin__port": free_port()}
    running = Cluster(model[0], engines=4, lease_seconds=2, frontend_flags=flags, data_parallel__size=2, **SHARED)
    running.admin = f"127.0.0.1:{flags['admin__port']}"  # type: ignore[attr-defined]
    waiting = running.engines[2:]
    del running.engines[2:]
    async with running, waiting[0], waiting[1]:  # nobody sends requests to those
        await asyncio.gather(*(engine.serving() for engine in waiting))
        running.engines += waiting
        yield running


async def ask(cluster: Cluster, index: int, rank: int | None = None) -> list[int]:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt(index)),
        sampling_params=SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True),
    )
    if rank is not None:
        request.routing.data_parallel_rank = rank
    return (await read(cluster.stub.Generate(request))).token_ids


def is_member(engine: Service, size: int) -> bool:
    """Whether it is in a group of this size. One that has left a group knows its size and is suspended."""
    try:
        return metric(engine, "penstock:group_ranks") == size and not metric(engine, "penstock:group_suspended")
    except OSError:
        return False  # it does not listen yet, or any more


def ranks(cluster: Cluster, size: int) -> list[Service]:
    """The engines that are in a group of this size."""
    return [engine for engine in cluster.engines if engine.alive and is_member(engine, size)]


async def group_has(cluster: Cluster, size: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while len(await asyncio.to_thread(ranks, cluster, size)) != size:
            await asyncio.sleep(0.05)


async def scale(cluster: Cluster, size: int) -> None:
    """Waits for the group to have this size; a change that is not over yet is waited for as well."""
    async with make_channel(cluster.admin) as channel, asyncio.timeout(PATIENCE):  # type: ignore[attr-defined]
        admin = admin_rpc.AdminServiceStub(channel)
        while len(await asyncio.to_thread(ranks, cluster, size)) != size:
            groups = (await admin.GetCluster(admin_pb.GetClusterRequest())).groups
            if groups and groups[0].target_size != size:
                await admin.Scale(admin_pb.ScaleRequest(replicas=size))
            await asyncio.sleep(0.1)


class Load:
    """Streams that begin again when they end, until the block does; each answer is checked."""

    def __init__(self, cluster: Cluster, expected: Expected) -> None:
        self._cluster, self._expected = cluster, expected
        self._stopped = False
        self.num_answers = 0

    async def __aenter__(self) -> "Load":
        self._tasks = [asyncio.ensure_future(self._go_on(index)) for index in range(STREAMS)]
        return self

    async def __aexit__(self, *args: object) -> None:
        self._stopped = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), PATIENCE)

    async def _go_on(self, index: int) -> None:
        while not self._stopped:
            assert await ask(self._cluster, index) == self._expected[index]
            self.num_answers += 1

    async def answered(self, count: int) -> None:
        """Wait for so many answers more."""
        wanted = self.num_answers + count
        async with asyncio.timeout(PATIENCE):
            while self.num_answers < wanted:
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.05)


async def test_groups_of_two_to_four_give_transformers_tokens_while_their_size_changes(
    group: Cluster, model: tuple[Path, Expected]
) -> None:
    await group_has(group, 2)
    answers = await asyncio.gather(*(ask(group, i, 0 if i else 1) for i in range(STREAMS)))
    assert answers == model[1]
    async with Load(group, model[1]) as load:
        for size in (4, 3):
            await scale(group, size)
            await load.answered(STREAMS)
    print(f"{load.num_answers} answers while the group went from 2 ranks to 4 and to 3")
    for engine in ranks(group, 3):
        assert 0 < metric(engine, "penstock:expert_balance") <= 1
        assert metric(engine, "penstock:exchange_seconds_count") > 0


async def test_survivors_go_on_with_the_experts_that_a_killed_rank_held(
    group: Cluster, model: tuple[Path, Expected]
) -> None:
    chance = random.Random(KILLS)
    await scale(group, 3)
    async with Load(group, model[1]) as load:
        for _ in range(KILLS):
            victim = chance.choice(await asyncio.to_thread(ranks, group, 3))
            await load.answered(chance.randrange(1, STREAMS))
            await victim.kill()
            await load.answered(STREAMS)
            await victim.start()
            await victim.serving()
            await scale(group, 3)
    print(f"{load.num_answers} answers, {KILLS} kills")

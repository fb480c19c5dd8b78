"""Expert-parallel ranks as processes: log-probabilities are bitwise equal to those of one engine.

They stay equal while experts move between ranks. The dispatch ``reduce_scatter`` is not tested, because it adds results
in a different order (docs/guides/data-parallel.md).
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.admin.v1 import messages_pb2 as admin_pb
from penstock.common.v1 import control_pb2
from tests.e2e.test_group_sizes import EXPERTS, FEWEST, SHARED, STREAMS
from tests.fakes.models.expert_model import save_expert_model
from tests.fakes.systems.rank_group import RankGroup, metric
from tests.fakes.systems.scored import Scored, alone
from tests.fakes.systems.streams import Load, Stream, Streams, asks_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("warm_processes"),
]
COUNT = 60
EXPERTS_OF_A_TOKEN = 4
"""Experts per token. The value is above two, because a sum of two results does not depend on the order."""
PROMPTS = [[1 + i, *((7 * i + 3 * j) % 300 + 1 for j in range(size))] for i, size in enumerate((1, 4, 17, 30, 64, 90))]
FLAGS = SHARED | {"scheduler__max_num_batched_tokens": 48}
"""Flags with a small token budget, so that prompts are computed in chunks, in batches with other requests."""
Model = tuple[Path, list[Scored]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a small model with many experts, and one engine's answers to the prompts.

    The engine's tokens equal transformers' greedy tokens.
    """
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": EXPERTS_OF_A_TOKEN}
    folder, expected = save_expert_model(tmp_path_factory.mktemp("experts"), PROMPTS, COUNT, **experts)
    answers = alone(folder, PROMPTS, COUNT)
    assert [answer.token_ids for answer in answers] == expected
    assert [len(answer.prompt) for answer in answers] == [len(prompt) - 1 for prompt in PROMPTS]
    assert all(len(answer.output) == COUNT for answer in answers)
    return folder, answers


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["allgather", "alltoall"])
async def group(request: pytest.FixtureRequest, model: Model) -> AsyncIterator[RankGroup]:
    """Yield two ranks, and two spare engines that wait for the group to grow."""
    flags = FLAGS | {"expert_parallel__dispatch": request.param}
    async with RankGroup(model[0], size=FEWEST, spares=2, **flags) as running:
        yield running


async def moved(group: RankGroup) -> int:
    """Return the number of experts that have moved between ranks so far."""
    ranks = [engine for engine, _ in await group.members()]
    return sum(int(metric(rank, "penstock:experts_moved_total")) for rank in ranks)


async def uneven(group: RankGroup, model: Model) -> None:
    """Run streams on all ranks, then only on the first rank, then only on the last rank."""
    order = await group.members()
    for some in (order, order[:1], order[-1:]):
        assert await (await Streams(group, PROMPTS, model[1], some, STREAMS).begin()).end() == 0


async def test_bits_are_those_of_one_engine_while_experts_move(group: RankGroup, model: Model) -> None:
    await uneven(group, model)
    for prompt, answer in zip(PROMPTS, model[1], strict=True):  # each prompt uses different experts
        before = await moved(group)
        async with Load(group, [prompt], [answer], STREAMS) as load:
            while await moved(group) == before:
                await load.answered(1)
            await load.answered(STREAMS)
    print(f"{await moved(group)} experts moved")


@pytest.mark.parametrize("mode", [control_pb2.PAUSE_MODE_KEEP, control_pb2.PAUSE_MODE_WAIT])
async def test_bits_stay_when_a_group_pauses_and_resumes(group: RankGroup, model: Model, mode: int) -> None:
    streams = await Streams(group, PROMPTS, model[1], await group.members(), STREAMS).begin()
    await group.admin.Pause(admin_pb.PauseRequest(mode=mode))
    held = [
        Stream(group.stub.Generate(asks_for(answer, prompt)), answer)
        for prompt, answer in zip(PROMPTS, model[1], strict=True)
    ]
    steps = [stats.step_counter for stats in await group.stats()]
    assert [stats.step_counter for stats in await group.stats()] == steps
    await group.admin.Resume(admin_pb.ResumeRequest())
    assert await streams.end() == 0
    assert all(await asyncio.gather(*(stream.is_right() for stream in held)))


async def test_bits_stay_when_a_group_goes_from_two_ranks_to_four_and_to_three(group: RankGroup, model: Model) -> None:
    async with Load(group, PROMPTS, model[1], STREAMS) as load:
        for size in (4, 3, 2):
            await load.answered(len(PROMPTS))
            await group.scale(size)
            await load.answered(STREAMS)
            await uneven(group, model)
    print(f"{load.num_answers} answers while the group changed")

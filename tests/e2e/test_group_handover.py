"""A data-parallel group that shrinks: the KV blocks of the leaving rank's requests move with the requests."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.inference.v1 import messages_pb2 as pb
from tests.fakes.models.expert_model import Expected, save_expert_model
from tests.fakes.processes import Service
from tests.fakes.systems.cluster import read
from tests.fakes.systems.rank_group import RankGroup
from tests.fakes.systems.streams import greedy

BLOCK, LENGTH, COUNT = 16, 40, 300
PROMPTS = [[1 + i, *range(2, LENGTH + 1)] for i in range(4)]

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Expected]:
    """Return a tiny mixture-of-experts model, and transformers' greedy tokens for the prompts."""
    return save_expert_model(tmp_path_factory.mktemp("experts"), PROMPTS, COUNT)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["whole models", "shared experts"])
async def group(request: pytest.FixtureRequest, model: tuple[Path, Expected]) -> AsyncIterator[RankGroup]:
    """Yield a group of two ranks, which may shrink to one rank."""
    shared = {"expert_parallel__enabled": "true", "expert_parallel__slots": 4}
    flags = shared if request.param == "shared experts" else {}
    async with RankGroup(
        model[0],
        size=2,
        data_parallel__min_size=1,
        kv_transfer__transport="grpc",
        kv_transfer__port=0,
        kv_transfer__advertise="127.0.0.1",
        cache__block_size=BLOCK,
        cache__min_load_tokens=1,
        **flags,
    ) as running:
        yield running


def moved(engine: Service, direction: str) -> float:
    """Return the number of KV blocks that an engine has sent (out) or received (in)."""
    with urllib.request.urlopen(f"http://{engine.host}:{engine.metrics_port}/metrics") as response:
        lines = response.read().decode().splitlines()
    name = "penstock:kv_transfer_blocks_total{"
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith(name) and f'direction="{direction}"' in line
    )


async def test_requests_of_a_rank_that_leaves_take_their_blocks_with_them(
    group: RankGroup, model: tuple[Path, Expected]
) -> None:
    (stays, _), (leaves, number) = await group.members()
    streams = [group.stub.Generate(greedy(prompt, COUNT, number)) for prompt in PROMPTS]
    first = [await stream.read() for stream in streams]
    assert all(isinstance(piece, pb.GenerateResponse) for piece in first)
    await group.ask_for(1)
    answers = await asyncio.gather(*map(read, streams))
    assert [[*piece.token_ids, *answer.token_ids] for piece, answer in zip(first, answers, strict=True)] == model[1]
    assert [engine for engine, _ in await group.members()] == [stays]
    given, taken = [await asyncio.to_thread(moved, *rank) for rank in ((leaves, "out"), (stays, "in"))]
    assert given == taken >= len(PROMPTS) * (LENGTH // BLOCK)

"""All services as separate processes, with the demo model: the documented features."""

import asyncio
import random

import grpc
import pytest

from penstock.common.v1 import finish_pb2
from penstock.inference.v1 import messages_pb2 as pb
from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.systems.cluster import Answer, Cluster, read

PROMPTS = [
    "Once upon a time there was a fox",
    "The old bear looked at the river and",
    "Tom and Anna went to the market",
    "One morning the little bird",
    "In a small house near the lake",
    "The king had a secret",
    "It was raining when",
    "A girl named Mia",
]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Return transformers' tokens: 24 greedy tokens for each prompt."""
    import torch  # imported here, because only one of the test processes runs these tests
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    answers = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        answers[prompt] = output[0, ids.shape[1] :].tolist()
    return answers


@pytest.mark.asyncio(loop_scope="module")
async def test_200_streams_over_two_engines_all_finish_with_transformers_tokens(
    cluster: Cluster, expected: dict[str, list[int]]
) -> None:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(200)]
    before = await cluster.stats()
    answers = await asyncio.gather(*(read(cluster.generate(p, temperature=0.0, max_tokens=24)) for p in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected[prompt]
        assert answer.finish_reason in (finish_pb2.FINISH_REASON_STOP, finish_pb2.FINISH_REASON_LENGTH)
        assert answer.usage[0] > 0
        assert answer.usage[2] == len(expected[prompt])
    after = await cluster.stats()
    work = [b.step_counter - a.step_counter for a, b in zip(before, after, strict=True)]
    assert min(work) > 0, f"both engines took part: {work}"


@pytest.mark.asyncio(loop_scope="module")
async def test_100_of_200_cancelled_at_random_leave_nothing_behind(cluster: Cluster) -> None:
    rng = random.Random(7)

    async def one(number: int) -> Answer | None:
        call = cluster.generate(PROMPTS[number % 8], seed=number, max_tokens=150, ignore_eos=True)
        if number % 2:
            return await read(call)
        for _ in range(rng.randrange(4)):
            await call.read()
        call.cancel()
        return None

    answers = await asyncio.gather(*(one(number) for number in range(200)))
    finished = [answer for answer in answers if answer is not None]
    assert len(finished) == 100
    assert {len(answer.token_ids) for answer in finished} == {150}
    await cluster.until_idle()
    for stats in await cluster.stats():
        assert stats.kv_cache_usage == 0.0
    again = await read(cluster.generate(PROMPTS[0], seed=1, max_tokens=150, ignore_eos=True))
    assert len(again.token_ids) == 150


@pytest.mark.asyncio(loop_scope="module")
async def test_seeded_sampling_is_the_same_alone_and_in_a_crowd_on_any_engine(cluster: Cluster) -> None:
    async def sample() -> Answer:
        return await read(cluster.generate(PROMPTS[2], seed=41, temperature=0.9, max_tokens=40))

    alone = await sample()
    crowd = [cluster.generate(PROMPTS[i % 8], seed=i, max_tokens=60) for i in range(30)]
    together = await asyncio.gather(*(sample() for _ in range(8)), *(read(call) for call in crowd))
    assert {tuple(answer.token_ids) for answer in together[:8]} == {tuple(alone.token_ids)}


@pytest.mark.asyncio(loop_scope="module")
async def test_each_of_n_sequences_is_what_the_request_with_its_seed_gives(cluster: Cluster) -> None:
    tokens: dict[int, list[int]] = {index: [] for index in range(4)}
    async for response in cluster.generate(PROMPTS[3], n=4, seed=40, temperature=0.9, max_tokens=24):
        tokens[response.index].extend(response.token_ids)
    alone = [
        await read(cluster.generate(PROMPTS[3], seed=40 + index, temperature=0.9, max_tokens=24)) for index in range(4)
    ]
    assert [answer.token_ids for answer in alone] == list(tokens.values())
    assert len({tuple(sequence) for sequence in tokens.values()}) == 4


@pytest.mark.asyncio(loop_scope="module")
async def test_the_coordinator_killed_and_restarted_under_load_disturbs_no_stream(cluster: Cluster) -> None:
    calls = [cluster.generate(PROMPTS[i % 8], seed=i, max_tokens=300, ignore_eos=True) for i in range(40)]
    firsts = await asyncio.gather(*(call.read() for call in calls))
    assert all(first is not grpc.aio.EOF for first in firsts)
    await cluster.coordinator.kill()
    during = await asyncio.gather(*(read(cluster.generate(p, temperature=0.0, max_tokens=8)) for p in PROMPTS))
    assert all(answer.finish_reason for answer in during), "new requests are served without a coordinator"
    await cluster.coordinator.start()
    await cluster.coordinator.serving()
    for call, first in zip(calls, firsts, strict=True):
        assert len(first.token_ids) + len((await read(call)).token_ids) == 300
    await cluster.until_engines_are_seen(2)
    assert (await read(cluster.generate(PROMPTS[0], max_tokens=4))).finish_reason


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_engines_requests_go_on_on_the_other_one(cluster: Cluster) -> None:
    def sample(number: int) -> "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]":
        return cluster.generate(PROMPTS[number % 8], seed=number, max_tokens=400, ignore_eos=True)

    expected = await asyncio.gather(*(read(sample(number)) for number in range(20)))
    calls = [sample(number) for number in range(20)]
    firsts = await asyncio.gather(*(call.read() for call in calls))
    await cluster.engines[1].kill()
    for call, first, whole in zip(calls, firsts, expected, strict=True):
        rest = await read(call)
        assert [*first.token_ids, *rest.token_ids] == whole.token_ids
        assert first.text + rest.text == whole.text
    [lost] = [line for line in cluster.frontend.log().splitlines() if "engine lost" in line]
    assert "moved=" in lost
    assert "requests=" in lost
    await cluster.engines[1].start()
    await cluster.engines[1].serving()
    await cluster.until_engines_are_seen(2)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stopping_engine_finishes_its_streams(cluster: Cluster) -> None:
    calls = [cluster.generate(PROMPTS[i % 8], seed=i, max_tokens=120, ignore_eos=True) for i in range(12)]
    firsts = await asyncio.gather(*(call.read() for call in calls))
    stopping = asyncio.create_task(cluster.engines[0].stop())
    rest = await asyncio.gather(*(read(call) for call in calls))
    for first, answer in zip(firsts, rest, strict=True):
        assert len(first.token_ids) + len(answer.token_ids) == 120
    assert await stopping == 0
    await cluster.engines[0].start()
    await cluster.engines[0].serving()
    await cluster.until_engines_are_seen(2)

"""Features of the complete engine, through the real session, over a real model with random weights."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.common.v1 import finish_pb2
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock_common.block_hash import DIGEST_SIZE
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, ModelConfig, SchedulerConfig
from penstock_enginecore.executor.uniproc import UniprocExecutor
from tests.fakes.clients.session_client import SessionClient, connected
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model

PROMPT = [5, 17, 250, 99, 3, 42, 8, 9, 10, 11, 12, 13]
Servers = Callable[..., EngineServer]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("llama")
    return directory, save_tiny_model("llama", directory)


@pytest.fixture
def servers(saved: tuple[Path, torch.nn.Module]) -> Iterator[Servers]:
    """Engine servers over the model; arguments are configuration sections."""
    made = []

    def make(*, cache: dict[str, Any] | None = None, scheduler: dict[str, Any] | None = None) -> EngineServer:
        config = EngineCoreConfig(
            model=ModelConfig(path=str(saved[0]), device="cpu"),
            cache=CacheConfig(**{"block_size": 4, "num_blocks": 256, **(cache or {})}),
            scheduler=SchedulerConfig(**(scheduler or {})),
            executor=ExecutorConfig(num_threads=1),
        )
        made.append(EngineServer(config, UniprocExecutor(config)).start().load())
        return made[-1]

    yield make
    for server in made:
        server.stop()


async def run(client: SessionClient, request_id: str = "r", *, prompt: list[int] = PROMPT, **params: Any) -> list[int]:
    wire = SamplingParams(**{"seed": 7, "max_tokens": 12, **params})
    await client.add(request_id, prompt=prompt, sampling_params=wire)
    await client.until_ended(request_id)
    assert not client.ends[request_id].HasField("error"), client.ends[request_id].error
    return client.tokens[request_id]


def log_softmax(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    """Return log-probabilities ``[tokens, vocab]``. Row i scores the token after position i."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].log_softmax(dim=-1)


def positions(client: SessionClient, request_id: str, field: str) -> list[list[tuple[int, float, int]]]:
    """Return entries (token, logprob, rank) by position, over all outputs of a request."""
    found = []
    for output in client.outputs[request_id]:
        if not output.HasField(field):
            continue
        logprobs = getattr(output, field)
        for start, end in zip(logprobs.offsets, logprobs.offsets[1:], strict=False):
            entries = zip(
                logprobs.token_ids[start:end], logprobs.logprobs[start:end], logprobs.ranks[start:end], strict=True
            )
            found.append(list(entries))
    return found


def assert_scored(entries: list[tuple[int, float, int]], expected: torch.Tensor, token: int, count: int) -> None:
    """Check that the entries are the chosen token, then the ``count`` likeliest tokens.

    Each entry has the token's log-probability and rank.
    """
    assert entries[0][0] == token
    assert len(entries) == 1 + count
    likeliest = expected.topk(count).indices.tolist() if count else []
    assert [entry[0] for entry in entries[1:]] == likeliest
    for token_id, logprob, rank in entries:
        assert logprob == pytest.approx(float(expected[token_id]), abs=1e-4)
        assert rank == 1 + int((expected > expected[token_id]).sum())


@pytest.mark.parametrize(
    "scheduler",
    [{}, {"max_num_batched_tokens": 5}, {"async_scheduling": True, "max_num_batched_tokens": 5}],
    ids=["whole", "chunked", "chunked and asynchronous"],
)
async def test_logprobs_of_prompt_and_output_equal_transformers(
    servers: Servers, saved: tuple[Path, torch.nn.Module], scheduler: dict[str, Any]
) -> None:
    async with connected(servers(scheduler=scheduler).address) as client:
        await run(client, "warms the prefix cache")
        tokens = await run(client, logprobs=3, prompt_logprobs=2, temperature=1.5, repetition_penalty=1.3)
        expected = log_softmax(saved[1], PROMPT + tokens)
        output, prompt = positions(client, "r", "new_logprobs"), positions(client, "r", "new_prompt_logprobs")
    assert len(output) == len(tokens)
    for i, token in enumerate(tokens):
        assert_scored(output[i], expected[len(PROMPT) - 1 + i], token, 3)
    assert len(prompt) == len(PROMPT) - 1, "the first prompt token has no score"
    for i, token in enumerate(PROMPT[1:]):
        assert_scored(prompt[i], expected[i], token, 2)


async def test_a_preempted_request_scores_its_prompt_once(servers: Servers) -> None:
    server = servers(cache={"num_blocks": 14, "enable_prefix_caching": False})
    async with connected(server.address) as client:
        for i in range(3):
            params = SamplingParams(temperature=0.0, max_tokens=20, prompt_logprobs=0)
            await client.add(f"r{i}", prompt=PROMPT[i:], sampling_params=params)
        await client.until_ended("r0", "r1", "r2")
        assert server.engine.scheduler.stats().num_preemptions > 0
        for i in range(3):
            scored = [entries[0][0] for entries in positions(client, f"r{i}", "new_prompt_logprobs")]
            assert scored == PROMPT[i + 1 :]


async def test_rules_shape_the_output(servers: Servers) -> None:
    async with connected(servers().address) as client:
        plain = await run(client, "plain", temperature=1.0)
        assert set(await run(client, "allowed", allowed_token_ids=[4, 6, 9])) <= {4, 6, 9}
        assert set(await run(client, "bias", logit_bias={33: 100.0})) == {33}
        banned = [{"token_ids": [token]} for token in set(plain)]
        assert not set(await run(client, "words", bad_word_token_ids=banned)) & set(plain)
        biased = {"temperature": 0.0, "logit_bias": {33: 100.0, 44: 60.0}}
        assert set(await run(client, "without penalty", **biased)) == {33}
        assert {33, 44} <= set(await run(client, "penalty", **biased, repetition_penalty=4.0))
        minimal = await run(client, "min", stop_token_ids=list(range(VOCAB_SIZE // 2)), min_tokens=8)
        assert len(minimal) >= 8


async def test_an_output_that_repeats_itself_ends(servers: Servers) -> None:
    async with connected(servers().address) as client:
        tokens = await run(
            client,
            max_tokens=50,
            logit_bias={33: 100.0},
            repetition_detection={"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 5},
        )
        assert tokens == [33] * 5
        assert client.ends["r"].finish_reason == finish_pb2.FINISH_REASON_REPETITION


async def test_asynchronous_scheduling_gives_the_same_tokens(servers: Servers) -> None:
    async def tokens_with(**scheduler: Any) -> dict[str, list[int]]:
        async with connected(servers(scheduler=scheduler).address) as client:
            for i in range(12):
                params = SamplingParams(seed=i, max_tokens=6 + 3 * i, temperature=0.0 if i % 3 == 0 else 1.0, top_p=0.9)
                await client.add(f"r{i}", prompt=PROMPT[i % 7 :], sampling_params=params)
            await client.until_ended(*(f"r{i}" for i in range(12)))
            return dict(client.tokens)

    assert await tokens_with(async_scheduling=True, max_num_batched_tokens=40) == await tokens_with()


async def test_cache_events_tell_what_can_be_found(servers: Servers) -> None:
    async with connected(servers(cache={"enable_kv_events": True}).address) as client:
        await run(client, "first", max_tokens=6)
        await client.until(lambda: client.kv_events)
        stored = [event.block_stored for event in client.kv_events]
        token_ids = [token for event in stored for token in event.token_ids]
        whole = PROMPT + client.tokens["first"]
        assert token_ids == whole[: len(token_ids)]
        assert len(token_ids) == (len(whole) - 1) // 4 * 4, "every full block that was computed"
        hashes = [block_hash for event in stored for block_hash in event.block_hashes]
        assert stored[0].parent_block_hash == b""
        assert len(set(hashes)) == len(token_ids) // 4
        seen = len(client.kv_events)
        await run(client, "again", max_tokens=6)
        assert len(client.kv_events) == seen, "nothing new was stored"
        assert await client.utility("reset_prefix_cache") is True
        await client.until(lambda: len(client.kv_events) > seen)
        assert client.kv_events[-1].HasField("all_blocks_cleared")


async def test_frontends_that_follow_the_cache_are_told_hashes_with_no_setting(servers: Servers) -> None:
    address = servers().address
    async with connected(address) as other, connected(address, follows_cache=True) as client:
        await run(other, "before", max_tokens=6)
        before = await client.utility("cached_blocks")
        assert len(before) == (len(PROMPT) + 5) // 4 * DIGEST_SIZE
        await run(other, "first", prompt=PROMPT[::-1], max_tokens=6)
        await client.until(lambda: client.kv_events)
        stored = [event.block_stored for event in client.kv_events]
        assert not any(event.token_ids for event in stored)
        hashes = [block_hash for event in stored for block_hash in event.block_hashes]
        after = await client.utility("cached_blocks")
        assert set(digests(after)) == set(hashes) | set(digests(before))
        assert other.kv_events == []


async def test_an_engine_without_a_prefix_cache_has_nothing_to_tell(servers: Servers) -> None:
    async with connected(servers(cache={"enable_prefix_caching": False}).address, follows_cache=True) as client:
        await run(client, max_tokens=6)
        ready = (await client.info()).ready
        assert not {"followed_cache", "kv_events"} & set(ready.capabilities)
        assert await client.utility("cached_blocks") == b""
        assert client.kv_events == []


def digests(answer: bytes) -> list[bytes]:
    return [answer[start : start + DIGEST_SIZE] for start in range(0, len(answer), DIGEST_SIZE)]


async def test_an_urgent_request_overtakes_those_that_wait(servers: Servers) -> None:
    server = servers(scheduler={"policy": "priority", "max_num_seqs": 1})
    async with connected(server.address) as client:
        for name, priority in (("running", 5), ("patient", 5), ("urgent", -1)):
            await client.add(
                name, prompt=PROMPT, priority=priority, sampling_params=SamplingParams(temperature=0.0, max_tokens=40)
            )
        await client.until_ended("running", "patient", "urgent")
    ends = list(client.ends)
    assert ends.index("urgent") < ends.index("patient")

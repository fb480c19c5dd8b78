"""Prompt embeddings in place of prompt tokens, over the real session, with a real model."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.common.v1 import tensor_pb2
from penstock.common.v1.sampling_pb2 import SamplingParams
from penstock_common.errors import Unimplemented
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams as Sampling
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, ModelConfig, SchedulerConfig
from penstock_enginecore.executor.uniproc import UniprocExecutor
from tests.fakes.clients.session_client import SessionClient, connected
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.engines.in_process import build_engine
from tests.fakes.models.tiny_models import save_tiny_model

PROMPT = [5, 17, 250, 99, 3, 42, 8, 9, 10, 11, 12, 13]
HIDDEN = 48


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp(request.param)
    return directory, save_tiny_model(request.param, directory)


@pytest.fixture
async def client(saved: tuple[Path, torch.nn.Module]) -> AsyncIterator[SessionClient]:
    config = EngineCoreConfig(
        model=ModelConfig(path=str(saved[0]), device="cpu"),
        cache=CacheConfig(block_size=4, num_blocks=256),
        scheduler=SchedulerConfig(max_num_batched_tokens=9),
        executor=ExecutorConfig(num_threads=1),
    )
    server = EngineServer(config, UniprocExecutor(config)).start().load()
    async with connected(server.address) as session:
        yield session
    server.stop()


def tensor(rows: torch.Tensor, dtype: int = tensor_pb2.DATA_TYPE_FLOAT32) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(
        dtype=dtype, shape=rows.shape, inline=rows.contiguous().view(torch.uint8).numpy().tobytes()
    )


def embedded(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model.get_input_embeddings()(torch.tensor(token_ids))


def expected(model: torch.nn.Module, rows: torch.Tensor, count: int = 8) -> list[int]:
    """Return greedy tokens after a prompt of embeddings. Each token is computed from the complete sequence."""
    tokens: list[int] = []
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(inputs_embeds=rows[None]).logits[0, -1].argmax()))
            rows = torch.cat([rows, embedded(model, tokens[-1:])])
    return tokens


async def run(client: SessionClient, request_id: str, **fields: Any) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=8, **fields.pop("params", {}))
    await client.add(request_id, **{"prompt": (), "sampling_params": params, **fields})
    await client.until_ended(request_id)
    assert not client.ends[request_id].HasField("error"), client.ends[request_id].error
    return client.tokens[request_id]


async def failure(client: SessionClient, request_id: str, **fields: Any) -> tuple[str, str]:
    params = SamplingParams(temperature=0.0, max_tokens=8, **fields.pop("params", {}))
    await client.add(request_id, **{"prompt": (), "sampling_params": params, **fields})
    await client.until_ended(request_id)
    error = client.ends[request_id].error
    return error.field, error.message


async def test_vectors_give_what_the_model_gives_for_them(
    client: SessionClient, saved: tuple[Path, torch.nn.Module]
) -> None:
    rows = torch.randn(14, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert await run(client, "r", prompt_embeds=tensor(rows)) == expected(saved[1], rows)
    assert await run(client, "cached", prompt_embeds=tensor(rows)) == expected(saved[1], rows)
    assert client.outputs["cached"][0].prefill_stats.num_cached_tokens >= 12


async def test_the_vectors_of_tokens_give_the_tokens_output(
    client: SessionClient, saved: tuple[Path, torch.nn.Module]
) -> None:
    as_tokens = await run(client, "tokens", prompt=PROMPT)
    assert await run(client, "vectors", prompt_embeds=tensor(embedded(saved[1], PROMPT))) == as_tokens


async def test_a_mixed_prompt_takes_tokens_where_it_says_so(
    client: SessionClient, saved: tuple[Path, torch.nn.Module]
) -> None:
    is_token = [i % 3 != 0 for i in range(len(PROMPT))]
    random_rows = torch.randn(len(PROMPT), HIDDEN, generator=torch.Generator().manual_seed(2))
    mixed = torch.where(torch.tensor(is_token)[:, None], embedded(saved[1], PROMPT), random_rows)
    got = await run(
        client,
        "r",
        prompt=PROMPT,
        prompt_embeds=tensor(random_rows),
        prompt_is_token_ids=is_token,
        params={"repetition_penalty": 1.0},
    )
    assert got == expected(saved[1], mixed)


async def test_different_vectors_never_share_cached_blocks(
    client: SessionClient, saved: tuple[Path, torch.nn.Module]
) -> None:
    one, other = (torch.randn(13, HIDDEN, generator=torch.Generator().manual_seed(seed)) for seed in (3, 4))
    await run(client, "one", prompt_embeds=tensor(one))
    assert await run(client, "other", prompt_embeds=tensor(other)) == expected(saved[1], other)
    assert client.outputs["other"][0].prefill_stats.num_cached_tokens == 0
    assert await run(client, "zeros", prompt=[0] * 13)
    assert client.outputs["zeros"][0].prefill_stats.num_cached_tokens == 0


async def test_half_precision_is_taken(client: SessionClient, saved: tuple[Path, torch.nn.Module]) -> None:
    rows = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(5)).bfloat16()
    got = await run(client, "r", prompt_embeds=tensor(rows, tensor_pb2.DATA_TYPE_BFLOAT16))
    assert got == expected(saved[1], rows.float())


async def test_what_does_not_fit_is_named(client: SessionClient) -> None:
    rows = torch.zeros(3, HIDDEN)
    wide = await failure(client, "wide", prompt_embeds=tensor(torch.zeros(3, HIDDEN + 1)))
    assert wide == ("prompt_embeds", "prompt_embeds has embeddings of length 49; the model's embeddings have length 48")
    assert (await failure(client, "flat", prompt_embeds=tensor(torch.zeros(3))))[0] == "prompt_embeds.shape"
    cut = tensor(rows)
    cut.inline = cut.inline[:-1]
    assert (await failure(client, "cut", prompt_embeds=cut))[0] == "prompt_embeds.inline"
    assert (await failure(client, "count", prompt=[1, 2], prompt_embeds=tensor(rows)))[0] == "prompt_embeds"
    mask = await failure(client, "mask", prompt_embeds=tensor(rows), prompt_is_token_ids=[True])
    assert mask[0] == "prompt_is_token_ids"
    nan = rows.clone()
    nan[1, 2] = torch.nan
    assert "infinite or NaN" in (await failure(client, "nan", prompt_embeds=tensor(nan)))[1]
    integers = tensor(rows, tensor_pb2.DATA_TYPE_INT32)
    assert (await failure(client, "integers", prompt_embeds=integers))[0] == "prompt_embeds.dtype"
    scored = await failure(client, "scored", prompt_embeds=tensor(rows), params={"prompt_logprobs": 1})
    assert scored[0] == "sampling_params.prompt_logprobs"


def test_models_whose_layers_read_token_ids_refuse_vectors(tmp_path: Path) -> None:
    save_tiny_model("gemma4_shared", tmp_path)
    engine = build_engine(tmp_path)
    embeds = PromptEmbeds(dtype="float32", num_tokens=2, hidden_size=HIDDEN, data=bytes(2 * HIDDEN * 4))
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=[0, 0], prompt_embeds=embeds, sampling_params=Sampling(temperature=0.0)
    )
    with pytest.raises(Unimplemented, match="the layers of the served model also read the token ids of the prompt"):
        engine.preprocess("client", request)
    engine.shutdown()

"""Any signed 64-bit integer is a valid seed on every API, with a real engine.

Sequence i equals a run with seed + i.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from penstock_common.errors import InvalidArgument
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, ModelConfig
from penstock_enginecore.executor.uniproc import UniprocExecutor
from penstock_local import LLM
from tests.fakes.clients.vllm_client import VllmClient, completes
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
PROMPT = [10, 11, 12]
COUNT = 12
SEEDS = [-1, -(2**63), 2**63 - 1]
Sequences = list[list[int]]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api() -> AsyncIterator[OpenAIServer]:
    config = EngineCoreConfig(
        model=ModelConfig(path=str(DEMO), served_model_name="model", device="cpu"),
        cache=CacheConfig(num_blocks=256),
        executor=ExecutorConfig(num_threads=1),
    )
    engine = EngineServer(config, UniprocExecutor(config)).start().load()
    async with openai_server(DEMO, engines=[engine.address]) as server:
        yield server
    engine.stop()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(DEMO), device="cpu", num_threads=1, kv_cache_memory="32MiB") as llm:
        yield llm


async def over_grpc(api: OpenAIServer, seed: int, n: int) -> Sequences:
    outputs = await api.server.outputs(
        token_ids={"ids": PROMPT}, seed=seed, n=n, max_tokens=COUNT, ignore_eos=True, temperature=1.0
    )
    return [[i for o in outputs if o.index == index for i in o.token_ids] for index in range(n)]


async def over_http(api: OpenAIServer, seed: int, n: int) -> Sequences:
    extra = {"return_token_ids": True, "ignore_eos": True}
    answer: Any = await api.client.completions.create(
        model="model", prompt=PROMPT, seed=seed, n=n, max_tokens=COUNT, temperature=1.0, extra_body=extra
    )
    return [choice.token_ids for choice in answer.choices]


async def over_vllms_protocol(api: OpenAIServer, seed: int, n: int) -> Sequences:
    outputs = await VllmClient(api.server).outputs(
        tokenized={"original_text": "unused", "input_ids": PROMPT},
        seed=seed,
        n=n,
        max_tokens=COUNT,
        ignore_eos=True,
        temperature=1.0,
    )
    return [list(complete.output_ids) for complete in completes(outputs)]


def wrapped(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


@pytest.mark.parametrize("seed", SEEDS)
async def test_sequences_of_a_call_are_those_of_the_next_seeds_alone(api: OpenAIServer, seed: int) -> None:
    both = await over_grpc(api, seed, 2)
    alone = [(await over_grpc(api, wrapped(seed + index), 1))[0] for index in range(2)]
    assert both == alone
    assert both[0] != both[1]


@pytest.mark.parametrize(
    ("door", "seed"),
    [*((over_http, seed) for seed in SEEDS), (over_vllms_protocol, -1), (over_vllms_protocol, -(2**31))],
)
async def test_every_door_means_the_same_seed(
    api: OpenAIServer, door: Callable[[OpenAIServer, int, int], Awaitable[Sequences]], seed: int
) -> None:
    assert await door(api, seed, 2) == await over_grpc(api, seed, 2)


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_program_gets_what_a_server_gives(api: OpenAIServer, llm: LLM, seed: int) -> None:
    params = {"seed": seed, "n": 2, "max_tokens": COUNT, "ignore_eos": True, "temperature": 1.0}
    (output,) = llm.generate([PROMPT], params)
    assert [each.token_ids for each in output.outputs] == await over_grpc(api, seed, 2)


async def test_a_seed_that_64_bits_do_not_hold_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidArgument, match=f"seed is {2**63}; it must be from {-(2**63)} to {2**63 - 1}"):
        llm.generate([PROMPT], {"seed": 2**63})

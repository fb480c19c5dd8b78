"""A model over several workers: transformers' tokens, and errors that name the setting to change."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.errors import ConfigError
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import ExecutorConfig
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.worker_stats import WorkerStats
from tests.fakes.engines.in_process import build_engine, generate
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.fakes.models.transformers_greedy import greedy_tokens
from tests.fakes.patience import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_processes")]

NEW_TOKENS = 12
PROMPT_LENGTHS = (1, 3, 7, 16, 34)
SIZE = 2
SECTIONS: dict[str, Any] = {
    # Chunked prompts, preempted requests, and two steps in flight.
    "scheduler": {"max_num_batched_tokens": 7, "async_scheduling": True},
    "cache": {"num_blocks": 26},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("qwen3")
    return path, save_tiny_model("qwen3", path)


@pytest.fixture(scope="module")
def engine(saved: tuple[Path, Any]) -> Iterator[EngineCore]:
    engine = build_engine(saved[0], executor={"tensor_parallel_size": SIZE}, **SECTIONS)
    yield engine
    engine.shutdown()


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def expected(model: Any) -> list[list[int]]:
    return [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts()]


def greedy(engine: EngineCore, prefix: str) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    run = generate(engine, [(f"{prefix}{i}", prompt, params) for i, prompt in enumerate(prompts())])
    return list(run.tokens.values())


def test_greedy_tokens_are_those_of_transformers_also_with_prefix_hits(
    saved: tuple[Path, Any], engine: EngineCore
) -> None:
    tokens = expected(saved[1])
    assert greedy(engine, "first") == tokens
    assert greedy(engine, "second") == tokens


def test_sampled_tokens_and_log_probabilities_are_those_of_one_process(
    saved: tuple[Path, Any], engine: EngineCore
) -> None:
    params = [
        SamplingParams(temperature=0.8, seed=3, max_tokens=NEW_TOKENS, top_p=0.9),
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=0.9, seed=4, max_tokens=NEW_TOKENS, repetition_penalty=1.2, logit_bias={5: 2.0}),
    ]
    requests = [(f"s{i}", prompt, each) for i, (prompt, each) in enumerate(zip(prompts()[2:], params, strict=True))]
    one = build_engine(saved[0], **SECTIONS)
    assert generate(engine, requests).tokens == generate(one, requests).tokens
    one.shutdown()


def test_each_worker_has_its_part(engine: EngineCore) -> None:
    infos = engine.executor.collective_rpc("worker_info")
    assert [info["rank"] for info in infos] == list(range(SIZE))
    assert infos[0]["weight_bytes"] == infos[1]["weight_bytes"]
    assert infos[0]["kv_cache_bytes"] == infos[1]["kv_cache_bytes"]


def test_workers_tell_how_long_steps_and_exchanges_take(engine: EngineCore) -> None:
    greedy(engine, "told")
    deadline = time.monotonic() + PATIENCE
    while not all(told(stats) for stats in engine.executor.worker_stats()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [(stats.rank, stats.up, stats.device) for stats in engine.executor.worker_stats()] == [
        (rank, True, "cpu") for rank in range(SIZE)
    ]


def told(stats: WorkerStats) -> bool:
    times = {"step": stats.step_broadcast, **stats.collectives}
    return set(times) == {"step", "all_reduce", "all_gather"} and all(
        found is not None and found.sum > 0 for found in times.values()
    )


def test_sleeping_workers_load_their_part_again(saved: tuple[Path, Any], engine: EngineCore) -> None:
    for level in (1, 2):
        engine.executor.collective_rpc("sleep", [level])
        engine.executor.collective_rpc("wake_up", [["weights", "kv_cache"]])
        assert engine.scheduler.reset_prefix_cache()
        assert greedy(engine, f"woken{level}-") == expected(saved[1])


def test_several_workers_need_processes() -> None:
    with pytest.raises(ConfigError, match="executor.tensor_parallel_size is 2, but executor.kind is 'uniproc'"):
        ExecutorConfig(kind="uniproc", tensor_parallel_size=2)

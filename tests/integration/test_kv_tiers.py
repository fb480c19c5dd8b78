"""Engines that offload KV blocks and load them again give the tokens of an engine whose cache holds all blocks."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from penstock_common.types.kv_transfer import KvMedium
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.kv_transfer.core.base import Copy
from penstock_enginecore.kv_transfer.core.tiers import TieredConnector
from tests.fakes.engines.in_process import Run, build_engine, generate
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.fakes.patience import PATIENCE

BLOCK_SIZE = 4
FAMILIES = ("llama", "gemma2", "deepseek_v3")
"""Model types with full attention, also with sliding windows, and with latents instead of keys and values."""
LARGE = 600
PLENTY = 16 << 20
"""Host memory in bytes. Blocks have a few kilobytes, so all of them fit."""


class Model(NamedTuple):
    path: Path
    prompts: list[list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp(request.param)
    save_tiny_model(request.param, path)
    generator = torch.Generator().manual_seed(4)
    return Model(path, [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (70, 50, 61, 45)])


def engine_of(model: Model, num_blocks: int, host_memory: int = 0, **sections: Any) -> EngineCore:
    cache = {"block_size": BLOCK_SIZE, "num_blocks": num_blocks, "host_memory": host_memory, "min_load_tokens": 8}
    cache |= sections.pop("cache", {})
    made = build_engine(model.path, model={"max_model_len": 150}, cache=cache, scheduler={"watermark": 0.0}, **sections)
    wait_for_host_memory(made)
    return made


def wait_for_host_memory(engine: EngineCore) -> None:
    """Wait until host memory is allocated. Until then, the engine saves nothing."""
    if isinstance(engine.connector, TieredConnector):
        for tiers in (engine.connector.blocks, engine.connector.states):
            if tiers is not None and tiers.host is not None:
                wait([tiers.host._reserved])


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=3)


def seeded(num_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=num_tokens, ignore_eos=True, logprobs=3)


def bits(run: Run, request_id: str) -> tuple[list[int], list[float]]:
    """Return the token ids and log-probabilities of a request, for exact comparison."""
    return run.logprobs[request_id].token_ids, run.logprobs[request_id].logprobs


def copy_at_once(engine: EngineCore, patch: pytest.MonkeyPatch) -> None:
    """Finish each copy of blocks or states to the host before the next step, so that batches do not depend on the
    duration of copies.
    """
    assert isinstance(engine.connector, TieredConnector)
    wait_for_host_memory(engine)
    for tiers in (engine.connector.blocks, engine.connector.states):
        if tiers is not None:
            patch.setattr(tiers.copier, "save", partial(_done_at_once, tiers.copier.save))


def _done_at_once(copy: Callable[[Sequence[Copy]], Future[Any]], copies: Sequence[Copy]) -> Future[Any]:
    wait([future := copy(copies)])
    return future


def loads(engine: EngineCore) -> int:
    """Return the number of tokens loaded for all requests."""
    return engine.scheduler.kv_cache.external_stats.hits


def smallest(engine: EngineCore) -> int:
    """Return the number of blocks for the longest request, plus six."""
    return engine.scheduler.kv_cache.num_blocks_for(150) + 6


def assert_all_free(engine: EngineCore) -> None:
    """Wait for pending copies and disk writes, then check that all blocks are free."""
    deadline = time.monotonic() + PATIENCE
    pool = engine.scheduler.kv_cache.pool
    connector = engine.connector
    while (
        engine.has_work
        or pool.num_free_blocks < pool.num_usable_blocks
        or (isinstance(connector, TieredConnector) and connector.disk_busy)
    ):
        engine.step(lambda: None)
        assert time.monotonic() < deadline, "blocks are not given back"
        time.sleep(0.001)


def conversation(engine: EngineCore, model: Model) -> list[Any]:
    """Run two turns of four clients. All requests run one after the other."""
    said = []
    histories = [list(prompt) for prompt in model.prompts]
    for turn in range(2):
        for number, history in enumerate(histories):
            name = f"{turn}-{number}"
            params = greedy(12) if number % 2 == 0 else seeded(12, seed=number)
            run = generate(engine, [(name, list(history), params)])
            said.append((run.tokens[name], bits(run, name)))
            assert_all_free(engine)
            history += [*run.tokens[name], *model.prompts[number][: 5 + number]]
    return said


def test_second_turns_come_back_from_the_host_bit_for_bit(model: Model) -> None:
    large = engine_of(model, LARGE)
    expected = conversation(large, model)
    num_blocks = smallest(large)
    large.shutdown()
    small = engine_of(model, num_blocks, PLENTY)
    assert conversation(small, model) == expected
    assert loads(small) > 4 * 40
    assert_all_free(small)
    small.shutdown()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_preempted_requests_come_back_from_the_host(
    model: Model, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        (f"r{i}", prompt, greedy(40) if i % 2 == 0 else seeded(40, seed=i)) for i, prompt in enumerate(model.prompts)
    ]
    large = engine_of(model, LARGE)
    expected = generate(large, requests).tokens
    groups = len(large.kv_cache_config.groups)
    num_blocks = large.scheduler.kv_cache.num_blocks_for(150) + (46 if groups == 1 else 10)
    large.shutdown()
    scheduler = {"watermark": 0.0, "async_scheduling": async_scheduling}
    small = build_engine(
        model.path,
        model={"max_model_len": 150},
        cache={"block_size": BLOCK_SIZE, "num_blocks": num_blocks, "host_memory": PLENTY, "min_load_tokens": 8},
        scheduler=scheduler,
    )
    copy_at_once(small, monkeypatch)
    run = generate(small, requests)
    assert run.stats.num_preemptions > 0
    assert run.tokens == expected
    assert_all_free(small)
    small.shutdown()


def test_hits_after_a_restart_come_from_the_disk(model: Model, tmp_path: Path) -> None:
    """Gives the second engine host memory for about one block, so that hits must come from the disk."""
    disk = {"disk": str(tmp_path), "disk_size": 32 << 20}
    prompt = model.prompts[0]
    first = engine_of(model, LARGE, PLENTY, cache=disk)
    expected = generate(first, [("a", prompt, greedy(12))])
    again = generate(first, [("b", prompt, greedy(12))])
    first.shutdown()
    second = engine_of(model, LARGE, 1 << 20, cache=disk)
    run = generate(second, [("c", prompt, greedy(12))])
    assert loads(second) >= len(prompt) // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE
    assert run.tokens["c"] == expected.tokens["a"]
    assert bits(run, "c") == bits(again, "b")
    second.shutdown()


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_workers_in_processes_keep_their_parts(model: Model, size: int, tmp_path: Path) -> None:
    """Uses little host memory, so that most reused blocks come from the disk."""
    executor = {"kind": "multiproc", "tensor_parallel_size": size}
    large = engine_of(model, LARGE, executor=executor)
    expected = conversation(large, model)
    num_blocks = smallest(large)
    large.shutdown()
    disk = {"disk": str(tmp_path), "disk_size": 32 << 20}
    small = engine_of(model, num_blocks, 60_000, cache=disk, executor=executor)
    assert [tokens for tokens, _ in conversation(small, model)] == [tokens for tokens, _ in expected]
    media = small.connector.stats().num_loaded_blocks
    assert media[KvMedium.HOST] + media[KvMedium.DISK] > 4 * 10
    assert media[KvMedium.DISK] > 0
    small.shutdown()


def test_nothing_comes_back_behind_a_reset(model: Model) -> None:
    engine = engine_of(model, LARGE, PLENTY)
    prompt = model.prompts[0]
    first = generate(engine, [("a", prompt, greedy(4))])
    assert engine.scheduler.reset_prefix_cache()
    second = generate(engine, [("b", prompt, greedy(4))])
    assert loads(engine) == 0
    assert first.tokens["a"] == second.tokens["b"]
    engine.shutdown()

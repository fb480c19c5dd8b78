"""The model runner and its executor around a tiny checkpoint, driven by hand-written scheduler outputs."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.attention import factory
from penstock_enginecore.attention.base import AttentionBackend
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, KernelsConfig, ModelConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup
from penstock_enginecore.core.scheduler.output import (
    CachedRequestData,
    GrammarBitmask,
    NewRequestData,
    SchedulerOutput,
)
from penstock_enginecore.executor.generation.graph_capture import fastest_pass
from penstock_enginecore.executor.generation.runner import GenerationRunner
from penstock_enginecore.executor.uniproc import UniprocExecutor
from penstock_enginecore.executor.worker import Worker
from penstock_enginecore.forward.build import ForwardConfig, build_forward
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.sample.base import LaunchedTokens, PlainDraws
from penstock_enginecore.sample.rules import LogitRules
from penstock_enginecore.sample.sampler import pack_logprobs
from penstock_enginecore.worker.device_thread import Late
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.fakes.patience import PATIENCE

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gemma3")
    save_tiny_model("gemma3", directory)
    return directory


def make_executor(path: Path, num_groups: int = 1) -> UniprocExecutor:
    config = EngineCoreConfig(
        model=ModelConfig(path=str(path), device="cpu"),
        cache=CacheConfig(block_size=4, kv_cache_memory=12345),
        executor=ExecutorConfig(num_threads=1),
    )
    executor = UniprocExecutor(config)
    executor.load_model(lambda line: None)
    names = tuple(executor.kv_cache_specs())
    groups = (names,) if num_groups == 1 else tuple((name,) for name in names)
    executor.initialize_kv_cache(
        KVCacheConfig(
            num_blocks=40,
            block_size=4,
            groups=tuple(KVCacheGroup(layer_names=group) for group in groups),
            max_model_len=64,
        )
    )
    return executor


def prefill(request_id: str, token_ids: list[int], block_ids: tuple[list[int], ...], scheduled: int) -> SchedulerOutput:
    new = NewRequestData(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        num_computed_tokens=0,
        block_ids=block_ids,
        sampling_params=GREEDY,
    )
    return SchedulerOutput(new_requests=[new], num_scheduled_tokens={request_id: scheduled})


def known(request_id: str, computed: int, scheduled: int) -> SchedulerOutput:
    cached = CachedRequestData(request_ids=[request_id], num_computed_tokens=[computed], new_block_ids=[None])
    return SchedulerOutput(cached_requests=cached, num_scheduled_tokens={request_id: scheduled})


def step(executor: UniprocExecutor, output: SchedulerOutput) -> list[list[int]]:
    executor.execute_model(output)
    return executor.sample_tokens().result(timeout=PATIENCE).sampled_token_ids


def decode(executor: UniprocExecutor, block_ids: tuple[list[int], ...]) -> list[int]:
    tokens = step(executor, prefill("a", list(range(5, 20)), block_ids, 15))[0]
    for computed in range(15, 20):
        tokens += step(executor, known("a", computed, 1))[0]
    return tokens


def test_a_chunk_of_a_prompt_samples_nothing(path: Path) -> None:
    whole = step(make_executor(path), prefill("a", list(range(5, 20)), ([1, 2, 3, 4],), 15))
    executor = make_executor(path)
    assert step(executor, prefill("a", list(range(5, 20)), ([1, 2, 3, 4],), 10)) == [[]]
    assert step(executor, known("a", 10, 5)) == whole


def test_groups_of_layers_have_block_tables_of_their_own(path: Path) -> None:
    together = decode(make_executor(path), ([1, 2, 3, 4, 5],))
    apart = decode(make_executor(path, num_groups=2), ([1, 2, 3, 4, 5], [30, 7, 22, 9, 11]))
    assert apart == together


def test_layers_of_different_groups_share_memory(path: Path) -> None:
    apart = make_executor(path, num_groups=2)._worker.runner._caches.values()
    together = make_executor(path)._worker.runner._caches.values()
    assert len({layer.cache.keys.data_ptr() for layer in apart}) == 1
    assert len({layer.cache.keys.data_ptr() for layer in together}) == len(together)


def test_a_grammar_decides_among_the_tokens_of_the_request_it_names(path: Path) -> None:
    executor = make_executor(path)
    both = prefill("a", [5, 6], ([1],), 2)
    other = prefill("b", [5, 6], ([2],), 2)
    executor.execute_model(
        SchedulerOutput(
            new_requests=both.new_requests + other.new_requests,
            num_scheduled_tokens=both.num_scheduled_tokens | other.num_scheduled_tokens,
        )
    )
    words = np.zeros((1, VOCAB_SIZE // 32), dtype=np.int32)
    words[0, 3] = 1 << 9
    (free,), (constrained,) = (
        executor.sample_tokens(GrammarBitmask(["b"], words)).result(timeout=PATIENCE).sampled_token_ids
    )
    assert constrained == 3 * 32 + 9
    assert free != constrained


def test_a_step_without_tokens_only_forgets(path: Path) -> None:
    executor = make_executor(path)
    step(executor, prefill("a", [5, 6], ([1],), 2))
    assert step(executor, SchedulerOutput(finished_request_ids=["a"])) == []
    assert step(executor, prefill("a", [5, 6], ([2],), 2)) != []


def test_the_configured_pool_size_wins(path: Path) -> None:
    assert make_executor(path).available_kv_cache_memory() == 12345


@pytest.mark.parametrize(
    ("device", "disk", "prepared"), [("cuda", "d", ["prepare"] * 2), ("cuda", "", []), ("cpu", "d", [])]
)
def test_gpus_lock_the_memory_for_copies_of_blocks_at_start(device: str, disk: str, prepared: list[str]) -> None:
    worker, called = Worker.__new__(Worker), list[str]()
    faked: Any = worker
    faked._engine = SimpleNamespace(
        cache=SimpleNamespace(disk=disk), kv_transfer=SimpleNamespace(enabled=False, connector="")
    )
    faked._device, faked._kernels = torch.device(device), None
    faked._runner = SimpleNamespace(initialize_kv_cache=lambda config: None, graph_capture=None)
    faked.copies = faked.state_copies = SimpleNamespace(begin=called.append)
    worker.initialize_kv_cache(SimpleNamespace())
    assert called == prepared


@pytest.mark.parametrize(
    ("device", "step_tokens", "warmed"), [("cuda", 2048, True), ("cuda", 512, False), ("cpu", 2048, False)]
)
def test_gpus_with_a_configured_pool_size_still_run_a_step_without_a_graph(
    device: str, step_tokens: int, warmed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied, seen = [], []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    worker: Any = Worker.__new__(Worker)
    limits = SimpleNamespace(step_tokens=step_tokens, max_num_seqs=64)
    worker._engine = SimpleNamespace(cache=SimpleNamespace(kv_cache_memory=12345), scheduler=limits)
    worker._device = torch.device(device)
    worker._runner = SimpleNamespace(profile=lambda *sizes: seen.append(sizes))
    assert worker.available_kv_cache_memory() == 12345
    assert seen == ([(513, 64)] if warmed else [])
    assert len(emptied) == len(seen)


def test_the_profiling_step_runs_the_largest_shapes_and_leaves_no_trace(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(ModelConfig(path=str(path)), torch.device("cpu"), lambda line: None)
    seen = []

    class Spy(AttentionBackend):
        def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object) -> torch.Tensor:
            seen.append((len(query), list(rest[1].metadata.seq_lens)))
            return create_backend("cpu", torch.device("cpu")).attend(query, key, value, *rest)

    monkeypatch.setitem(factory._FACTORIES, "spy", Spy)
    config = ForwardConfig(torch.device("cpu"), "spy", KernelsConfig(isa="off"), num_threads=1, block_size=4)
    runner = GenerationRunner(model, build_forward(model, config))
    runner.profile(num_tokens=1100, num_seqs=20)
    assert seen == [(1100, [512, 512, 76])] * len(runner.specs)
    assert runner.caches == {}


def test_stepping_before_the_cache_is_there_is_an_error(path: Path) -> None:
    executor = UniprocExecutor(EngineCoreConfig(model=ModelConfig(path=str(path), device="cpu")))
    with pytest.raises(RuntimeError, match="load_model has not been called"):
        executor.execute_model(SchedulerOutput())
    executor.load_model(lambda line: None)
    executor.execute_model(SchedulerOutput())
    with pytest.raises(RuntimeError, match="initialize_kv_cache must be called before"):
        executor.sample_tokens().result(timeout=PATIENCE)
    executor.shutdown()
    executor.shutdown()


class Marked:
    """A ``TokenLauncher`` whose tokens are 100 plus the row's number, and 200 more in launches with rules."""

    def launch(self, logits: torch.Tensor, draws: PlainDraws, rules: LogitRules | None = None) -> LaunchedTokens:
        """Return tokens for as many rows as there are draws."""
        assert len(logits) == len(draws.seeds)
        results = torch.zeros(2, len(logits), dtype=torch.int32)
        results[0] = torch.arange(len(logits)) + (300 if rules else 100)
        return LaunchedTokens(results, len(logits))

    def score(self, logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
        """Return the log-probabilities of torch."""
        return pack_logprobs(logits, token_ids, count)


def test_only_rows_with_rules_are_sampled_apart(path: Path) -> None:
    model = load_model(ModelConfig(path=str(path)), torch.device("cpu"), lambda line: None)
    config = ForwardConfig(torch.device("cpu"), "auto", KernelsConfig(isa="off"), num_threads=1, block_size=4)
    runner = GenerationRunner(model, replace(build_forward(model, config), launcher=Marked()))
    groups = (KVCacheGroup(layer_names=tuple(runner.specs)),)
    runner.initialize_kv_cache(KVCacheConfig(num_blocks=40, block_size=4, groups=groups, max_model_len=64))
    biased = SamplingParams(temperature=0.0, logit_bias={7: 100.0})
    params = {"biased": biased, "one": GREEDY, "constrained": GREEDY, "two": SamplingParams(seed=3, logprobs=0)}
    steps = [prefill(name, [5, 6], ([1 + i],), 2) for i, name in enumerate(params)]
    new = [
        msgspec.structs.replace(each.new_requests[0], sampling_params=params[each.new_requests[0].request_id])
        for each in steps
    ]
    runner.execute(SchedulerOutput(new_requests=new, num_scheduled_tokens=dict.fromkeys(params, 2)))
    words = np.zeros((1, VOCAB_SIZE // 32), dtype=np.int32)
    output = runner.sample(GrammarBitmask(["constrained"], words))
    assert isinstance(output, Late)
    received = output.wait()
    assert received.sampled_token_ids == [[300], [101], [301], [103]]
    assert received.logprobs["two"].token_ids == [103]
    assert set(received.logprobs) == {"two"}


# Duration of a step: the fastest of the forward passes that a worker was asked to run.


class SlowForward:
    """A forward pass that takes two minutes the first time and one minute afterwards."""

    def __init__(self) -> None:
        self.specs = {"layer": SimpleNamespace(block_size=16)}
        self.memory = SimpleNamespace(throwaway=lambda block_size, num_blocks: (block_size, num_blocks))
        self.now = 0.0
        self.passes: list[int] = []
        self.bound: list[Any] = []

    def bind(self, caches: Any) -> None:
        """Record ``caches``. This pass has no attention."""
        self.bound.append(caches)

    def run(self, batch: Any, rows: Any) -> Any:
        self.now += 60.0 if self.passes else 120.0
        self.passes.append(len(batch.token_ids))
        return SimpleNamespace(logits=torch.zeros(len(rows), 4))


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_a_worker_makes_all_passes_that_it_is_told_to_however_long_they_take(passes: int) -> None:
    """Workers that share layers wait for each other in each pass: one that stopped by its own clock would leave the
    others.
    """
    forward: Any = SlowForward()
    assert fastest_pass(forward, 4, passes, lambda: float(forward.now)) == (60.0 if passes > 1 else 120.0)
    assert forward.passes == [4] * passes


def test_a_warm_up_is_not_timed_and_later_passes_use_the_same_memory() -> None:
    forward: Any = SlowForward()
    assert fastest_pass(forward, 4, 1, lambda: float(forward.now), warm_up=True) == 60.0
    assert forward.passes == [4, 4]
    assert forward.bound == [(16, 2), {}]  # a second KV cache would drop the graph of the warm-up

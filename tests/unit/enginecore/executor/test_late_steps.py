"""Steps whose tokens a device chooses: the next is launched before the host has them, and takes them from the device."""

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, KernelsConfig, ModelConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup
from penstock_enginecore.core.scheduler.output import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from penstock_enginecore.executor.uniproc import UniprocExecutor
from tests.fakes.engines.late_device import HeldCopies, choose_on_device
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.patience import PATIENCE

DRAWN = SamplingParams(temperature=1.0, seed=7, top_p=0.95)
PENALIZED = SamplingParams(temperature=1.0, seed=7, frequency_penalty=1.5)
PROMPT = list(range(5, 15))
BLOCKS = ([1, 2, 3, 4, 5],)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", directory)
    return directory


def make_executor(path: Path) -> UniprocExecutor:
    config = EngineCoreConfig(
        model=ModelConfig(path=str(path), device="cpu"),
        cache=CacheConfig(block_size=4, kv_cache_memory=12345),
        executor=ExecutorConfig(num_threads=1),
        kernels=KernelsConfig(isa="off"),
    )
    executor = UniprocExecutor(config)
    executor.load_model(lambda line: None)
    groups = (KVCacheGroup(layer_names=tuple(executor.kv_cache_specs())),)
    executor.initialize_kv_cache(KVCacheConfig(num_blocks=40, block_size=4, groups=groups, max_model_len=64))
    return executor


def first(request_id: str = "a", params: SamplingParams = DRAWN, gone: tuple[str, ...] = ()) -> SchedulerOutput:
    new = NewRequestData(
        request_id=request_id,
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=0,
        block_ids=BLOCKS,
        sampling_params=params,
    )
    return SchedulerOutput(
        new_requests=[new], num_scheduled_tokens={request_id: len(PROMPT)}, finished_request_ids=list(gone)
    )


def nth(n: int, request_id: str = "a") -> SchedulerOutput:
    """Return the step that computes output token ``n``, counting from 0."""
    cached = CachedRequestData(request_ids=[request_id], num_computed_tokens=[len(PROMPT) + n], new_block_ids=[None])
    return SchedulerOutput(cached_requests=cached, num_scheduled_tokens={request_id: 1})


def start(executor: UniprocExecutor, step: SchedulerOutput) -> "Future[ModelRunnerOutput]":
    executor.execute_model(step)
    return executor.sample_tokens()


def launched(executor: UniprocExecutor) -> None:
    """Wait until the device thread has done all that it was given."""
    executor._thread.call(lambda: None)


def tokens(future: "Future[ModelRunnerOutput]") -> list[int]:
    return future.result(PATIENCE).sampled_token_ids[0]


def waited_for(path: Path, count: int, params: SamplingParams = DRAWN) -> list[int]:
    """Return the tokens of an engine that waits for each token before the next step."""
    executor = make_executor(path)
    found = tokens(start(executor, first(params=params)))
    for n in range(count - 1):
        found += tokens(start(executor, nth(n)))
    executor.shutdown()
    return found


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> HeldCopies:
    made = HeldCopies()
    choose_on_device(monkeypatch, made)
    return made


def test_steps_are_launched_before_the_tokens_of_those_before_are_known(
    path: Path, copies: HeldCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(path)
    futures = [start(executor, first())] + [start(executor, nth(n)) for n in range(5)]
    launched(executor)
    assert len(copies.begun) == 6
    assert not any(future.done() for future in futures)
    for copy in copies.begun:
        copy.release()
    found = [token for future in futures for token in tokens(future)]
    executor.shutdown()
    monkeypatch.undo()
    assert found == waited_for(path, 6)
    assert len(set(found)) > 3


def test_tokens_that_have_arrived_are_inputs_from_the_host(
    path: Path, copies: HeldCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(path)
    found = []
    for step in (first(), nth(0), nth(1), nth(2)):
        future = start(executor, step)
        launched(executor)
        copies.begun[-1].release()
        found += tokens(future)
    executor.shutdown()
    monkeypatch.undo()
    assert found == waited_for(path, 4)


def test_a_request_with_rules_is_computed_once_the_tokens_before_are_there(
    path: Path, copies: HeldCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(path)
    plain = start(executor, first("b"))
    launched(executor)
    penalized = [start(executor, first(params=PENALIZED))]
    # runs after all tasks that wait for the copy, unless a task did not wait
    executor._thread.submit(copies.begun[0].release)
    assert not penalized[0].done()
    copies.begun[0].release()
    penalized += [start(executor, nth(n)) for n in range(4)]
    found = [token for future in penalized for token in tokens(future)]
    assert tokens(plain)
    assert len(copies.begun) == 1
    executor.shutdown()
    monkeypatch.undo()
    assert found == waited_for(path, 5, PENALIZED)


def test_a_row_that_went_to_another_request_keeps_that_ones_tokens(
    path: Path, copies: HeldCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(path)
    before = start(executor, first("gone", SamplingParams(temperature=1.0, seed=99)))
    futures = [start(executor, first("b", gone=("gone",)))]
    futures += [start(executor, nth(n, "b")) for n in range(2)]
    launched(executor)
    for copy in copies.begun:
        copy.release()
    assert tokens(before)
    # All tokens have arrived, so the next step reads its token from the host.
    futures[-1].result(PATIENCE)
    futures.append(start(executor, nth(2, "b")))
    launched(executor)
    copies.begun[-1].release()
    found = [token for future in futures for token in tokens(future)]
    executor.shutdown()
    monkeypatch.undo()
    assert found == waited_for(path, 4)


def test_a_step_that_fails_late_fails_those_behind_it_and_none_before(path: Path, copies: HeldCopies) -> None:
    executor = make_executor(path)
    futures = [start(executor, first()), start(executor, nth(0)), start(executor, nth(1))]
    launched(executor)
    copies.begun[1].error = RuntimeError("an illegal address")
    for copy in copies.begun:
        copy.release()
    assert tokens(futures[0])
    with pytest.raises(RuntimeError, match="an illegal address"):
        futures[1].result(PATIENCE)
    with pytest.raises(RuntimeError, match="an earlier step failed, so "):
        futures[2].result(PATIENCE)
    with pytest.raises(RuntimeError, match="an earlier step failed, so "):
        start(executor, nth(2)).result(PATIENCE)
    executor.recover()
    again = start(executor, first())
    launched(executor)
    copies.begun[-1].release()
    assert tokens(again) == tokens(futures[0])
    executor.shutdown()


def test_a_step_that_cannot_be_launched_leaves_those_before_it_alone(path: Path, copies: HeldCopies) -> None:
    executor = make_executor(path)
    before = start(executor, first())
    failing = start(executor, nth(0, "nobody"))
    launched(executor)
    with pytest.raises(KeyError):
        failing.result(PATIENCE)
    assert not before.done()
    copies.begun[0].release()
    assert tokens(before)
    executor.shutdown()

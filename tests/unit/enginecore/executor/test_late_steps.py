"""Steps whose tokens a device chooses: the next is launched before the host has them, and takes them from the device."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import CacheConfig, EngineCoreConfig, ExecutorConfig, KernelsConfig, ModelConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup
from penstock_enginecore.core.scheduler.output import (
    CachedRequestData,
    GrammarBitmask,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from penstock_enginecore.executor.uniproc import UniprocExecutor
from tests.fakes.engines.engine_server import wait_until
from tests.fakes.engines.late_device import HeldCopies, choose_on_device
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model
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


def count_passes(executor: UniprocExecutor) -> list[int]:
    """Return a list that gets one entry for each forward pass that ends from now on."""
    passes: list[int] = []
    forward = executor._worker.runner._forward
    run = forward.run

    def counted(*args: Any, **options: Any) -> Any:
        output = run(*args, **options)
        passes.append(1)
        return output

    forward.run = counted
    return passes


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


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=7, logprobs=2),
        SamplingParams(temperature=1.0, seed=7, logit_bias={5: 3.0, 8: -4.0}),
        SamplingParams(temperature=1.0, seed=7, min_tokens=4, stop_token_ids=tuple(range(0, VOCAB_SIZE, 2))),
        SamplingParams(temperature=0.0, allowed_token_ids=tuple(range(3, 40)), bad_word_token_ids=((4,), (5,))),
    ],
    ids=["log-probabilities", "bias", "min_tokens", "allowed tokens and bans"],
)
def test_rules_that_do_not_depend_on_tokens_wait_for_no_token(
    path: Path, params: SamplingParams, copies: HeldCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(path)
    futures = [start(executor, first(params=params))] + [start(executor, nth(n)) for n in range(4)]
    launched(executor)
    assert not any(future.done() for future in futures)
    for copy in copies.begun:
        copy.release()
    found = [token for future in futures for token in tokens(future)]
    executor.shutdown()
    monkeypatch.undo()
    assert found == waited_for(path, 5, params)


def test_penalties_wait_only_for_tokens_of_their_own_request(
    path: Path, copies: HeldCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(path)
    plain = start(executor, first("b"))
    penalized = [start(executor, first(params=PENALIZED))]
    launched(executor)  # the request has no token yet, so its first step waits for nothing
    assert len(copies.begun) == 2
    passes = count_passes(executor)
    penalized.append(start(executor, nth(0)))
    assert not plain.done()
    copies.begun[0].release()
    assert tokens(plain)
    # The forward pass of the second step runs before the token of the first step arrives.
    wait_until(lambda: passes == [1])
    assert not penalized[0].done()
    assert len(copies.begun) == 2
    found = []
    for n in range(1, 5):
        copies.begun[n].release()
        found += tokens(penalized[n - 1])
        launched(executor)
        if n < 4:
            penalized.append(start(executor, nth(n)))
    copies.begun[5].release()
    found += tokens(penalized[4])
    executor.shutdown()
    monkeypatch.undo()
    assert found == waited_for(path, 5, PENALIZED)


def test_rows_beside_penalties_and_masks_stay_late_and_keep_their_tokens(
    path: Path, copies: HeldCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make_executor(path)
    both = {"a": DRAWN, "p": PENALIZED, "c": SamplingParams(temperature=0.0)}
    words = np.zeros((1, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    words[0, 2] = 1 << 7
    steps = [first(name, params) for name, params in both.items()]
    new = [each.new_requests[0] for each in steps]
    for place, each in enumerate(new):
        each.block_ids = ([1 + 5 * place + i for i in range(5)],)
    executor.execute_model(SchedulerOutput(new_requests=new, num_scheduled_tokens=dict.fromkeys(both, len(PROMPT))))
    futures = [executor.sample_tokens(GrammarBitmask(["c"], words))]
    for n in range(4):
        launched(executor)
        assert not futures[-1].done()
        copies.begun[-1].release()  # penalties need the token of the step before
        cached = CachedRequestData(
            request_ids=list(both), num_computed_tokens=[len(PROMPT) + n] * 3, new_block_ids=[None] * 3
        )
        executor.execute_model(SchedulerOutput(cached_requests=cached, num_scheduled_tokens=dict.fromkeys(both, 1)))
        futures.append(executor.sample_tokens(GrammarBitmask(["c"], words)))
    launched(executor)
    copies.begun[-1].release()
    found = [future.result(PATIENCE).sampled_token_ids for future in futures]
    executor.shutdown()
    monkeypatch.undo()
    assert [step[0][0] for step in found] == waited_for(path, 5, DRAWN)
    assert [step[1][0] for step in found] == waited_for(path, 5, PENALIZED)
    assert [step[2] for step in found] == [[2 * 32 + 7]] * 5


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

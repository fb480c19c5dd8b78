"""Steps of a real model that raise in Python: one request fails, and the other requests have their usual tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.types.outputs import EngineCoreOutput, FinishReason
from penstock_common.types.request import NO_SAMPLING, EngineCoreRequest, PoolingParams, PoolingTask
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.scheduler.output import NewRequestData
from penstock_enginecore.core.steps_in_flight import EngineDeadError
from penstock_enginecore.executor.generation.input_batch import InputBatch
from penstock_enginecore.executor.generation.prompt_embeds import PromptVectors
from penstock_enginecore.forward.backbone import Backbone
from penstock_enginecore.forward.modules import ModulesForward
from penstock_enginecore.forward.native import NativeForward
from tests.fakes.engines.in_process import CLIENT, build_engine
from tests.fakes.models.pooling_models import ENCODERS, save_pooling_model
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model

POISON = 7
"""Token that occurs in no good prompt and in no output, because sampling forbids the token."""
LENGTHS = (3, 16, 34, 5)
NEW_TOKENS = 10
FORWARD_PASSES = (ModulesForward, NativeForward)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", directory, hidden_size=64, num_hidden_layers=2)
    return directory


@pytest.fixture(
    params=[{}, {"decoder": False}, {"decoder": False, "linear": False, "attention": False, "sampler": False}],
    ids=["decoder", "modules", "torch"],
)
def kernels(request: pytest.FixtureRequest) -> Any:
    return request.param


def generating(name: str, prompt: list[int], **sampling: Any) -> EngineCoreRequest:
    params = {"seed": len(prompt), "temperature": 0.8, "max_tokens": NEW_TOKENS, "logit_bias": {POISON: -100.0}}
    return EngineCoreRequest(
        request_id=name, prompt_token_ids=prompt, sampling_params=SamplingParams(**{**params, **sampling})
    )


def good_requests() -> list[EngineCoreRequest]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(POISON + 1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]
    return [generating(f"good{i}", prompt) for i, prompt in enumerate(prompts)]


def run(engine: EngineCore, *requests: EngineCoreRequest) -> dict[str, list[EngineCoreOutput]]:
    outputs: dict[str, list[EngineCoreOutput]] = {}
    for request in requests:
        engine.add(engine.preprocess(CLIENT, request))
    while engine.has_work:
        for frame in engine.step(lambda: None).values():
            for output in frame.outputs:
                outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs: dict[str, list[EngineCoreOutput]], name: str) -> list[int]:
    assert outputs[name][-1].finish_reason is FinishReason.LENGTH, outputs[name][-1].error
    return [token for output in outputs[name] for token in output.new_token_ids]


def assert_unharmed(engine: EngineCore, bad: EngineCoreRequest, quiet: dict[str, list[EngineCoreOutput]]) -> None:
    """Check that good requests in a batch with ``bad`` give the same output, and that no request leaves blocks or state
    in the engine.
    """
    good = good_requests()
    outputs = run(engine, *good[:2], bad, *good[2:])
    for request in good:
        assert tokens(outputs, request.request_id) == tokens(quiet, request.request_id)
    error = outputs[bad.request_id][-1].error
    assert error is not None
    assert (error.code, error.reason) == ("INTERNAL", "STEP_FAILED")
    pool = engine.scheduler.kv_cache.pool
    assert pool.num_free_blocks == pool.num_usable_blocks
    again = run(engine, *good_requests())
    assert tokens(again, "good0") == tokens(quiet, "good0")


@pytest.mark.parametrize("scheduler", [{}, {"async_scheduling": True}, {"max_num_batched_tokens": 20}], ids=repr)
def test_a_forward_pass_that_raises_ends_the_request_it_raises_for(
    path: Path,
    kernels: dict[str, Any],
    scheduler: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = build_engine(path, kernels=kernels, scheduler=scheduler, cache={"block_size": 16, "num_blocks": 64})
    quiet = run(engine, *good_requests())
    for forward in FORWARD_PASSES:

        def raising(self: Any, batch: Any, *rest: Any, run: Any = forward.run, **named: Any) -> Any:
            if (batch.token_ids == POISON).any():
                raise RuntimeError("index_put_ expects the same dtype")
            return run(self, batch, *rest, **named)

        monkeypatch.setattr(forward, "run", raising)
    assert_unharmed(engine, generating("bad", [20, 21, POISON, 22]), quiet)
    assert "in raising" in caplog.text, "the log has the stack of what went wrong"
    engine.shutdown()


def layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail during an update of the batch, after some rows were written and before the others."""
    write = InputBatch._set_sampling

    def raising(self: InputBatch, row: int, new: NewRequestData, *rest: Any) -> None:
        if new.sampling_params.top_k == POISON:
            raise KeyError("no such rule")
        write(self, row, new, *rest)

    monkeypatch.setattr(InputBatch, "_set_sampling", raising)


def vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    take = PromptVectors.of

    def raising(self: PromptVectors, inputs: Any) -> Any:
        if (inputs.token_ids == POISON).any():
            raise IndexError("a row that is not there")
        return take(self, inputs)

    monkeypatch.setattr(PromptVectors, "of", raising)


def sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail after the forward pass, once the request has three tokens."""
    rules = InputBatch.sampling_inputs

    def raising(self: InputBatch, request_ids: Any, *rest: Any) -> Any:
        for key in request_ids:
            row = self._rows[key]
            if key.startswith("bad") and self._num_tokens[row] - self._num_prompt_tokens[row] >= 3:
                raise ZeroDivisionError("no token is left")
        return rules(self, request_ids, *rest)

    monkeypatch.setattr(InputBatch, "sampling_inputs", raising)


@pytest.mark.parametrize("inject", [layout, vectors, sampling])
@pytest.mark.parametrize("scheduler", [{}, {"async_scheduling": True}], ids=repr)
def test_a_step_that_fails_before_or_behind_the_model_ends_one_request(
    path: Path,
    inject: Callable[[pytest.MonkeyPatch], None],
    scheduler: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = build_engine(path, scheduler=scheduler, cache={"block_size": 16, "num_blocks": 64})
    quiet = run(engine, *good_requests())
    inject(monkeypatch)
    assert_unharmed(engine, generating("bad", [20, 21, POISON, 22], top_k=POISON), quiet)
    engine.shutdown()


def test_a_model_that_fails_on_every_token_ends_the_engine(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(path, cache={"block_size": 16, "num_blocks": 64})

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for forward in FORWARD_PASSES:
        monkeypatch.setattr(forward, "run", broken)
    with pytest.raises(EngineDeadError, match="illegal memory access"):
        run(engine, *good_requests())
    engine.shutdown()


def test_a_pooling_engine_ends_the_one_request_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    save_pooling_model(ENCODERS[0], tmp_path)
    engine = build_engine(tmp_path, model={"task": "embed"})
    prompts = {"a": [10, 11, 12], "bad": [10, POISON, 12, 13], "b": [20, 21, 22, 23, 24]}
    params = PoolingParams(task=PoolingTask.EMBED)
    requests = [
        EngineCoreRequest(request_id=name, prompt_token_ids=ids, sampling_params=NO_SAMPLING, pooling_params=params)
        for name, ids in prompts.items()
    ]
    quiet = run(engine, *requests)
    hidden = Backbone.run

    def raising(self: Backbone, batch: Any) -> torch.Tensor:
        if (batch.token_ids == POISON).any():
            raise RuntimeError("no such token")
        return hidden(self, batch)

    monkeypatch.setattr(Backbone, "run", raising)
    outputs = run(engine, *requests)
    for name in ("a", "b"):
        assert outputs[name][-1].finish_reason is FinishReason.STOP
        assert outputs[name][-1].pooling_output.shape == quiet[name][-1].pooling_output.shape
    assert outputs["bad"][-1].error.reason == "STEP_FAILED"
    engine.shutdown()

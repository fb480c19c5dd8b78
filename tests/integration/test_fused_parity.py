"""Greedy tokens of the fused decoder equal transformers' tokens: in mixed batches, in chunks, with prefix hits, and
after preemptions.

The tests run on a CPU with kernels in plain torch. They cover the decoder's plan, its buffers and its padding.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.forward.cuda.decoder import fused_plan
from penstock_enginecore.forward.modules import ProbedModel
from penstock_enginecore.models.decoder_plan import ModelPlan
from tests.fakes.engines.in_process import CLIENT, Run, build_engine, generate
from tests.fakes.models.fused_models import FUSED_FAMILIES, offer_fused, save_varied_model
from tests.fakes.models.tiny_models import VOCAB_SIZE
from tests.fakes.models.transformers_greedy import greedy_tokens

pytestmark = pytest.mark.slow

NEW_TOKENS = 12
PROMPT_LENGTHS = (1, 3, 7, 16, 34)
KINDS = {"gemma3": {"layer_types": ["sliding_attention", "full_attention"]}}


@pytest.fixture(autouse=True)
def fused_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    offer_fused(monkeypatch)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def expected_tokens(architecture: str, path: Path, **changes: Any) -> list[list[int]]:
    model = save_varied_model(architecture, path, **KINDS.get(architecture, {}), **changes)
    found = [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts()]
    assert len({token for tokens in found for token in tokens}) > 20
    return found


def greedy(engine: EngineCore, name: str = "r", **params: Any) -> tuple[list[list[int]], Run]:
    wanted = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, **params)
    run = generate(engine, [(f"{name}{i}", prompt, wanted) for i, prompt in enumerate(prompts())])
    return [run.tokens[f"{name}{i}"] for i in range(len(PROMPT_LENGTHS))], run


def computing(engine: EngineCore) -> str:
    [info] = engine.executor.collective_rpc("worker_info")
    return str(info["computing"])


@pytest.mark.parametrize("architecture", FUSED_FAMILIES)
def test_every_family_gives_equal_tokens_in_ragged_batches_chunks_and_prefix_hits(
    architecture: str, tmp_path: Path
) -> None:
    expected = expected_tokens(architecture, tmp_path)
    engine = build_engine(tmp_path)
    assert "fused decoder" in computing(engine)
    assert greedy(engine)[0] == expected
    again, run = greedy(engine, "again")
    assert again == expected
    assert run.stats.prefix_cache_hits > 0
    engine.shutdown()
    chunked = build_engine(tmp_path, cache={"block_size": 16}, scheduler={"max_num_batched_tokens": 7})
    assert greedy(chunked)[0] == expected
    chunked.shutdown()


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_preempted_requests_give_the_same_tokens(architecture: str, tmp_path: Path) -> None:
    expected = expected_tokens(architecture, tmp_path)
    scheduler = {"max_num_batched_tokens": 12}
    roomy = build_engine(tmp_path, model={"max_model_len": 46}, scheduler=scheduler)
    num_blocks = roomy.scheduler.kv_cache.num_blocks_for(46) + 2
    roomy.shutdown()
    cache = {"num_blocks": num_blocks, "enable_prefix_caching": False}
    engine = build_engine(tmp_path, model={"max_model_len": 46}, cache=cache, scheduler=scheduler)
    tokens, run = greedy(engine)
    assert tokens == expected
    assert run.stats.num_preemptions > 0
    engine.shutdown()


def test_layers_of_several_groups_share_an_arena(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2
    expected = expected_tokens("gemma2", tmp_path, num_hidden_layers=6, layer_types=kinds)
    engine = build_engine(tmp_path, model={"max_model_len": 256})
    caches = engine.executor._worker.runner._caches.values()
    assert len({layer.group for layer in caches}) > 1
    assert len({layer.cache.keys.untyped_storage().data_ptr() for layer in caches}) == 1
    assert greedy(engine)[0] == expected
    engine.shutdown()


def test_log_probabilities_of_prompts_come_from_the_states_of_the_step(tmp_path: Path) -> None:
    expected_tokens("qwen3", tmp_path)
    wanted = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=0, logprobs=0)
    found = []
    for kernels in ({}, {"isa": "off"}):
        engine = build_engine(tmp_path, kernels=kernels, scheduler={"max_num_batched_tokens": 7})
        assert ("fused decoder" in computing(engine)) == (not kernels)
        found.append(scores(engine, prompts()[3], wanted))
        engine.shutdown()
    assert len(found[0]) == PROMPT_LENGTHS[3] - 1 + 3
    assert found[0] == pytest.approx(found[1], abs=1e-3)


def scores(engine: EngineCore, prompt: list[int], params: SamplingParams) -> list[float]:
    """Return log-probabilities of the prompt's tokens after the first, and of the output tokens."""
    request = EngineCoreRequest(request_id="scored", prompt_token_ids=prompt, sampling_params=params)
    engine.add(engine.preprocess(CLIENT, request))
    found: list[float] = []
    while engine.has_requests:
        for outputs in engine.step(lambda: None).values():
            for output in outputs.outputs:
                for part in (output.new_prompt_logprobs, output.new_logprobs):
                    found += [] if part is None else part.logprobs
    return found


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_gives_the_same_tokens(level: int, tmp_path: Path) -> None:
    expected = expected_tokens("llama", tmp_path)
    engine = build_engine(tmp_path)
    assert greedy(engine)[0] == expected
    control = EngineControl(engine)
    assert control.sleep(level).result() is None
    control.wake_up()
    assert "fused decoder" in computing(engine)
    assert greedy(engine, "again")[0] == expected
    engine.shutdown()


def test_a_wrong_plan_is_not_served_and_the_log_names_the_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = expected_tokens("qwen3", tmp_path)

    def wrong_plan(probed: ProbedModel) -> ModelPlan:
        plan = fused_plan(probed)
        first, second = plan.layers
        wrong = dataclasses.replace(second, norms_before=second.norms_before[::-1])
        return dataclasses.replace(plan, layers=(first, wrong))

    monkeypatch.setattr("penstock_enginecore.forward.cuda.decoder.fused_plan", wrong_plan)
    engine = build_engine(tmp_path)
    [line] = [line for line in caplog.messages if "fused decoder not used" in line]
    assert ": the output of model.layers.1 differs by " in line
    assert greedy(engine)[0] == expected
    engine.shutdown()


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("olmo2", "applies one norm to all heads"), ("gemma4", "multiplies its output by a factor")],
)
def test_a_family_that_is_not_known_is_served_by_its_modules_and_the_log_says_why(
    architecture: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = expected_tokens(architecture, tmp_path)
    with caplog.at_level(logging.INFO):
        engine = build_engine(tmp_path)
    assert f"; fused decoder not used: model.layers.0 {reason}" in caplog.text
    assert greedy(engine)[0] == expected
    engine.shutdown()

"""Tokens and log-probabilities with adapters equal PEFT's, for any batch, chunks, cache hits and preemptions.

Tokens can be compared exactly. For each prompt, PEFT's token is likelier than any other token by more than the
tolerance of log-probabilities (``adapted_models.MARGIN``).
"""

from typing import Any

import msgspec
import pytest
import torch

from penstock_common.types.outputs import FinishReason
from penstock_enginecore.core.engine_core import EngineCore
from tests.fakes.engines.in_process import Run, answer, build_engine
from tests.fakes.models.adapted_models import ADAPTERS, BASE, NEW_TOKENS, AdaptedModel, assert_close, rows_of

NATIVE = (
    "llama",
    "cohere",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_moe",
    "gemma4_shared",
    "glm4",
    "gpt_neox",
    "granite",
    "lfm2",
    "mistral",
    "olmo",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "starcoder2",
)
"""Model types that the kernels' decoder computes. Random delta rules amplify rounding too much, so LFM2 is the only one with
recurrent layers.
"""
PACKED = ("opt",)
"""Model types whose linear layers the kernels compute, while modules compute all other layers."""
MODULES = {"gemma4_moe": [*(f"{name}_proj" for name in "qkvo"), *(f"{name}_proj" for name in ("gate", "up", "down"))]}
"""Layers that adapters update, for model types whose other linear layers belong to a mixture of experts."""
SHALLOW: dict[str, dict[str, Any]] = {
    "gemma4_shared": {
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 1,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }
}
"""Changes of model types whose usual tiny models amplify rounding too much."""
QUICK = "llama"
KINDS = ("llama", "gemma2", "phi3", "gpt_neox", "opt")
"""One model type of each kind.

The kinds are: plain layers, capped attention scores, a combined projection, a projection grouped by head, and learned
positions.
"""
CACHE = {"block_size": 16, "num_blocks": 256}
LORA = {"max_loras": len(ADAPTERS)}


@pytest.fixture(
    scope="module",
    params=[name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in (*NATIVE, *PACKED)],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    torch.set_num_threads(1)
    folder, modules = tmp_path_factory.mktemp(request.param), MODULES.get(request.param)
    changes = {"hidden_size": 64, "initializer_range": 0.2, **SHALLOW.get(request.param, {})}
    made = AdaptedModel(request.param, folder, modules, **changes)
    answers = {(question.adapter, tuple(question.prompt)): question.tokens for question in made.questions}
    assert len(answers) == len(made.questions) >= 16
    assert len({tuple(tokens) for tokens in answers.values()}) == len(answers), (
        "adapters and prompts make no difference"
    )
    assert {adapter for adapter, _ in answers} == {BASE, *ADAPTERS}
    return made


each_kind = pytest.mark.parametrize("model", KINDS, indirect=True)


def engine_of(adapted: AdaptedModel, /, **sections: Any) -> EngineCore:
    wanted: dict[str, dict[str, Any]] = {"model": {"max_logprobs": -1}, "cache": CACHE, "lora": LORA}
    for name, section in sections.items():
        wanted[name] = {**wanted.get(name, {}), **section}
    return build_engine(adapted.path, **wanted)


def check(model: AdaptedModel, run: Run, prefix: str = "r") -> float:
    """Check that tokens and log-probabilities equal PEFT's. Returns the largest difference of log-probabilities."""
    assert set(run.finish_reasons.values()) == {FinishReason.LENGTH}
    largest = 0.0
    for number, question in enumerate(model.questions):
        name = f"{prefix}{number}"
        assert run.tokens[name] == question.tokens, (name, question.adapter)
        expected = model.logprobs(question.adapter, question.prompt, question.tokens)
        largest = max(largest, assert_close(rows_of(run.logprobs[name]), expected))
    print(f"\nlog-probabilities differ by {largest:.1e} at most")
    return largest


def test_one_batch_of_all_adapters_and_of_none(model: AdaptedModel) -> None:
    engine = engine_of(model)
    [info] = engine.executor.collective_rpc("worker_info")
    assert ("decoder" in info["computing"]) == (model.architecture in NATIVE)
    assert ("linear" in info["computing"]) == (model.architecture in PACKED)
    check(model, answer(engine, model.requests()))
    run = answer(engine, model.requests("again"))
    check(model, run, "again")
    assert run.stats.prefix_cache_hits > 0


def few_blocks(model: AdaptedModel, *, enable_prefix_caching: bool) -> EngineCore:
    """Return an engine whose blocks suffice for two of the longest requests, and which computes prompts in chunks."""
    length = max(len(question.prompt) for question in model.questions) + NEW_TOKENS
    sections: dict[str, Any] = {"model": {"max_model_len": length}, "scheduler": {"max_num_batched_tokens": 24}}
    roomy = engine_of(model, **sections)
    num_blocks = 2 * roomy.scheduler.kv_cache.num_blocks_for(length) + 1
    return engine_of(
        model, **sections, cache={"num_blocks": num_blocks, "enable_prefix_caching": enable_prefix_caching}
    )


@pytest.mark.slow
def test_chunks_prefix_hits_and_preemptions_at_once(model: AdaptedModel) -> None:
    engine = few_blocks(model, enable_prefix_caching=True)
    for prefix in ("r", "again"):
        run = answer(engine, model.requests(prefix))
        check(model, run, prefix)
    assert run.stats.num_preemptions > 0


@pytest.mark.slow
@each_kind
def test_prompts_in_chunks(model: AdaptedModel) -> None:
    engine = engine_of(model, scheduler={"max_num_batched_tokens": 7})
    check(model, answer(engine, model.requests()))


@pytest.mark.slow
@each_kind
def test_preempted_requests(model: AdaptedModel) -> None:
    run = answer(few_blocks(model, enable_prefix_caching=False), model.requests())
    check(model, run)
    assert run.stats.num_preemptions > 0


@pytest.mark.slow
@each_kind
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "prediction", "draft_model"])
def test_tokens_that_are_drafted_by_the_base_models_weights_and_other_means(model: AdaptedModel, drafter: str) -> None:
    speculative: dict[str, Any] = {"method": drafter, "num_speculative_tokens": 4, "adaptive": False}
    if drafter == "draft_model":
        speculative |= {"model": str(model.path)}
    engine = engine_of(model, speculative=speculative)
    for prefix in ("r", "again"):  # in the second run, the drafter can also use finished outputs
        requests = model.requests(prefix)
        if drafter == "prediction":  # each prediction is correct except for its last three tokens
            predictions = [[*question.tokens[:9], 1, 2, 3] for question in model.questions]
            requests = [
                msgspec.structs.replace(request, prediction_token_ids=predicted)
                for request, predicted in zip(requests, predictions, strict=True)
            ]
        run = answer(engine, requests)
        check(model, run, prefix)
    assert not engine.scheduler.drafter_failure
    counts = run.stats.spec_decoding_stats
    print(f"{counts.num_accepted_tokens} of {counts.num_draft_tokens} drafted tokens accepted")
    if drafter != "ngram":  # random models seldom repeat tokens, so n-grams find few drafts
        assert counts.num_accepted_tokens > len(model.questions)


@pytest.mark.slow
@each_kind
def test_prompts_are_scored_as_well(model: AdaptedModel) -> None:
    run = answer(engine_of(model, scheduler={"max_num_batched_tokens": 24}), model.requests(prompt_logprobs=-1))
    check(model, run)
    for number, question in enumerate(model.questions):
        if len(question.prompt) > 1:
            expected = model.logprobs(question.adapter, question.prompt[:1], question.prompt[1:])
            assert_close(rows_of(run.prompt_logprobs[f"r{number}"]), expected)


def bits(run: Run, name: str) -> tuple[list[int], list[float]]:
    """Return tokens and log-probabilities of a request, for exact comparison."""
    return run.tokens[name], run.logprobs[name].logprobs


@pytest.mark.slow
@each_kind
def test_bits_are_those_of_an_engine_without_adapters_and_of_a_request_alone(model: AdaptedModel) -> None:
    with_adapters, without = engine_of(model), engine_of(model, lora={"max_loras": 0})
    run = answer(with_adapters, model.requests())
    plain = [n for n, question in enumerate(model.questions) if question.adapter == BASE]
    off = answer(without, [model.request(number) for number in plain])
    for number in plain:
        assert bits(run, f"r{number}") == bits(off, f"r{number}")
    alone = engine_of(model, cache={"enable_prefix_caching": False})
    for number in range(len(model.questions)):
        assert bits(answer(alone, [model.request(number)]), f"r{number}") == bits(run, f"r{number}")
    for sections in ({"scheduler": {"max_num_batched_tokens": 7}}, {"scheduler": {"max_num_seqs": 3}}):
        other = answer(engine_of(model, **sections), model.requests()[::-1])
        for number in range(len(model.questions)):
            assert bits(other, f"r{number}") == bits(run, f"r{number}")

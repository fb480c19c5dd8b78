"""Features of engines with models that have recurrent layers: each gives transformers' result, or is refused by name."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import torch
from transformers import AutoTokenizer

from penstock_common.types.prompt_embeds import IS_TOKEN, IS_VECTOR, PromptEmbeds
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams, StructuredOutput
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.lora.errors import LoraError, LoraReason
from penstock_enginecore.lora.peft_adapter import LoraLimits, read_adapter
from penstock_enginecore.lora.target import AdapterTarget
from penstock_enginecore.models.state_hook import install
from penstock_enginecore.native.weights import round_linears
from penstock_local import LLM
from penstock_local import SamplingParams as LocalParams
from tests.fakes.engines.in_process import answer, build_engine, generate
from tests.fakes.models.adapted_models import AdaptedModel
from tests.fakes.models.adapters import edit_config, edit_tensors, save_adapter
from tests.fakes.models.quantized_models import save_quantized_model
from tests.fakes.models.tiny_models import save_speaking_model, save_tiny_model
from tests.fakes.models.transformers_greedy import distinct_greedy_tokens, greedy_tokens
from tests.fakes.patience import PATIENCE
from tests.integration.test_logprobs import check as check_logprobs
from tests.integration.test_lora_parity import check as check_adapted
from tests.integration.test_lora_parity import engine_of as adapted_engine

NEW_TOKENS = 24
PROMPT_LENGTHS = (1, 7, 16, 17, 40)
ARCHITECTURES = ("qwen3_5", "granitemoehybrid", "jamba", "kimi_linear")
EVEN_HEADS = {
    "qwen3_5": {},
    "granitemoehybrid": {},
    "jamba": {"mamba_dt_rank": 8},
    "kimi_linear": {"linear_num_heads": 8, "linear_head_dim": 16},
}
"""Changes with which the rows of each linear layer fill whole words of 4-bit numbers."""


class Case(NamedTuple):
    architecture: str
    path: Path
    model: Any
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp(request.param)
    model = save_speaking_model(request.param, path)
    generator = torch.Generator().manual_seed(2)
    vocab_size = model.config.vocab_size
    prompts = [torch.randint(10, vocab_size, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]
    return Case(request.param, path, model, prompts, expected_tokens(model, prompts))


def expected_tokens(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    found = [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts]
    assert len({token for tokens in found for token in tokens}) > 20
    return found


def engine_of(path: Path, **sections: Any) -> EngineCore:
    return build_engine(path, cache={"block_size": 16, **sections.pop("cache", {})}, **sections)


def greedy(engine: EngineCore, prompts: list[list[int]], prefix: str = "r") -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    run = generate(engine, [(f"{prefix}{i}", prompt, params) for i, prompt in enumerate(prompts)])
    return [run.tokens[f"{prefix}{i}"] for i in range(len(prompts))]


# Sampling.


@pytest.mark.quick("qwen3_5-asynchronous")  # processes that compile constraints take seconds to start
@pytest.mark.parametrize(
    "scheduler",
    [{}, {"async_scheduling": True, "max_num_batched_tokens": 8}],
    ids=["plain", "asynchronous"],
)
def test_constrained_outputs_are_valid_and_the_same_however_steps_are_scheduled(
    case: Case, scheduler: dict[str, Any]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(case.path)
    schema = {"type": "array", "items": {"enum": ["red", "green", 12]}, "minItems": 3, "maxItems": 9}
    constraints = [
        StructuredOutput(json_schema=json.dumps(schema)),
        StructuredOutput(regex=r"([a-z]{2,5}-[0-9]{2} ){2,4}"),
    ]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=i,
            max_tokens=120 if i % 3 else 30,
            structured_output=constraints[i % 3 - 1] if i % 3 else None,
        )
        for i in range(6)
    ]
    requests = [(f"r{i}", case.prompts[i % 5], params[i]) for i in range(6)]
    engine = engine_of(case.path, scheduler=scheduler)
    together = generate(engine, requests).tokens
    alone = engine_of(case.path, cache={"enable_prefix_caching": False}, scheduler={"async_scheduling": False})
    try:
        for request in requests:
            assert generate(alone, [request]).tokens[request[0]] == together[request[0]]
    finally:
        engine.shutdown()
        alone.shutdown()
    for i in range(6):
        text = str(tokenizer.decode(together[f"r{i}"], skip_special_tokens=True))
        if i % 3 == 1:
            jsonschema.validate(json.loads(text), schema)
        elif i % 3 == 2:
            assert re.fullmatch(constraints[1].regex or "", text), text


@pytest.mark.parametrize("tokens_per_step", [7, 2048])
def test_logprobs_of_prompt_and_output_equal_transformers(case: Case, tokens_per_step: int, tmp_path: Path) -> None:
    # Wide random weights amplify rounding: log-probabilities of float32 are then up to 1e-3 from those of float64.
    model = save_speaking_model(case.architecture, tmp_path, initializer_range=0.1)
    engine = engine_of(tmp_path, scheduler={"max_num_batched_tokens": tokens_per_step})
    greedy(engine, case.prompts, "caches prefixes")
    params = SamplingParams(temperature=1.3, seed=4, max_tokens=NEW_TOKENS, logprobs=3, prompt_logprobs=2)
    run = generate(engine, [(f"r{i}", prompt, params) for i, prompt in enumerate(case.prompts)])
    for i, prompt in enumerate(case.prompts):
        whole = prompt + run.tokens[f"r{i}"]
        check_logprobs(model, whole, len(prompt), run.logprobs[f"r{i}"], 3, rounding=1e-5)
        if len(prompt) > 1:
            check_logprobs(model, prompt, 1, run.prompt_logprobs[f"r{i}"], 2, rounding=1e-5)


@pytest.fixture(scope="module")
def llm(case: Case) -> Iterator[LLM]:
    with LLM(str(case.path), device="cpu", num_threads=1, kv_cache_memory="32MiB", max_num_seqs=16) as made:
        yield made


def test_each_of_n_sequences_is_that_of_its_seed(case: Case, llm: LLM) -> None:
    prompt = case.prompts[-1]
    [together] = llm.generate([prompt], LocalParams(n=4, seed=30, temperature=1.0, max_tokens=NEW_TOKENS))
    tokens = [output.token_ids for output in together.outputs]
    params = [LocalParams(seed=30 + i, temperature=1.0, max_tokens=NEW_TOKENS) for i in range(4)]
    alone = [output.outputs[0].token_ids for output in llm.generate([prompt] * 4, params)]
    assert tokens == alone
    assert len(set(map(tuple, tokens))) == 4


def test_stop_strings_end_the_text_where_it_first_contains_them(case: Case, llm: LLM) -> None:
    prompt = case.prompts[-1]
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    [whole] = llm.generate([prompt], LocalParams(**params))
    stop = whole.text[20:24]
    [stopped] = llm.generate([prompt], LocalParams(**params, stop=(stop,)))
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert stopped.outputs[0].stop_reason == stop


# Steps, pauses and sleep.


@pytest.mark.parametrize("scheduling", [True, False])
def test_asynchronous_scheduling_gives_the_same_tokens(case: Case, *, scheduling: bool) -> None:
    engine = engine_of(case.path, scheduler={"async_scheduling": scheduling, "max_num_batched_tokens": 20})
    for turn in range(2):
        assert greedy(engine, case.prompts, f"{turn} ") == case.expected, f"turn {turn}"


@pytest.mark.parametrize("clear_cache", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_requests_go_on_after_pauses(case: Case, *, async_scheduling: bool, clear_cache: bool) -> None:
    engine = engine_of(case.path, scheduler={"async_scheduling": async_scheduling, "max_num_batched_tokens": 20})
    control = EngineControl(engine)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    requests = [
        EngineCoreRequest(request_id=f"r{i}", prompt_token_ids=prompt, sampling_params=params)
        for i, prompt in enumerate(case.prompts)
    ]
    steps = 0

    def pause() -> None:
        nonlocal steps
        steps += 1
        if steps % 5 == 0:
            control.pause("keep", clear_cache=clear_cache).result(PATIENCE)
            assert control.is_paused()
            control.resume()

    run = answer(engine, requests, after_step=pause)
    assert steps >= NEW_TOKENS
    assert [run.tokens[f"r{i}"] for i in range(len(requests))] == case.expected


def test_sleep_of_either_level_changes_no_tokens(case: Case) -> None:
    engine = engine_of(case.path)
    control = EngineControl(engine)
    assert greedy(engine, case.prompts) == case.expected
    for level in (1, 2):
        control.sleep(level).result(PATIENCE)
        assert engine.executor.collective_rpc("worker_info")[0]["kv_cache_bytes"] == 0
        control.wake_up()
        control.resume()
        for turn in range(2):
            assert greedy(engine, case.prompts, f"{level} {turn} ") == case.expected, (level, turn)


@pytest.mark.parametrize("level", [1, 2])
def test_requests_that_run_while_the_engine_falls_asleep_go_on_afterwards(case: Case, level: Any) -> None:
    engine = engine_of(case.path, scheduler={"max_num_batched_tokens": 20})
    control = EngineControl(engine)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    requests = [
        EngineCoreRequest(request_id=f"r{i}", prompt_token_ids=prompt, sampling_params=params)
        for i, prompt in enumerate(case.prompts)
    ]
    steps = 0

    def nap() -> None:
        nonlocal steps
        steps += 1
        if steps == 9:
            control.sleep(level, "keep").result(PATIENCE)
            control.wake_up()
            control.resume()

    run = answer(engine, requests, after_step=nap)
    assert steps > 9
    assert [run.tokens[f"r{i}"] for i in range(len(requests))] == case.expected


# Weights and kernels.


@pytest.mark.parametrize(
    "kernels",
    [{"isa": "off"}, {"isa": "baseline"}, {"linear": False}, {"attention": False}, {"sampler": False}],
    ids=str,
)
def test_any_part_of_the_kernels_can_be_turned_off(case: Case, kernels: dict[str, Any]) -> None:
    assert greedy(engine_of(case.path, kernels=kernels), case.prompts) == case.expected


def test_weights_rounded_to_integers_give_the_tokens_of_the_rounded_weights(case: Case, tmp_path: Path) -> None:
    model: Any = save_tiny_model(case.architecture, tmp_path, vocab_size=case.model.config.vocab_size)
    install(model)  # marks layers that are not rounded
    with torch.no_grad():
        round_linears(model, but=model.get_output_embeddings())
    engine = engine_of(tmp_path, model={"quantization": "int8"}, scheduler={"max_num_batched_tokens": 20})
    assert "int8 weights" in str(engine.executor.collective_rpc("worker_info")[0]["computing"])
    assert greedy(engine, case.prompts) == expected_tokens(model, case.prompts)


@pytest.mark.parametrize(
    "form",
    [
        "fp8-blocks",
        "awq",
        "gptq",
        *(
            pytest.param(form, marks=pytest.mark.slow)
            for form in (
                "fp8-tensor",
                "fbgemm",
                "compressed-fp8-channel",
                "compressed-int4-asymmetric",
                "gptq-desc-act",
            )
        ),
    ],
)
def test_quantized_checkpoints_give_the_tokens_of_what_their_weights_mean(
    case: Case, form: str, tmp_path: Path
) -> None:
    changes = {"vocab_size": case.model.config.vocab_size, **EVEN_HEADS[case.architecture]}
    model = save_quantized_model(case.architecture, form, tmp_path, **changes)
    answers = [distinct_greedy_tokens(model, prompt, NEW_TOKENS, margin=5e-5) for prompt in case.prompts]
    kept = [i for i, tokens in enumerate(answers) if tokens is not None]  # the others depend on rounding
    assert len(kept) >= len(case.prompts) - 1
    assert greedy(engine_of(tmp_path), [case.prompts[i] for i in kept]) == [answers[i] for i in kept]


def test_random_weights_give_the_tokens_of_a_checkpoint_with_these_weights(case: Case, tmp_path: Path) -> None:
    engine = engine_of(case.path, model={"load_format": "dummy"}, kernels={"isa": "off"})
    executor: Any = engine.executor
    module = executor._worker.runner._model.module
    module.save_pretrained(tmp_path)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [(f"r{i}", prompt, params) for i, prompt in enumerate(case.prompts)]
    found = generate(engine, requests).tokens
    assert found == generate(engine_of(tmp_path, kernels={"isa": "off"}), requests).tokens
    assert all(len(tokens) == NEW_TOKENS for tokens in found.values())


def test_prompt_embeddings_give_transformers_tokens(case: Case) -> None:
    engine = engine_of(case.path, scheduler={"max_num_batched_tokens": 20})
    with torch.inference_mode():
        vectors = [case.model.get_input_embeddings()(torch.tensor(prompt)) for prompt in case.prompts]
    hidden_size = case.model.config.hidden_size
    requests = []
    for i, (prompt, rows) in enumerate(zip(case.prompts, vectors, strict=True)):
        # Each second prompt mixes embeddings with token ids.
        is_token = b"".join(IS_TOKEN if i % 2 and n % 3 == 0 else IS_VECTOR for n in range(len(prompt)))
        given = rows[torch.tensor([place == IS_VECTOR[0] for place in is_token])]
        embeds = PromptEmbeds(
            dtype="float32",
            num_tokens=len(prompt),
            hidden_size=hidden_size,
            data=given.contiguous().numpy().tobytes(),
            is_token=is_token if i % 2 else b"",
        )
        requests.append(
            EngineCoreRequest(
                request_id=f"r{i}",
                prompt_token_ids=[
                    token if place == IS_TOKEN[0] else 0 for token, place in zip(prompt, is_token, strict=True)
                ],
                sampling_params=SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS),
                prompt_embeds=embeds,
            )
        )
    run = answer(engine, requests)
    assert [run.tokens[f"r{i}"] for i in range(len(requests))] == case.expected


# LoRA adapters.

UPDATED = {
    "qwen3_5": {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"},
    "granitemoehybrid": {"in_proj", "out_proj"},
    "jamba": {"in_proj", "x_proj", "out_proj"},
    "kimi_linear": {
        *("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj", "o_proj"),
        *("kv_a_proj_with_mqa", "kv_b_proj"),
    },
}
"""Linear layers of recurrent layers that the adapters must update."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AdaptedModel:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(request.param)
    # "all-linear" would select experts of kimi_linear, and dt_proj of jamba, which are refused.
    modules = sorted(UPDATED[request.param]) if request.param in ("jamba", "kimi_linear") else None
    return AdaptedModel(request.param, folder, modules, initializer_range=0.08)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"scheduler": {"max_num_batched_tokens": 7}},
        pytest.param({"kernels": {"isa": "off"}}, marks=pytest.mark.slow),
        pytest.param({"scheduler": {"async_scheduling": True}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_adapters_of_recurrent_layers_give_pefts_tokens_and_logprobs(
    adapted: AdaptedModel, sections: dict[str, Any]
) -> None:
    target = AdapterTarget.of(adapted.base)
    for adapter in adapted.adapters.values():
        read = read_adapter(adapter.path, target, LoraLimits(max_rank=64))
        assert {name.rpartition(".")[2] for name in read.updates} >= UPDATED[adapted.architecture]
    engine = adapted_engine(adapted, **sections)
    check_adapted(adapted, answer(engine, adapted.requests()))
    run = answer(engine, adapted.requests("again"))
    check_adapted(adapted, run, "again")
    assert run.stats.prefix_cache_hits > 0


MIXERS = {
    "qwen3_5": "model.layers.0.linear_attn",
    "granitemoehybrid": "model.layers.0.mamba",
    "jamba": "model.layers.0.mamba",
    "kimi_linear": "model.layers.0.self_attn",
}
LAST = {"kimi_linear": "o_proj"}
"""Last linear layer of a recurrent layer, if it is not ``out_proj``."""


def refusal(base: Any, folder: Path) -> LoraError:
    with pytest.raises(LoraError) as error:
        read_adapter(folder, AdapterTarget.of(base), LoraLimits(max_rank=64))
    return error.value


@pytest.mark.parametrize("targets", ["conv1d", "all"])
def test_adapters_of_the_convolution_are_refused_by_name(case: Case, targets: str, tmp_path: Path) -> None:
    modules = ["conv1d"] if targets == "conv1d" else ["conv1d", *UPDATED[case.architecture]]
    save_adapter(case.model, tmp_path, r=2, target_modules=[LAST.get(case.architecture, "out_proj")])
    edit_config(tmp_path, target_modules=modules)
    error = refusal(case.model, tmp_path)
    assert error.reason == LoraReason.MODULE
    assert re.search(rf"target_modules selects {MIXERS[case.architecture]}\.conv1d, which is a Conv1d", str(error))


@pytest.mark.parametrize("targets", [["dt_proj"], "all-linear"], ids=str)
def test_adapters_of_a_layer_that_is_never_called_are_refused_by_name(targets: Any, tmp_path: Path) -> None:
    """Mixers of Mamba-1 read the weight of ``dt_proj``, so an update of the layer's output would be lost."""
    model = save_tiny_model("jamba", tmp_path / "model")
    save_adapter(model, tmp_path / "adapter", r=2, target_modules=targets)
    executor: Any = engine_of(tmp_path / "model", kernels={"isa": "off"}).executor
    error = refusal(executor._worker.runner._model.module, tmp_path / "adapter")
    assert error.reason == LoraReason.MODULE
    message = r"model\.layers\.0\.mamba\.dt_proj, which is a layer whose weight is used without calling the layer"
    assert re.search(message, str(error))


@pytest.mark.parametrize("parameter", ["A_log", "D", "dt_bias"])
@pytest.mark.parametrize("way", ["target_parameters", "an update", "a copy"])
def test_adapters_of_other_parameters_of_recurrent_layers_are_refused_by_name(
    case: Case, parameter: str, way: str, tmp_path: Path
) -> None:
    layer = f"{MIXERS[case.architecture]}.{parameter}"
    save_adapter(case.model, tmp_path, r=2, target_modules=[LAST.get(case.architecture, "out_proj")])
    if way == "target_parameters":
        edit_config(tmp_path, target_parameters=[layer])
    else:
        ends = [".lora_A.weight", ".lora_B.weight"] if way == "an update" else [""]
        edit_tensors(
            tmp_path,
            lambda tensors: tensors.update({f"base_model.model.{layer}{end}": torch.zeros(2, 4) for end in ends}),
        )
    error = refusal(case.model, tmp_path)
    assert parameter in str(error)
    assert error.reason == (LoraReason.TARGET_PARAMETERS if way == "target_parameters" else LoraReason.SURPLUS_TENSOR)

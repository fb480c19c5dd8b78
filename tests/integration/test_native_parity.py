"""Greedy tokens equal transformers' tokens with all kernels on, and with any of the kernels off.

This file uses block sizes and head sizes that the attention kernels support. ``test_parity.py`` uses sizes that torch
computes.
"""

import copy
import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.generation.runner import GenerationRunner
from penstock_enginecore.forward.equivalence_check import TOLERANCES
from penstock_enginecore.forward.native import NativeForward
from penstock_enginecore.models.families import FAMILIES, Family
from penstock_enginecore.native.linear import PackedEmbedding
from tests.emulation.build import pretend
from tests.fakes.engines.in_process import build_engine, generate
from tests.fakes.engines.instruction_sets import runnable
from tests.fakes.models.fused_models import fused
from tests.fakes.models.quick_architectures import QUICK_ARCHITECTURES
from tests.fakes.models.tiny_models import ARCHITECTURES, VOCAB_SIZE, class_name, save_narrow_model, save_tiny_model
from tests.fakes.models.transformers_greedy import greedy_tokens

NEW_TOKENS = 12
PROMPT_LENGTHS = (1, 3, 7, 16, 34, 90)
CACHE = {"block_size": 16, "num_blocks": 128}
SHAPE = {"hidden_size": 64}
HELIUM = {"helium": {"head_dim": 16}}
"""Changes of model types whose tiny configuration has a head size that the kernels do not support."""
LATENT_DECODERS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
"""Model types with latent attention. With LoRA adapters, modules compute them."""
DECODERS = tuple(name for name in ARCHITECTURES if class_name(name) in FAMILIES)
"""Model types that the CPU kernels' decoder computes."""
DECODER_KINDS = (
    "exaone4",
    "gemma3",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi",
    "qwen2",
    "qwen2_moe",
    "qwen3",
)
"""One model type of each kind of decoder.

The kinds are: layers without positions, factors of residual additions, norms after the residual addition, norms over all
heads, mixtures of experts and a router, mixtures with shared experts or biases, and layers that compute attention and
MLP from the same input.
"""


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def expected_tokens(model: torch.nn.Module) -> list[list[int]]:
    return [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts()]


def greedy(engine: EngineCore, name: str = "r", **params: Any) -> list[list[int]]:
    wanted = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, **params)
    run = generate(engine, [(f"{name}{i}", prompt, wanted) for i, prompt in enumerate(prompts())])
    return [run.tokens[f"{name}{i}"] for i in range(len(PROMPT_LENGTHS))]


def expect_one_call(engine: EngineCore) -> None:
    """Check that the decoder computes all layers in one call."""
    executor: Any = engine.executor
    assert executor._worker.runner._forward._layers.outside == {}


def computing(engine: EngineCore) -> str:
    [info] = engine.executor.collective_rpc("worker_info")
    return str(info["computing"])


@pytest.mark.parametrize("architecture", QUICK_ARCHITECTURES)
def test_every_family_gives_equal_tokens_in_ragged_batches_chunks_and_prefix_hits(
    architecture: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    expected = expected_tokens(save_tiny_model(architecture, tmp_path, **SHAPE, **HELIUM.get(architecture, {})))
    engine = build_engine(tmp_path, cache=CACHE)
    assert ("decoder" if architecture in DECODERS else "linear") in computing(engine) or architecture == "gpt2"
    assert "attention, sampler" in computing(engine)
    assert greedy(engine) == expected
    assert greedy(engine, "again") == expected
    engine.shutdown()
    chunked = build_engine(tmp_path, cache=CACHE, scheduler={"max_num_batched_tokens": 7})
    assert greedy(chunked) == expected
    chunked.shutdown()


@pytest.mark.parametrize("architecture", QUICK_ARCHITECTURES)
def test_a_bfloat16_checkpoint_of_every_family_gives_the_tokens_of_float32(architecture: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    expected = expected_tokens(save_narrow_model(architecture, tmp_path, **SHAPE, **HELIUM.get(architecture, {})))
    engine = build_engine(tmp_path, cache=CACHE)
    assert ("decoder" if architecture in DECODERS else "linear") in computing(engine)
    if architecture in DECODERS:
        expect_one_call(engine)
    assert greedy(engine) == expected
    assert greedy(engine, "again") == expected
    engine.shutdown()


@pytest.mark.parametrize(
    ("off", "left"),
    [
        ({"isa": "off"}, "torch"),
        ({"decoder": False}, "linear, attention, sampler"),
        ({"decoder": False, "linear": False}, "(attention, sampler)"),
        ({"attention": False}, "(linear, sampler)"),
        ({"sampler": False}, "(decoder, attention)"),
        ({"decoder": False, "linear": False, "attention": False, "sampler": False}, "(unused)"),
        ({"isa": "baseline"}, "baseline kernels (decoder, attention, sampler), 1 threads"),
    ],
)
def test_any_part_can_be_turned_off(off: dict[str, Any], left: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    expected = expected_tokens(save_tiny_model("qwen3", tmp_path, hidden_size=64))
    engine = build_engine(tmp_path, cache=CACHE, kernels=off)
    assert left in computing(engine)
    assert greedy(engine) == expected
    engine.shutdown()


@pytest.mark.each_value
@pytest.mark.parametrize("architecture", DECODER_KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4, "head_dim": 32},
        {"num_key_value_heads": 1, "intermediate_size": 96, "vocab_size": 333},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}},
    ],
    ids=["plain", "tied", "wide heads", "odd sizes", "scaled"],
)
def test_decoders_of_other_shapes_give_the_same_tokens(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    expected = expected_tokens(save_tiny_model(architecture, tmp_path, hidden_size=64, **copy.deepcopy(changes)))
    engine = build_engine(tmp_path, cache=CACHE)
    assert "decoder" in computing(engine)
    assert greedy(engine) == expected
    engine.shutdown()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("architecture", "kernels"),
    [("qwen3", {}), ("gemma3", {}), ("qwen3", {"decoder": False}), ("gemma3", {"decoder": False})],
)
def test_memory_contains_tied_weights_once(
    architecture: str, kernels: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """The embedding reads the packed weight of the head. gemma3 scales its embeddings."""
    torch.set_num_threads(1)
    model = save_narrow_model(architecture, tmp_path, dtype, hidden_size=64, vocab_size=331, tie_word_embeddings=True)
    expected = expected_tokens(model)
    engine = build_engine(tmp_path, cache=CACHE, kernels=kernels)
    executor: Any = engine.executor
    module = executor._worker.runner._model.module
    embedding = module.get_input_embeddings()
    assert isinstance(embedding, PackedEmbedding)
    assert module.get_output_embeddings().packed is embedding.packed
    assert greedy(engine) == expected
    engine.shutdown()


@pytest.mark.parametrize(("architecture", "share"), [("phi3", 0.5), ("glm4_moe", 0.25), ("minimax_m2", 1.0)])
def test_a_part_of_a_head_is_rotated(architecture: str, share: float, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": share}
    changes = {"head_dim": 32} if architecture != "phi3" else {"hidden_size": 128}
    model = save_tiny_model(architecture, tmp_path, **{"hidden_size": 64, **changes}, rope_parameters=rope)
    expected = expected_tokens(model)
    engine = build_engine(tmp_path, cache=CACHE)
    assert "decoder" in computing(engine)
    assert greedy(engine) == expected
    engine.shutdown()


def test_an_attention_bias_is_added(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    expected = expected_tokens(save_tiny_model("llama", tmp_path, hidden_size=64, attention_bias=True))
    engine = build_engine(tmp_path, cache=CACHE)
    assert "decoder" in computing(engine)
    assert greedy(engine) == expected
    engine.shutdown()


@pytest.mark.parametrize(
    ("changes", "cache", "reason"),
    [
        ({"mlp_bias": True}, CACHE, "a gate has a bias"),
        ({"hidden_act": "gelu"}, CACHE, "model.layers.0.mlp uses the activation function gelu"),
        ({"head_dim": 10}, CACHE, "a head size of 10 is not a multiple of"),
        ({"intermediate_size": 50}, CACHE, "intermediate_size 50 is not a multiple of"),
        ({}, {"block_size": 8, "num_blocks": 256}, "cache.block_size 8 is not a multiple of 16"),
    ],
)
def test_unsupported_layers_run_by_modules_and_the_log_gives_the_reason(
    changes: dict[str, Any], cache: dict[str, int], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(1)
    expected = expected_tokens(save_tiny_model("llama", tmp_path, hidden_size=64, **changes))
    with caplog.at_level(logging.INFO):
        engine = build_engine(tmp_path, cache=cache)
    assert f"; decoder not used: {reason}" in caplog.text
    assert greedy(engine) == expected
    engine.shutdown()


def test_a_decoder_that_computes_something_else_is_found_out_before_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(1)
    expected = expected_tokens(save_tiny_model("llama", tmp_path, hidden_size=64))
    monkeypatch.setattr("penstock_enginecore.forward.native_layers.KernelDecoder.input_factor", 2.0)
    engine = build_engine(tmp_path, cache=CACHE)
    assert "; decoder not used: its results differ by" in caplog.text
    assert "linear" in computing(engine)
    assert greedy(engine) == expected
    engine.shutdown()


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_factors_of_outputs_need_only_a_row_of_the_table(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Changes Llama's modules, so that they multiply the outputs of attention and MLP by factors of the configuration."""
    torch.set_num_threads(1)
    attend, compute = LlamaAttention.forward, LlamaMLP.forward

    def attend_scaled(self: Any, *args: Any, **given: Any) -> Any:
        output, weights = attend(self, *args, **given)
        return output * self.config.attention_factor, weights

    monkeypatch.setattr(LlamaAttention, "forward", attend_scaled)
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: compute(self, x) * self.config.mlp_factor)
    if known:
        factors: Any = {"attention": "attention_factor", "mlp": "mlp_factor"}
        monkeypatch.setitem(cast("Any", FAMILIES), "LlamaForCausalLM", Family(factors=factors))
    model = save_tiny_model("llama", tmp_path, hidden_size=64, attention_factor=0.6, mlp_factor=1.7)
    expected = expected_tokens(model)
    with caplog.at_level(logging.INFO):
        engine = build_engine(tmp_path, cache=CACHE)
    assert ("decoder" if known else "linear") in computing(engine)
    assert ("decoder not used: its results differ by" in caplog.text) is not known
    assert greedy(engine) == expected
    engine.shutdown()
    if known:
        fused(tmp_path)  # compares the logits of the GPU decoder with those of the modules


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_mixture_with_a_wrong_decoder_is_loaded_again_and_runs_by_modules(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(1)
    expected = expected_tokens(save_narrow_model("mixtral", tmp_path, hidden_size=64))
    run = NativeForward.run

    def wrong(self: NativeForward, batch: Any, rows: Any, *, keep_states: bool = False) -> Any:
        output = run(self, batch, rows, keep_states=keep_states)
        output.logits.neg_()
        return output

    with monkeypatch.context() as broken, caplog.at_level(logging.INFO):
        broken.setattr(NativeForward, "run", wrong)
        engine = build_engine(tmp_path, cache=CACHE, model={"dtype": dtype})
    assert caplog.text.count("decoder not used: its results differ by") == (2 if dtype == "bfloat16" else 1)
    assert "; loading the model again" in caplog.text
    assert "(linear, attention, sampler)" in computing(engine)
    assert greedy(engine) == expected
    engine.shutdown()


@pytest.mark.parametrize("changes", [{"final_logit_softcapping": 2.0}, {"attn_logit_softcapping": 1.0}])
def test_logits_and_scores_are_capped(changes: dict[str, float], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = save_tiny_model("gemma2", tmp_path, hidden_size=64, vocab_size=331, **changes)
    expected = expected_tokens(model)
    engine = build_engine(tmp_path, cache=CACHE)
    assert "decoder" in computing(engine)
    assert greedy(engine) == expected
    engine.shutdown()


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["wrong", "failing"])
def test_linear_layers_that_cannot_be_packed_are_read_again_and_compute_as_they_are(
    fault: str, narrow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(1)
    save = save_narrow_model if narrow else save_tiny_model
    expected = expected_tokens(save("persimmon", tmp_path, hidden_size=64))

    def forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x.new_full((*x.shape[:-1], self.out_features), torch.nan) if fault == "wrong" else x @ self.weight.T

    with monkeypatch.context() as broken, caplog.at_level(logging.INFO):
        broken.setattr("penstock_enginecore.native.linear.PackedLinear.forward", forward)
        engine = build_engine(tmp_path, cache=CACHE)
    assert "; linear not used: " in caplog.text
    assert "; loading the model again" in caplog.text
    assert computing(engine).split("(")[1].startswith("attention, sampler")
    assert greedy(engine) == expected
    engine.shutdown()


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
def test_a_bfloat16_checkpoint_is_computed_in_float32_from_weights_of_half_the_size(
    architecture: str, dtype: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    model = save_tiny_model(architecture, tmp_path, hidden_size=64, intermediate_size=1024)
    model.bfloat16().save_pretrained(tmp_path)
    expected = expected_tokens(model.float())
    without_unit = next(isa for isa in runnable() if isa not in ("amx", "avx512_bf16"))
    engine = build_engine(tmp_path, cache=CACHE, model={"dtype": dtype}, kernels={"isa": without_unit})
    assert "decoder" in computing(engine)
    assert greedy(engine) == expected
    [info] = engine.executor.collective_rpc("worker_info")
    assert info["weight_bytes"] < 0.7 * 4 * sum(p.numel() for p in model.parameters())
    assert info["kv_cache_bytes"] == 2 * 128 * 16 * 2 * 2 * 16 * 4  # layers, slots, keys and values, heads, float32
    engine.shutdown()


@pytest.mark.each_value
@pytest.mark.parametrize("architecture", ["gemma3", "phi3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
def test_other_families_compute_in_float32_from_weights_of_half_the_size_too(
    architecture: str, dtype: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    model = save_narrow_model(architecture, tmp_path, hidden_size=64)
    expected = expected_tokens(model)
    without_unit = next(isa for isa in runnable() if isa not in ("amx", "avx512_bf16"))
    engine = build_engine(tmp_path, cache=CACHE, model={"dtype": dtype}, kernels={"isa": without_unit})
    part = "decoder" if architecture in DECODERS else "linear"
    assert computing(engine) == f"{without_unit} kernels ({part}, attention, sampler), 1 threads"
    assert greedy(engine) == expected
    [info] = engine.executor.collective_rpc("worker_info")
    assert info["weight_bytes"] < 2.2 * sum(p.numel() for p in model.parameters())
    assert info["dtype"] == ("bfloat16" if dtype == "bfloat16" else "float32")
    assert {spec.dtype_size for spec in engine.executor.kv_cache_specs().values()} == {4}
    engine.shutdown()


@pytest.mark.each_value
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "persimmon"])
@pytest.mark.parametrize("dtype", ["auto", "float16"])
@pytest.mark.parametrize("has_float16", [False, True])
def test_float16_is_computed_as_float32_whatever_the_processor_has(
    architecture: str, dtype: str, has_float16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    expected = expected_tokens(save_narrow_model(architecture, tmp_path, torch.float16, hidden_size=64))
    capabilities = torch.cpu.get_capabilities() | {"avx512_fp16": has_float16, "amx_fp16": has_float16}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    engine = build_engine(tmp_path, cache=CACHE, model={"dtype": dtype})
    assert ("decoder" if architecture in DECODERS else "linear") in computing(engine)
    assert engine.executor.collective_rpc("worker_info")[0]["dtype"] == "float32"
    assert greedy(engine) == expected
    engine.shutdown()


def test_weights_are_held_once(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    save_tiny_model("qwen3", tmp_path, hidden_size=64, intermediate_size=1024, num_hidden_layers=4)
    engines = [build_engine(tmp_path, cache=CACHE, kernels=kernels) for kernels in ({}, {"isa": "off"})]
    packed, plain = (engine.executor.collective_rpc("worker_info")[0]["weight_bytes"] for engine in engines)
    assert plain <= packed < 1.1 * plain
    for engine in engines:
        engine.shutdown()


@pytest.mark.parametrize(
    ("architecture", "part"),
    [("llama", "decoder"), ("mixtral", "decoder"), ("qwen2_moe", "decoder"), ("persimmon", "linear")],
)
@pytest.mark.parametrize("level", [1, 2])
def test_packed_weights_come_back_from_sleep(level: int, architecture: str, part: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    expected = expected_tokens(save_narrow_model(architecture, tmp_path, hidden_size=64))
    engine = build_engine(tmp_path, cache=CACHE)
    assert greedy(engine) == expected
    control = EngineControl(engine)
    assert control.sleep(level).result() is None
    control.wake_up()
    assert part in computing(engine)
    assert greedy(engine, "again") == expected
    engine.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "qwen3_moe", "persimmon"])
def test_a_matrix_unit_gives_the_tokens_of_float32(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the decoder and the linear layers."""
    torch.set_num_threads(1)
    pretend(monkeypatch, "amx")
    expected = expected_tokens(save_narrow_model(architecture, tmp_path, hidden_size=64))
    for scheduler in ({}, {"max_num_batched_tokens": 7}):
        engine = build_engine(tmp_path, cache=CACHE, model={"dtype": "float32"}, scheduler=scheduler)
        part = "decoder" if architecture in DECODERS else "linear"
        assert computing(engine).startswith(f"amx kernels ({part},")
        assert computing(engine).endswith("inputs in 3 bfloat16 parts")
        assert greedy(engine) == expected
        assert greedy(engine, "again") == expected
        engine.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "phi3", "mixtral", "qwen2_moe"])
@pytest.mark.parametrize("isa", ["amx", "avx512_bf16"])
def test_bfloat16_rounds_inputs_and_is_closer_to_float32_than_transformers(
    isa: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    pretend(monkeypatch, isa)
    wide = save_narrow_model(architecture, tmp_path, hidden_size=64)
    narrow = type(wide).from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager").eval()

    def last_logits(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([model(torch.tensor([prompt])).logits[:, -1].float() for prompt in prompts()])

    theirs, exact = last_logits(narrow), last_logits(wide)
    seen: list[torch.Tensor] = []
    sample = GenerationRunner.sample

    def spy(self: GenerationRunner, grammar: Any = None) -> Any:
        if self._pending is not None:
            seen.append(self._pending.logits.clone())
        return sample(self, grammar)

    monkeypatch.setattr(GenerationRunner, "sample", spy)
    engine = build_engine(tmp_path, cache=CACHE, model={"dtype": "bfloat16"})
    part = "decoder" if architecture in DECODERS else "linear"
    assert computing(engine) == f"{isa} kernels ({part}, attention, sampler), 1 threads, inputs rounded to bfloat16"
    for i, prompt in enumerate(prompts()):
        generate(engine, [(f"r{i}", prompt, SamplingParams(temperature=0.0, max_tokens=1))])
    engine.shutdown()
    ours, of_theirs = (float((logits - exact).norm() / exact.norm()) for logits in (torch.cat(seen), theirs))
    assert 1e-4 < ours < min(of_theirs, 0.025)


@pytest.mark.parametrize(("architecture", "part"), [("mixtral", "decoder"), ("persimmon", "linear")])
def test_inputs_are_not_rounded_where_that_changes_too_much(
    architecture: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(1)
    pretend(monkeypatch, "amx")
    for dtype in (torch.bfloat16, torch.float32):
        monkeypatch.setitem(TOLERANCES, dtype, 1e-5)
    expected = expected_tokens(save_narrow_model(architecture, tmp_path, hidden_size=64))
    engine = build_engine(tmp_path, cache=CACHE, model={"dtype": "bfloat16"})
    assert f"{part} not used: its results differ by 0.0" in caplog.text
    assert computing(engine) == f"amx kernels ({part}, attention, sampler), 1 threads, inputs in 3 bfloat16 parts"
    assert greedy(engine) == expected
    engine.shutdown()


@pytest.mark.quick("qwen3-floats", "gemma2-auto", "mixtral-auto")
@pytest.mark.parametrize(
    ("architecture", "isa"),
    [
        ("qwen3", "floats"),
        ("qwen3", "amx"),
        ("gemma2", "auto"),
        ("gemma3", "floats"),
        ("gemma4_moe", "auto"),
        ("gemma4_shared", "auto"),
        ("mixtral", "auto"),
        ("mixtral", "amx"),
        ("qwen2_moe", "auto"),
        ("qwen3_moe", "floats"),
        ("gpt_oss", "auto"),
        ("llama4_text", "floats"),
        ("minimax_m2", "auto"),
        ("olmo3", "floats"),
        ("glm4", "auto"),
        ("phi", "floats"),
    ],
)
def test_logits_do_not_depend_on_the_batch_the_chunks_or_prefix_hits(
    architecture: str, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares logits bit by bit, because greedy tokens would not show small differences."""
    torch.set_num_threads(1)
    save = save_tiny_model if isa == "floats" else save_narrow_model
    save(architecture, tmp_path, hidden_size=64)
    if isa == "amx":
        pretend(monkeypatch, "amx")
    seen: dict[tuple[str, int], list[bytes]] = {}
    sample = GenerationRunner.sample

    def spy(self: GenerationRunner, grammar: Any = None) -> Any:
        if self._pending is not None:
            inputs = self._pending.inputs
            for i, logits in zip(inputs.sampling_requests, self._pending.logits, strict=True):
                key = inputs.request_ids[i].split("-")[1].split("#")[0], int(inputs.attention[0].seq_lens[i])
                seen.setdefault(key, []).append(logits.numpy().tobytes())
        return sample(self, grammar)

    monkeypatch.setattr(GenerationRunner, "sample", spy)
    for scheduler in ({}, {"max_num_batched_tokens": 5}, {"max_num_batched_tokens": 64}):
        engine = build_engine(tmp_path, cache=CACHE, scheduler=scheduler)
        greedy(engine, "crowd-")
        wanted = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
        for index, prompt in enumerate(prompts()):
            generate(engine, [(f"alone-{index}", prompt, wanted)])
        engine.shutdown()
    assert len(seen) == len(PROMPT_LENGTHS) * NEW_TOKENS
    assert {len(rows) for rows in seen.values()} == {6}
    assert all(len(set(rows)) == 1 for rows in seen.values())


@pytest.mark.parametrize(
    "architecture", ["qwen3", "gemma3", "gemma4_moe", "gemma4_shared", "olmo2", "phi", "qwen3_moe", "gpt_oss"]
)
def test_the_last_layers_compute_only_needed_tokens_bit_for_bit(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses prompts in chunks, in batches with decoding requests. Of gemma4_shared, these are two layers."""
    torch.set_num_threads(1)
    expected = expected_tokens(save_tiny_model(architecture, tmp_path, hidden_size=64))
    wanted_of: list[tuple[int, int]] = []
    run = NativeForward.run

    def both(self: NativeForward, batch: Any, rows: Any, *, keep_states: bool = False) -> Any:
        whole = run(self, batch, rows, keep_states=True)
        part = run(self, batch, rows)
        assert torch.equal(part.logits, whole.logits)
        wanted_of.append((len(rows), len(batch.token_ids)))
        return whole if keep_states else part

    monkeypatch.setattr(NativeForward, "run", both)
    engine = build_engine(tmp_path, cache=CACHE, scheduler={"max_num_batched_tokens": 7})
    assert greedy(engine) == expected
    engine.shutdown()
    assert any(0 < wanted < of for wanted, of in wanted_of)
    assert any(wanted == 0 for wanted, _ in wanted_of)
    assert any(wanted == of for wanted, of in wanted_of)


def test_an_engine_that_was_installed_without_kernels_serves_with_torch_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(1)
    expected = expected_tokens(save_tiny_model("llama", tmp_path, hidden_size=64))
    monkeypatch.setattr("penstock_enginecore.native.library._CAPABILITIES", {"none": ()})
    engine = build_engine(tmp_path, cache=CACHE)
    assert (
        "computing with PyTorch instead of native kernels (slower) reason=the package was built without kernels"
        in caplog.text
    )
    assert computing(engine) == "torch"
    assert greedy(engine) == expected
    engine.shutdown()

"""The fused decoder on a CPU with kernels in plain torch: proved against the modules, refuted where its plan is wrong."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock_enginecore.attention.base import AttentionMetadata
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.forward.base import FedTokens, ForwardBatch, ForwardPass
from penstock_enginecore.forward.cuda import decoder
from penstock_enginecore.forward.cuda.decoder import FusedForward, fused_plan
from penstock_enginecore.forward.cuda.kernel_api import Norm
from penstock_enginecore.forward.dummy_inputs import Probe, probe_logits
from penstock_enginecore.forward.modules import ModulesForward, ProbedModel, probe_model
from penstock_enginecore.models.decoder_plan import ExpertsPlan, LayerPlan, ModelPlan
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.plan_reader import plan_model
from tests.fakes.models.fused_models import CPU, FUSED_FAMILIES, fused, load_probed, prove, save_varied_model
from tests.fakes.models.torch_kernels import TorchKernels

pytestmark = pytest.mark.usefixtures("one_thread")


PRODUCTS = [(torch, name) for name in ("mm", "addmm", "bmm", "matmul")]
PRODUCTS += [(torch.nn.functional, name) for name in ("linear", "grouped_mm")]
"""Products of torch, whose order of summation depends on the number of rows."""


@pytest.fixture
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("architecture", FUSED_FAMILIES)
def test_every_family_is_proved_and_takes_over(architecture: str, tmp_path: Path) -> None:
    save_varied_model(architecture, tmp_path)
    probed = load_probed(tmp_path)
    proven = prove(probed, lambda: FusedForward(probed, TorchKernels()))
    assert proven.reasons == ""
    assert proven.serves is not None
    layer = probed.model.module.model.layers[0]
    linears = [m for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    assert all(linear.weight.numel() == 0 for linear in linears)
    assert layer.self_attn.o_proj.out_features == 48


@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("architecture", ["qwen2", "granite", "mixtral", "gpt_oss", "deepseek_v3"])
@torch.inference_mode()
def test_batch_invariant_kernels_compute_all_products(
    architecture: str, batch_invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_varied_model(architecture, tmp_path)
    forward = fused(tmp_path, TorchKernels(batch_invariant=batch_invariant))
    expected = forward.probe()
    for owner, name in PRODUCTS:
        monkeypatch.setattr(owner, name, None)
    if batch_invariant:
        assert torch.equal(forward.probe(), expected)
    else:
        with pytest.raises(TypeError, match="not callable"):
            forward.probe()


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1, "head_dim": 20},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}},
        {"max_position_embeddings": 8},
    ],
    ids=["biases", "tied", "one kv head", "scaled positions", "shorter than the probe"],
)
def test_other_shapes_of_llama_are_proved(changes: dict[str, Any], tmp_path: Path) -> None:
    save_varied_model("llama", tmp_path, **changes)
    fused(tmp_path)


def replaced(plan: ModelPlan, index: int, change: Callable[[LayerPlan], LayerPlan]) -> ModelPlan:
    layers = list(plan.layers)
    layers[index] = change(layers[index])
    return dataclasses.replace(plan, layers=tuple(layers))


def without_offset(plan: ModelPlan) -> ModelPlan:
    def change(layer: LayerPlan) -> LayerPlan:
        first, second = layer.norms_before
        return dataclasses.replace(layer, norms_before=(first, Norm(second.weight, second.eps, 0.0)))

    return replaced(plan, 1, change)


def with_another_window(plan: ModelPlan) -> ModelPlan:
    def change(layer: LayerPlan) -> LayerPlan:
        params = dataclasses.replace(layer.attention.params, sliding_window=11)
        return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, params=params))

    return replaced(plan, 0, change)


def with_rotary_of_the_other_kind(plan: ModelPlan) -> ModelPlan:
    return replaced(
        plan, 1, lambda layer: dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, rotary=1))
    )


def without_query_norms(plan: ModelPlan) -> ModelPlan:
    return replaced(
        plan, 1, lambda layer: dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, norms=None))
    )


def without_norms_after(plan: ModelPlan) -> ModelPlan:
    return replaced(plan, 0, lambda layer: dataclasses.replace(layer, norms_after=(None, None)))


def without_soft_cap(plan: ModelPlan) -> ModelPlan:
    return dataclasses.replace(plan, logits_softcap=None)


def with_another_residual_scale(plan: ModelPlan) -> ModelPlan:
    return replaced(plan, 1, lambda layer: dataclasses.replace(layer, residual_scale=1.0))


def without_input_scale(plan: ModelPlan) -> ModelPlan:
    return dataclasses.replace(plan, input_scale=1.0)


def with_one_expert(plan: ModelPlan) -> ModelPlan:
    return replaced(plan, 1, lambda layer: dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, top_k=1)))


def with_weights_as_they_are(plan: ModelPlan) -> ModelPlan:
    return replaced(
        plan, 0, lambda layer: dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, renormalize=False))
    )


def with_pairs_apart(plan: ModelPlan) -> ModelPlan:
    def change(layer: LayerPlan) -> LayerPlan:
        return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, interleaved=False))

    return replaced(plan, 1, change)


def without_shared_experts(plan: ModelPlan) -> ModelPlan:
    return replaced(plan, 1, lambda layer: dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, shared=None)))


def routed(plan: ModelPlan, **changes: Any) -> ModelPlan:
    def change(layer: LayerPlan) -> LayerPlan:
        assert isinstance(layer.mlp, ExpertsPlan)
        assert layer.mlp.grouped is not None
        grouped = dataclasses.replace(layer.mlp.grouped, **changes)
        return dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, grouped=grouped))

    return replaced(plan, 1, change)


def with_experts_of_all_groups(plan: ModelPlan) -> ModelPlan:
    return routed(plan, kept=2)


def without_correction(plan: ModelPlan) -> ModelPlan:
    return routed(plan, correction=lambda: torch.zeros(4))


def without_routed_scale(plan: ModelPlan) -> ModelPlan:
    return routed(plan, scale=1.0)


def without_embedding_scale(plan: ModelPlan) -> ModelPlan:
    return dataclasses.replace(plan, embedding_scale=1.0)


@pytest.mark.parametrize(
    ("architecture", "break_plan", "where"),
    [
        ("gemma3", without_offset, ": the output of model.layers.1 differs by "),
        ("gemma3", with_another_window, ": the output of model.layers.0 differs by "),
        ("gemma3", with_rotary_of_the_other_kind, ": the output of model.layers.1 differs by "),
        ("gemma3", without_query_norms, ": the output of model.layers.1 differs by "),
        ("gemma2", without_norms_after, ": the output of model.layers.0 differs by "),
        ("gemma2", without_soft_cap, ": the layers differ by at most "),
        ("gemma2", without_embedding_scale, ": the embedding differs by 0.856"),
        ("qwen3_moe", with_one_expert, ": the output of model.layers.1 differs by "),
        ("mixtral", with_weights_as_they_are, ": the output of model.layers.0 differs by "),
        ("granite", with_another_residual_scale, ": the output of model.layers.1 differs by "),
        ("granite", without_input_scale, ": the embedding differs by 0.667"),
        ("deepseek_v3", with_pairs_apart, ": the output of model.layers.1 differs by "),
        ("deepseek_v3", without_shared_experts, ": the output of model.layers.1 differs by "),
        ("deepseek_v3", with_experts_of_all_groups, ": the output of model.layers.1 differs by "),
        ("deepseek_v3", without_correction, ": the output of model.layers.1 differs by "),
        ("deepseek_v3", without_routed_scale, ": the output of model.layers.1 differs by "),
    ],
)
def test_a_broken_plan_is_refuted_and_the_layer_named(
    architecture: str,
    break_plan: Callable[[ModelPlan], ModelPlan],
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A soft cap with a visible effect in a small model, and layers of both kinds.
    kinds = ["sliding_attention", "full_attention"]
    changes = {
        "gemma2": {"final_logit_softcapping": 2.0},
        "gemma3": {"layer_types": kinds},
        "granite": {"embedding_multiplier": 3.0},
    }.get(architecture, {})
    save_varied_model(architecture, tmp_path, **changes)
    probed = load_probed(tmp_path)
    monkeypatch.setattr(decoder, "fused_plan", lambda probed: break_plan(fused_plan(probed)))
    proven = prove(probed, lambda: FusedForward(probed, TorchKernels()))
    assert proven.serves is None
    assert proven.reasons.startswith("; fused decoder not used: its results differ by ")
    assert where in proven.reasons
    if "layers.1" in where:
        before = float(proven.reasons.rsplit(" ", 1)[1])
        assert before < 1e-5


def test_after_a_refutation_the_modules_compute_what_they_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_varied_model("gemma3", tmp_path)
    probed = load_probed(tmp_path)
    modules = ModulesForward(probed, create_backend("reference", CPU))
    with torch.inference_mode():
        expected = probe_logits(modules, Probe.prompt(320))
        monkeypatch.setattr(decoder, "fused_plan", lambda probed: without_offset(fused_plan(probed)))
        assert prove(probed, lambda: FusedForward(probed, TorchKernels())).refuted
        torch.testing.assert_close(probe_logits(modules, Probe.prompt(320)), expected)


class OneSlotLate(TorchKernels):
    """Writes keys and values one slot too late.

    Only later steps read them, so a single step does not show the fault.
    """

    def prologue(self, *args: Any) -> None:
        qkv, bias, norms, rotary, positions, slots, *rest = args
        super().prologue(qkv, bias, norms, rotary, positions, torch.where(slots == 17, 18, slots), *rest)


def test_kernels_that_write_to_a_wrong_slot_are_refuted(tmp_path: Path) -> None:
    save_varied_model("llama", tmp_path)
    probed = load_probed(tmp_path)
    assert prove(probed, lambda: FusedForward(probed, OneSlotLate())).refuted


@pytest.mark.parametrize(
    ("architecture", "factor", "reason"),
    [
        ("gemma4", 0.5, r"model\.layers\.0 multiplies its output by a factor"),
        ("gemma4", 1.0, r"model\.layers\.0 norms its values"),
        ("gemma4_moe", 1.0, r"model\.layers\.0 has a mixture of experts beside its MLP"),
    ],
)
def test_parts_of_gemma_4_are_refused_by_name(architecture: str, factor: float, reason: str, tmp_path: Path) -> None:
    save_varied_model(architecture, tmp_path)
    probed = load_probed(tmp_path)
    for layer in probed.model.module.model.layers:
        layer.layer_scalar.fill_(factor)
    with pytest.raises(UnsuitableError, match=reason):
        fused_plan(probed)


def test_keys_as_values_are_refused_by_name(tmp_path: Path) -> None:
    save_varied_model("gemma4", tmp_path)
    probed = load_probed(tmp_path)
    plan = plan_model(probed.model.module, probed.calls)
    attention = dataclasses.replace(plan.layers[1].attention, value_eps=None)
    layer = dataclasses.replace(plan.layers[1], attention=attention, layer_scale=1.0)
    assert decoder._unknown_parts(plan, layer) == ["uses its keys as values"]


def test_layers_of_different_sizes_are_no_candidate(tmp_path: Path) -> None:
    save_varied_model("llama", tmp_path)
    probed = load_probed(tmp_path)
    mlp = probed.model.module.model.layers[1].mlp
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = (
        torch.nn.Linear(*size, bias=False) for size in [(48, 32)] * 2 + [(32, 48)]
    )
    proven = prove(probed, lambda: FusedForward(probed, TorchKernels()))
    assert proven.unsuitable == {"fused decoder": "the model's layers have different sizes"}


def batch(tokens: int, forward: ForwardPass) -> ForwardBatch:
    """Return a step with a prompt of ``tokens`` tokens and its own cache."""
    blocks = -(-tokens // 16)
    forward.bind(forward.memory.throwaway(16, 1 + blocks))
    table = np.arange(1, 1 + blocks, dtype=np.int32)[None]
    starts, lengths = np.array([0, tokens]), np.array([tokens])
    metadata = AttentionMetadata(starts, lengths, table, np.arange(16, 16 + tokens), 16)
    return ForwardBatch(np.arange(tokens) % 320, np.arange(tokens), [metadata])


@torch.inference_mode()
def test_a_step_larger_than_any_captured_one_gives_the_logits_of_smaller_ones(tmp_path: Path) -> None:
    save_varied_model("llama", tmp_path, max_position_embeddings=640, num_hidden_layers=1)
    forward = fused(tmp_path)
    rows = np.array([499, 3])
    small = forward.run(batch(500, forward), rows).logits.clone()
    torch.testing.assert_close(forward.run(batch(600, forward), rows).logits, small)


@torch.inference_mode()
def test_embedded_tokens_and_a_separate_head_give_the_logits_of_the_run(tmp_path: Path) -> None:
    save_varied_model("gemma2", tmp_path)
    forward = fused(tmp_path)
    plain = batch(20, forward)
    rows = np.array([3, 19])
    expected = forward.run(plain, rows).logits.clone()
    embedded = dataclasses.replace(
        plain, embedded=forward.embed(plain.token_ids), token_ids=np.zeros(20, dtype=np.int64)
    )
    output = forward.run(embedded, rows[:1], keep_states=True)
    torch.testing.assert_close(output.logits, expected[:1])
    assert output.states.hidden.shape == (20, 48)
    other = dataclasses.replace(batch(20, forward), token_ids=np.arange(20) + 100)
    forward.run(other, np.array([4]))  # the states must stay valid during later steps
    torch.testing.assert_close(forward.head(output.states, torch.from_numpy(rows)), expected)


@torch.inference_mode()
def test_without_a_cache_there_is_no_step(tmp_path: Path) -> None:
    save_varied_model("llama", tmp_path)
    forward = fused(tmp_path)
    step = batch(5, forward)
    forward.bind({})
    with pytest.raises(RuntimeError, match="bind must be called before the first step"):
        forward.run(step, np.array([4]))


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_counted_once(tied: bool, tmp_path: Path) -> None:
    model = save_varied_model("qwen2", tmp_path, tie_word_embeddings=tied)
    assert fused(tmp_path).weight_bytes == 4 * sum(p.numel() for p in model.parameters())


@torch.inference_mode()
def test_weights_come_back_from_sleep(tmp_path: Path) -> None:
    save_varied_model("llama", tmp_path)
    forward = fused(tmp_path)
    expected = forward.probe().clone()
    forward.to(CPU)
    torch.testing.assert_close(forward.probe(), expected)


def test_what_the_probe_shows_reaches_the_plan(tmp_path: Path) -> None:
    save_varied_model("mistral", tmp_path)
    probed: ProbedModel = load_probed(tmp_path)
    assert [layer.attention.params for layer in fused_plan(probed).layers] == [call.params for call in probed.calls]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["qwen2", "gemma3"])
def test_models_in_half_precision_are_proved(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    save_varied_model(architecture, tmp_path)
    loaded = load_probed(tmp_path).model
    loaded.module.to(dtype)
    if architecture == "gemma3":  # loading does not change the scale, and the module rounds it at each call
        loaded.module.model.embed_tokens.embed_scale = torch.tensor(48**0.5)
    probed = probe_model(dataclasses.replace(loaded, dtype=dtype), CPU, 16)
    proven = prove(probed, lambda: FusedForward(probed, TorchKernels()))
    assert proven.serves is not None, proven.reasons
    assert probed.specs["model.layers.0.self_attn"].dtype_size == 2
    scale = torch.tensor(48**0.5, dtype=dtype).item() if architecture == "gemma3" else 1.0
    assert fused_plan(probed).embedding_scale == scale
    with torch.inference_mode():
        assert proven.serves.probe().dtype == dtype


@pytest.mark.parametrize("by", ["decoder", "modules"])
@torch.inference_mode()
def test_tokens_that_only_the_device_knows_are_inputs_like_others(by: str, tmp_path: Path) -> None:
    save_varied_model("llama", tmp_path)
    modules = ModulesForward(load_probed(tmp_path), create_backend("reference", CPU))
    forward = fused(tmp_path) if by == "decoder" else modules
    plain, rows = batch(20, forward), np.arange(20)
    expected = forward.run(plain, rows).logits.clone()
    newest = torch.tensor([0, int(plain.token_ids[7]), 0, int(plain.token_ids[19])], dtype=torch.int32)
    unknown = plain.token_ids.copy()
    unknown[[7, 19]] = 0
    fed = FedTokens(newest, np.array([19, 7]), np.array([3, 1]))
    found = forward.run(dataclasses.replace(batch(20, forward), token_ids=unknown, fed=fed), rows).logits
    torch.testing.assert_close(found, expected)

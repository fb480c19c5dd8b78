"""Latent attention in the fused decoder: its cache, its buffers, and refused models."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_enginecore.attention.kv_cache import FLOAT8
from penstock_enginecore.config import ModelConfig
from penstock_enginecore.forward.cuda.decoder import FusedForward, fused_plan
from penstock_enginecore.forward.cuda.layers import HeadWeights
from penstock_enginecore.forward.cuda.linear import keeps
from penstock_enginecore.forward.modules import probe_model
from penstock_enginecore.models import rope
from penstock_enginecore.models.decoder_plan import LatentPlan, MLPPlan
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.loader import load_model
from tests.fakes.models.fused_models import CPU, fused, load_probed, prove, save_varied_model
from tests.fakes.models.quantized_models import save_quantized_model
from tests.fakes.models.torch_kernels import TorchKernels

SHAPES: dict[str, dict[str, Any]] = {
    "queries of full rank": {"q_lora_rank": None},
    "biases": {"attention_bias": True},
    "halves": {"rope_interleave": False},
    "weights that do not sum to one": {"norm_topk_prob": False, "routed_scaling_factor": 1.7},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
        }
    },
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_other_shapes_are_proved(changes: dict[str, Any], tmp_path: Path) -> None:
    save_varied_model("deepseek_v3", tmp_path, **changes)
    fused(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("glm4_moe_lite", {}),
        ("deepseek_v2", {"topk_method": "greedy", "q_lora_rank": None}),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7}),
    ],
)
def test_other_models_of_the_same_parts_are_proved(architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    save_varied_model(architecture, tmp_path, **changes)
    fused(tmp_path)


def test_another_choice_of_experts_is_refused_by_its_name(tmp_path: Path) -> None:
    save_varied_model("deepseek_v2", tmp_path, topk_method="greedy")
    probed = load_probed(tmp_path)
    probed.model.module.model.layers[1].mlp.gate.topk_method = "by lot"
    with pytest.raises(UnsuitableError, match=r"model\.layers\.1\.mlp\.gate routes tokens by 'by lot'"):
        FusedForward(probed, TorchKernels())


def test_a_token_of_the_cache_is_one_vector_for_all_heads(tmp_path: Path) -> None:
    save_varied_model("deepseek_v3", tmp_path)
    probed = load_probed(tmp_path)
    expanded = [(spec.num_kv_heads, spec.head_size, spec.head_size_v) for spec in probed.specs.values()]
    assert expanded == [(4, 32, 12)] * 2
    forward = FusedForward(probed, TorchKernels())
    assert list(forward.specs) == list(probed.specs)
    assert [(spec.num_kv_heads, spec.head_size, spec.head_size_v) for spec in forward.specs.values()] == [
        (1, 32, 0)
    ] * 2
    assert {spec.page_size_bytes for spec in forward.specs.values()} == {16 * 32 * 4}
    [first, _] = forward.memory.throwaway(16, 3).values()
    assert first.cache.keys.shape == (3, 1, 16, 32)
    assert first.cache.values.numel() == 0


def test_weights_are_counted_once(tmp_path: Path) -> None:
    model = save_varied_model("deepseek_v3", tmp_path)
    assert fused(tmp_path).weight_bytes == 4 * sum(p.numel() for p in model.parameters())


def test_quantized_weights_stay_so_but_those_between_the_latent_and_heads(tmp_path: Path) -> None:
    save_quantized_model("deepseek_v3", "fbgemm", tmp_path, hidden_size=64, q_lora_rank=32, v_head_dim=16)
    probed = load_probed(tmp_path, keeps)
    proven = prove(probed, lambda: FusedForward(probed, TorchKernels()))
    assert proven.serves is not None, proven.reasons
    layer = probed.model.module.model.layers[0].self_attn
    assert (
        sum(p.numel() for name in ("q_b_proj", "kv_b_proj", "o_proj") for p in getattr(layer, name).parameters()) == 0
    )


@pytest.mark.parametrize("batch_invariant", [False, True])
@torch.inference_mode()
def test_each_head_has_a_matrix_of_its_own(batch_invariant: bool) -> None:
    kernels, x = TorchKernels(batch_invariant=batch_invariant), torch.randn(5, 3, 10)[:, :, :8]
    weight, out = torch.randn(3, 8, 4), torch.full((5, 3, 6), torch.nan)
    expected = torch.einsum("thi,hio->tho", x, weight)
    for transposed in (False, True):
        kept = weight.transpose(1, 2).contiguous() if transposed else weight
        HeadWeights(kept, kernels, transposed=transposed).multiply(x, out[:, :, :4])
        torch.testing.assert_close(out[:, :, :4], expected)
        assert bool(out[:, :, 4:].isnan().all())


@torch.inference_mode()
def test_weights_come_back_from_sleep(tmp_path: Path) -> None:
    save_varied_model("deepseek_v3", tmp_path)
    forward = fused(tmp_path)
    expected = forward.probe().clone()
    forward.to(CPU)
    torch.testing.assert_close(forward.probe(), expected)


def test_an_fp8_cache_is_left_to_the_modules(tmp_path: Path) -> None:
    save_varied_model("deepseek_v3", tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path)), CPU, lambda line: None)
    with pytest.raises(UnsuitableError, match="fp8, which the fused decoder does not support for latent attention"):
        FusedForward(probe_model(model, CPU, 16, FLOAT8), TorchKernels())


def test_the_plan_names_sizes_and_routing(tmp_path: Path) -> None:
    save_varied_model("deepseek_v3", tmp_path, routed_scaling_factor=1.7)
    plan = fused_plan(load_probed(tmp_path))
    attention = plan.layers[0].attention
    assert isinstance(attention, LatentPlan)
    sizes = (attention.num_heads, attention.latent, attention.rotary_size, attention.plain_size, attention.value_size)
    assert sizes == (4, 16, 16, 16, 12)
    experts: Any = plan.layers[1].mlp
    assert (experts.grouped.groups, experts.grouped.kept, experts.grouped.scale) == (2, 1, 1.7)
    assert isinstance(plan.layers[0].mlp, MLPPlan)


def test_attention_that_does_more_is_refused_by_its_name(tmp_path: Path) -> None:
    save_varied_model("deepseek_v3", tmp_path)
    probed = load_probed(tmp_path)
    attention: Any = probed.model.module.model.layers[1].self_attn
    setattr(attention, rope._ATTRIBUTE, rope.QueryScale(0.1, 8.0))
    with pytest.raises(UnsuitableError, match=r"model\.layers\.1\.self_attn scales queries by position"):
        fused_plan(probed)
    delattr(attention, rope._ATTRIBUTE)
    attention.indexer = torch.nn.Identity()
    with pytest.raises(UnsuitableError, match=r"model\.layers\.1\.self_attn has unknown or missing parts: indexer"):
        fused_plan(probed)

"""Plans of models with recurrent layers, and refusals of unknown layers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_enginecore.config import ModelConfig
from penstock_enginecore.forward.modules import ProbedModel, probe_model
from penstock_enginecore.models.decoder_plan import (
    AttentionPlan,
    ExpertsPlan,
    MLPPlan,
    ModelPlan,
    OtherMixture,
    RecurrentPlan,
)
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.hybrid_reader import HYBRIDS, NEMOTRON, hybrid_has_mixtures, plan_hybrid
from penstock_enginecore.models.loader import load_model
from tests.fakes.models.tiny_models import save_tiny_model

CPU = torch.device("cpu")
NEMOTRON_EXPERTS = {
    "hybrid_override_pattern": "M*ME",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "n_group": 2,
    "topk_group": 1,
}


def load(architecture: str, path: Path, **changes: Any) -> ProbedModel:
    save_tiny_model(architecture, path, **changes)
    return probe_model(load_model(ModelConfig(path=str(path)), CPU, lambda line: None), CPU, block_size=16)


def plan(architecture: str, path: Path, **changes: Any) -> ModelPlan:
    probed = load(architecture, path, **changes)
    return plan_hybrid(probed.model.module, probed.calls)


def recurrent(found: ModelPlan, layer: int) -> RecurrentPlan:
    attention = found.layers[layer].attention
    assert isinstance(attention, RecurrentPlan)
    return attention


def test_qwen_has_the_delta_rule_and_gated_attention(tmp_path: Path) -> None:
    found = plan("qwen3_5", tmp_path)
    rule = recurrent(found, 0)
    assert rule.kind == "delta rule"
    channels, values, heads = 2 * 16 * 8 + 32 * 12, 32 * 12, 32
    assert [linear.out_features for linear in rule.inputs] == [channels, values, heads, heads]
    assert (rule.channels_at, rule.gate_at) == (0, channels)
    assert (rule.beta_at, rule.step_at) == (channels + values, channels + values + heads)
    assert rule.norm is not None
    assert not rule.norm.gates_first
    attention = found.layers[1].attention
    assert isinstance(attention, AttentionPlan)
    assert attention.gated
    assert found.family.sections
    assert found.norm is not None
    assert found.norm.offset == 1.0


def test_granite_has_the_duality_and_scales_everything(tmp_path: Path) -> None:
    found = plan("granitemoehybrid_dense", tmp_path)
    rule = recurrent(found, 0)
    assert (rule.kind, rule.gate_at, rule.channels_at, rule.step_at) == ("duality", 0, 128, 128 + 128 + 2 * 2 * 16)
    assert rule.skip is not None
    assert rule.norm is not None
    assert rule.norm.gates_first
    assert (found.input_scale, found.logits_divisor, found.layers[0].residual_scale) == (3.0, 0.5, 0.3)
    assert found.rotary_size(0) == 0


def test_lfm_has_short_convolutions(tmp_path: Path) -> None:
    found = plan("lfm2", tmp_path)
    rule = recurrent(found, 2)
    assert (rule.kind, rule.step_at, rule.gate_at, rule.channels_at) == ("short convolution", 0, 64, 128)
    assert (rule.decay, rule.skip, rule.norm, rule.num_heads) == (None, None, None, 0)
    assert found.layers[0].mlp_module is found.layers[0].module.get_submodule("feed_forward")


def test_nemotrons_blocks_with_an_mlp_belong_to_the_layer_before(tmp_path: Path) -> None:
    found = plan("nemotron_h", tmp_path)  # blocks M*M-
    assert [layer.name for layer in found.layers] == [f"model.layers.{index}" for index in (0, 1, 2)]
    assert [layer.mlp is None for layer in found.layers] == [True, True, False]
    assert isinstance(found.layers[1].attention, AttentionPlan)
    mlp = found.layers[2].mlp
    assert isinstance(mlp, MLPPlan)
    assert (mlp.activation, len(mlp.gate_up)) == ("relu2", 1)


def test_an_mlp_after_another_is_refused(tmp_path: Path) -> None:
    probed = load("nemotron_h", tmp_path, hybrid_override_pattern="M*--")
    with pytest.raises(UnsuitableError, match=r"model\.layers\.3 has an MLP after another MLP"):
        plan_hybrid(probed.model.module, probed.calls)


def test_nemotrons_experts_have_no_gates(tmp_path: Path) -> None:
    probed = load("nemotron_h", tmp_path, **NEMOTRON_EXPERTS)
    mlp = plan_hybrid(probed.model.module, probed.calls).layers[2].mlp
    assert isinstance(mlp, ExpertsPlan)
    assert mlp.grouped is not None
    assert mlp.shared is not None
    assert (mlp.gated, mlp.shared.gated, mlp.activation, mlp.num_experts) == (False, False, "relu2", 4)
    probed = load("nemotron_h", tmp_path / "latent", **NEMOTRON_EXPERTS, moe_latent_size=16)
    other = plan_hybrid(probed.model.module, probed.calls).layers[2].mlp
    assert other == OtherMixture("the experts of model.layers.3.mixer have latent inputs and outputs")


def test_a_shared_expert_beside_experts_may_have_a_gate(tmp_path: Path) -> None:
    probed = load("qwen3_5_moe", tmp_path)
    found = plan_hybrid(probed.model.module, probed.calls)
    for layer in found.layers:
        mlp = layer.mlp
        assert isinstance(mlp, ExpertsPlan)
        assert mlp.renormalize
        assert mlp.shared is not None
        assert mlp.shared_gate in found.linears
    assert hybrid_has_mixtures(probed.model.module)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("granitemoehybrid", r"model\.layers\.0 has unknown or missing parts: block_sparse_moe"),
        (
            "olmo_hybrid",
            rf"OlmoHybridForCausalLM is not one of the supported .*: {', '.join(sorted([*HYBRIDS, NEMOTRON]))}",
        ),
    ],
)
def test_unknown_layers_are_refused_by_name(architecture: str, message: str, tmp_path: Path) -> None:
    probed = load(architecture, tmp_path)
    assert not hybrid_has_mixtures(probed.model.module)
    with pytest.raises(UnsuitableError, match=message):
        plan_hybrid(probed.model.module, probed.calls)


def test_an_activation_other_than_silu_is_refused(tmp_path: Path) -> None:
    probed = load("qwen3_5", tmp_path)
    mixer: Any = probed.model.module.get_submodule("model.layers.2.linear_attn")
    mixer.activation = "gelu"
    with pytest.raises(UnsuitableError, match=r"model\.layers\.2\.linear_attn uses the activation function gelu"):
        plan_hybrid(probed.model.module, probed.calls)

"""Plans of models' layers, and refusals of unknown layers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_enginecore.forward.cuda.decoder import fused_plan
from penstock_enginecore.forward.cuda.mlp import mlp_of
from penstock_enginecore.forward.native_layers import rows_by_kind
from penstock_enginecore.forward.native_support import unsuitable
from penstock_enginecore.models.decoder_plan import ClampedGate, ExpertsPlan, MLPPlan, ModelPlan, OtherMixture
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.plan_reader import plan_model
from penstock_enginecore.native.library import open_library
from tests.fakes.models.fused_models import load_probed, save_varied_model
from tests.fakes.models.tiny_models import SLIDING_WINDOW
from tests.fakes.models.torch_kernels import TorchKernels


def plan(architecture: str, path: Path, **changes: Any) -> ModelPlan:
    save_varied_model(architecture, path, **changes)
    probed = load_probed(path)
    return plan_model(probed.model.module, probed.calls)


def test_llama_has_two_norms_and_three_projections(tmp_path: Path) -> None:
    found = plan("llama", tmp_path)
    layer = found.layers[1]
    assert layer.name == "model.layers.1"
    assert len(layer.attention.qkv) == 3
    assert len(layer.mlp.gate_up) == 2
    assert layer.norms_after == (None, None)
    assert layer.attention.norms is None
    assert {norm.offset for norm in found.norms} == {0.0}
    assert (layer.mlp.activation, found.embedding_scale, found.logits_softcap) == ("silu", 1.0, None)
    assert found.rotary_variants == ((),)


def test_gemma_2_has_four_norms_around_one_windows_soft_caps_and_a_scaled_embedding(tmp_path: Path) -> None:
    found = plan("gemma2", tmp_path)
    windows = [layer.attention.params.sliding_window for layer in found.layers]
    assert windows == [SLIDING_WINDOW, None]
    layer = found.layers[0]
    assert None not in (*layer.norms_before, *layer.norms_after)
    assert {norm.offset for norm in found.norms} == {1.0}
    assert layer.mlp.activation == "gelu_tanh"
    assert layer.attention.params.softcap == 50.0
    assert found.logits_softcap == 30.0
    assert found.embedding_scale == pytest.approx(48**0.5)


def test_gemma_3_norms_queries_and_keys_and_turns_each_kind_of_layer_otherwise(tmp_path: Path) -> None:
    found = plan("gemma3", tmp_path, layer_types=["sliding_attention", "full_attention"])
    assert found.rotary_variants == (("full_attention",), ("sliding_attention",))
    assert [layer.attention.rotary for layer in found.layers] == [1, 0]
    assert found.layers[0].attention.norms is not None
    assert found.layers[0].attention.norms[0].offset == 1.0


def test_gemma_4_has_heads_of_two_shapes_and_values_that_are_the_keys_without_their_norm(tmp_path: Path) -> None:
    found = plan("gemma4", tmp_path)
    sliding, full = found.layers
    attentions = (sliding.attention, full.attention)
    assert [(each.num_heads, each.num_kv_heads, each.head_size) for each in attentions] == [(4, 2, 16), (4, 1, 32)]
    assert [(len(each.qkv), each.keys_as_values) for each in attentions] == [(3, False), (2, True)]
    assert [each.value_eps for each in attentions] == [1e-6, 1e-6]
    assert [each.params.scaling for each in attentions] == [1.0, 1.0]
    assert [found.rotary_size(each.rotary) for each in attentions] == [16, 32]
    assert 0.5 < sliding.layer_scale < 1.0
    assert (sliding.beside, found.logits_softcap) == (None, 30.0)


def test_gemma_4_may_have_experts_beside_its_mlp(tmp_path: Path) -> None:
    found = plan("gemma4_moe", tmp_path)
    layer = found.layers[0]
    assert isinstance(layer.mlp, MLPPlan)
    assert layer.beside is not None
    assert (layer.beside.top_k, layer.beside.activation, len(layer.beside.scales)) == (2, "gelu_tanh", 4)
    assert layer.beside.router_factor == pytest.approx(48**-0.5)
    assert set(map(id, layer.beside.norms)) <= set(map(id, found.norms))


def test_gemma_4_may_share_keys_and_have_embeddings_of_token_ids_in_each_layer(tmp_path: Path) -> None:
    found = plan("gemma4_shared", tmp_path)
    attentions = [layer.attention for layer in found.layers]
    assert [(len(each.qkv), each.donor) for each in attentions] == [(3, None)] * 3 + [(1, 2), (1, 1)]
    assert [(each.num_kv_heads, each.head_size) for each in attentions[3:]] == [(2, 16), (2, 32)]
    assert [(each.value_eps, each.keys_as_values) for each in attentions[2:]] == [(1e-6, False)] + [(None, False)] * 2
    assert [len(each.norms) - each.norms.count(None) for each in attentions] == [2, 2, 2, 1, 1]
    assert [layer.mlp.down.in_features for layer in found.layers] == [64, 64, 64, 128, 128]
    embeddings = [layer.embedding for layer in found.layers]
    assert [(each.gate.out_features, each.projection.in_features) for each in embeddings] == [(8, 8)] * 5
    inputs = found.layer_inputs
    assert inputs is not None
    assert (inputs.projection.out_features, inputs.norm.size, inputs.id_of_media) == (5 * 8, 8, 0)
    assert (inputs.projection_scale, inputs.scale) == pytest.approx((48**-0.5, 2**-0.5))
    assert {id(each.norm) for each in (*embeddings, inputs)} <= set(map(id, found.norms))
    assert inputs.projection in found.linears


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"embedding": {"activation": "silu"}},
            "embeddings of token ids in each layer have another activation function",
        ),
        ({"mlp": OtherMixture("")}, "some of the model's layers share keys and values, and some have other MLPs"),
    ],
)
def test_the_cpu_decoder_refuses_other_parts_beside_shared_keys_and_embeddings(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    found = plan("gemma4_shared", tmp_path)
    first = found.layers[0]
    of = {name: replace(first.embedding, **new) if isinstance(new, dict) else new for name, new in changes.items()}
    other = replace(found, layers=(replace(first, **of), *found.layers[1:]))
    library = open_library("auto", 1)
    assert unsuitable(library, found, {}) is None
    assert reason in (unsuitable(library, other, {}) or "")


@pytest.mark.parametrize("parallel", [False, True])
def test_gpt_neox_has_one_projection_whose_rows_are_grouped_by_head(parallel: bool, tmp_path: Path) -> None:
    found = plan("gpt_neox", tmp_path, use_parallel_residual=parallel)
    layer = found.layers[0]
    assert (len(layer.attention.qkv), layer.attention.by_head, layer.parallel) == (1, True, parallel)
    assert (layer.mlp.gated, layer.mlp.activation, found.norm.centered) == (False, "gelu", True)
    rows = torch.arange(4 * 3 * 12)
    assert rows_by_kind(layer.attention, rows)[:24].tolist() == [*range(12), *range(36, 48)]
    assert rows_by_kind(layer.attention, rows)[48:60].tolist() == list(range(12, 24))


def test_phi_3_is_merged_already(tmp_path: Path) -> None:
    layer = plan("phi3", tmp_path).layers[0]
    assert (len(layer.attention.qkv), len(layer.mlp.gate_up)) == (1, 1)
    assert (layer.attention.num_heads, layer.attention.num_kv_heads, layer.attention.head_size) == (4, 2, 12)


def test_granite_multiplies_inputs_what_is_added_and_logits(tmp_path: Path) -> None:
    found = plan("granite", tmp_path, embedding_multiplier=3.0)
    assert (found.embedding_scale, found.input_scale, found.logits_divisor) == (1.0, 3.0, 2.0)
    assert [layer.residual_scale for layer in found.layers] == [0.7, 0.7]
    assert found.layers[0].attention.params.scaling == 0.2


def test_layers_with_experts_stand_beside_layers_without(tmp_path: Path) -> None:
    found = plan("qwen3_moe", tmp_path, mlp_only_layers=[0], norm_topk_prob=False)
    dense, sparse = (layer.mlp for layer in found.layers)
    assert isinstance(dense, MLPPlan)
    assert isinstance(sparse, ExpertsPlan)
    assert (sparse.num_experts, sparse.top_k, sparse.renormalize, sparse.activation) == (4, 2, False, "silu")
    assert len(found.linears) == 4 + 3 + 4


def test_mixtral_makes_the_weights_of_experts_sum_to_one(tmp_path: Path) -> None:
    [first, _] = plan("mixtral", tmp_path).layers
    assert isinstance(first.mlp, ExpertsPlan)
    assert first.mlp.renormalize


def test_gpt_oss_has_sinks_and_experts_with_biases(tmp_path: Path) -> None:
    found = plan("gpt_oss", tmp_path)
    layer = found.layers[0]
    assert layer.attention.params.sinks is not None
    assert isinstance(layer.mlp, ExpertsPlan)
    assert layer.mlp.activation == ClampedGate(1.702, 7.0)
    assert layer.mlp.biases is not None
    assert found.family.turned == "half"


def test_llama_4_scales_the_inputs_of_its_experts(tmp_path: Path) -> None:
    dense, sparse = (layer.mlp for layer in plan("llama4_text", tmp_path).layers)
    assert isinstance(dense, MLPPlan)
    assert isinstance(sparse, ExpertsPlan)
    assert sparse.scales_inputs
    assert sparse.shared is not None
    assert (sparse.num_experts, sparse.top_k, sparse.renormalize, sparse.shared_gate) == (4, 2, False, None)
    with pytest.raises(UnsuitableError, match="a mixture of experts scales the inputs of its experts"):
        mlp_of(sparse, 1.0, TorchKernels())


def test_the_shared_expert_of_qwen2_has_a_gate(tmp_path: Path) -> None:
    mlp = plan("qwen2_moe", tmp_path).layers[0].mlp
    assert isinstance(mlp, ExpertsPlan)
    assert mlp.shared is not None
    assert mlp.shared_gate is not None
    assert mlp.shared_gate.out_features == 1
    with pytest.raises(UnsuitableError, match="a mixture of experts has a gate for its shared expert"):
        mlp_of(mlp, 1.0, TorchKernels())


def test_an_mlp_may_have_no_gate(tmp_path: Path) -> None:
    mlp = plan("arcee", tmp_path).layers[0].mlp
    assert isinstance(mlp, MLPPlan)
    assert (len(mlp.gate_up), mlp.activation, mlp.gated) == (1, "relu2", False)
    with pytest.raises(UnsuitableError, match="the model's MLPs have no gate"):
        mlp_of(mlp, 1.0, TorchKernels())


def test_hyperclova_x_may_have_norms_after_attention_and_mlp(tmp_path: Path) -> None:
    for name, has_norms in (("with", True), ("without", False)):
        layer = plan("hyperclovax", tmp_path / name, use_post_norm=has_norms).layers[0]
        assert [norm is not None for norm in layer.norms_before] == [True, True]
        assert [norm is not None for norm in layer.norms_after] == [has_norms, has_norms]


def test_another_class_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(
        UnsuitableError,
        match="PersimmonForCausalLM is not one of the supported classes: ArceeForCausalLM, Cohere2ForCausalLM, ",
    ):
        plan("persimmon", tmp_path)


def test_an_activation_that_is_not_known_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(UnsuitableError, match=r"model\.layers\.0\.mlp uses the activation function Tanh"):
        plan("llama", tmp_path, hidden_act="tanh")


@pytest.mark.parametrize(
    ("architecture", "settings", "reason"),
    [
        ("cohere", {"use_qk_norm": True}, r"self_attn\.q_norm has a separate weight for each head"),
        ("olmo", {"clip_qkv": 2.0}, "the model clips queries, keys and values"),
    ],
)
def test_a_setting_that_decoders_do_not_compute_is_refused_by_name(
    architecture: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsuitableError, match=reason):
        plan(architecture, tmp_path, **settings)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("glm4", "rotates neighbouring elements together, or the model applies norms to queries and keys after"),
        (
            "hunyuan_v1_dense",
            "rotates neighbouring elements together, or the model applies norms to queries and keys after",
        ),
        ("ministral3", r"model\.layers\.0 scales queries by position"),
        ("phi", "the model has norms that subtract the mean, or norms without a weight"),
    ],
)
def test_the_gpu_decoder_refuses_parts_without_a_kernel_by_name(architecture: str, reason: str, tmp_path: Path) -> None:
    save_varied_model(architecture, tmp_path)
    with pytest.raises(UnsuitableError, match=reason):
        fused_plan(load_probed(tmp_path))


class Quantized(torch.nn.Linear):
    """A linear layer that computes something else."""


def add_a_part(model: Any) -> None:
    model.model.layers[1].self_attn.sub_norm = torch.nn.Identity()


def take_a_part(model: Any) -> None:
    del model.model.layers[1].mlp.act_fn


def add_a_parameter(model: Any) -> None:
    model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))


def replace_a_linear(model: Any) -> None:
    model.model.layers[0].mlp.up_proj = Quantized(48, 64)


def replace_a_norm(model: Any) -> None:
    model.model.norm = torch.nn.RMSNorm(48)


def call_in_another_order(model: Any) -> None:
    model.model.layers = torch.nn.ModuleList(reversed(model.model.layers))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (add_a_part, r"model\.layers\.1\.self_attn has unknown or missing parts: sub_norm"),
        (take_a_part, r"model\.layers\.1\.mlp has unknown or missing parts: act_fn"),
        (add_a_parameter, r"model\.layers\.0\.self_attn has unknown parameters: sinks"),
        (replace_a_linear, r"model\.layers\.0\.mlp\.up_proj is a .*\.Quantized, not a Linear of torch\.nn"),
        (replace_a_norm, r"model\.norm is a torch\.nn\..*\.RMSNorm, not a RMSNorm of transformers"),
        (call_in_another_order, "the model does not call its layers in the order"),
    ],
)
def test_an_unknown_module_is_refused_by_name(change: Any, reason: str, tmp_path: Path) -> None:
    save_varied_model("llama", tmp_path)
    probed = load_probed(tmp_path)
    change(probed.model.module)
    with pytest.raises(UnsuitableError, match=reason):
        plan_model(probed.model.module, probed.calls)


def test_a_class_of_the_same_name_from_elsewhere_is_refused(tmp_path: Path) -> None:
    save_varied_model("llama", tmp_path)
    probed = load_probed(tmp_path)
    module = probed.model.module
    module.__class__ = type("LlamaForCausalLM", (type(module),), {"__module__": "modeling_of_a_checkpoint"})
    with pytest.raises(UnsuitableError, match=r"the model is a modeling_of_a_checkpoint\.LlamaForCausalLM"):
        plan_model(probed.model.module, probed.calls)

"""Modules of a model that support adapters."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock_enginecore.lora.errors import LoraReason
from penstock_enginecore.lora.target import AdapterTarget, BaseSample
from penstock_enginecore.models.dtypes import NarrowWeight
from penstock_enginecore.models.quantization.layers import QuantizedLinear
from tests.fakes.models.tiny_models import ARCHITECTURES, tiny_config


def skeleton(architecture: str, **changes: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(architecture, **changes))


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_a_target_and_no_part_of_all_linear(tied: bool) -> None:
    target = AdapterTarget.of(skeleton("llama", tie_word_embeddings=tied))
    assert target.linears["lm_head"] == (320, 48)
    assert target.heads == {"lm_head"}
    assert target.all_linear == target.linears.keys() - {"lm_head"}


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gpt_neox", "minicpm3", "gemma2", "opt"])
def test_all_linear_layers_of_dense_models_are_targets_with_their_shapes(architecture: str) -> None:
    model = skeleton(architecture)
    wanted = {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert AdapterTarget.of(model).linears == wanted


@pytest.mark.parametrize(
    ("architecture", "refused", "taken"),
    [
        ("mixtral", "model.layers.0.mlp.gate", "model.layers.0.self_attn.q_proj"),
        ("qwen2_moe", "model.layers.1.mlp.shared_expert.up_proj", "model.layers.1.self_attn.o_proj"),
        ("qwen2_moe", "model.layers.1.mlp.shared_expert_gate", "model.layers.1.self_attn.o_proj"),
        ("deepseek_v3", "model.layers.1.mlp.shared_experts.down_proj", "model.layers.0.mlp.down_proj"),
        ("llama4_text", "model.layers.1.feed_forward.router", "model.layers.0.feed_forward.up_proj"),
        ("gemma4_moe", "model.layers.0.experts", "model.layers.0.self_attn.q_proj"),
        ("gemma4_moe", "model.layers.0.router.proj", "model.layers.0.mlp.down_proj"),
        ("gpt_oss", "model.layers.0.mlp.router", "model.layers.0.self_attn.v_proj"),
        ("granitemoe", "model.layers.0.block_sparse_moe.router", "model.layers.0.self_attn.k_proj"),
    ],
)
def test_experts_and_what_lies_beside_them_are_no_targets(architecture: str, refused: str, taken: str) -> None:
    target = AdapterTarget.of(skeleton(architecture))
    assert target.unserved[refused].reason == LoraReason.EXPERTS
    assert refused not in target.linears
    assert taken in target.linears


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_weight_of_two_axes_is_a_target_or_said_to_be_none(architecture: str) -> None:
    model = skeleton(architecture)
    target = AdapterTarget.of(model)
    for name, module in model.named_modules():
        if any(weight.dim() == 2 for weight in module.parameters(recurse=False)):
            assert (name in target.linears) != (name in target.unserved), name


def test_embeddings_and_conv1d_are_no_targets() -> None:
    target = AdapterTarget.of(skeleton("gpt2"))
    assert target.unserved["transformer.wte"].reason == LoraReason.EMBEDDING
    assert target.unserved["transformer.h.0.mlp.c_fc"].reason == LoraReason.CONV1D
    assert list(target.linears) == ["lm_head"]


def test_quantized_linear_layers_are_targets_and_other_subclasses_are_refused() -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = skeleton("llama")
    linear = model.get_submodule("model.layers.0.self_attn.q_proj")
    scheme: Any = None
    model.set_submodule("model.layers.0.self_attn.q_proj", QuantizedLinear(linear, scheme, {"weight": torch.ones(2)}))
    model.set_submodule("model.layers.1.self_attn.q_proj", Doubled(48, 48))
    target = AdapterTarget.of(model)
    assert target.linears["model.layers.0.self_attn.q_proj"] == (48, 48)
    assert target.unserved["model.layers.1.self_attn.q_proj"].reason == LoraReason.MODULE
    # PEFT would adapt this layer, so the engine must refuse it.
    assert "model.layers.1.self_attn.q_proj" in target.all_linear


def test_samples_agree_with_rounded_copies_and_with_no_other_weights() -> None:
    torch.manual_seed(0)
    weight = torch.randn(1000, 16)
    sample = BaseSample.of(weight)
    assert sample.shape == (1000, 16)
    assert len(sample.rows) == 64
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert sample.agrees(weight.to(dtype).float())
    for row in (0, 999):
        other = weight.clone()
        other[row] *= 1.02
        assert not sample.agrees(other)
    assert BaseSample.of(NarrowWeight(weight.bfloat16())).agrees(weight)
    assert BaseSample.of(weight[:3]).agrees(weight[:3])
    assert BaseSample.of(weight[0]).agrees(weight[0])

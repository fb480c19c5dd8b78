"""Experts that keep their quantized weights: what is kept, what they compute, and what becomes of it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock_enginecore.models.quantization.kept import dequantize_kept
from penstock_enginecore.models.quantization.layers import DOWN, GATE_UP, QuantizedExperts
from tests.fakes.models.quantized_models import save_quantized_model
from tests.unit.enginecore.models.quantization.test_layers import load, logits


def experts(model: torch.nn.Module) -> list[QuantizedExperts]:
    return [module for module in model.modules() if isinstance(module, QuantizedExperts)]


@pytest.mark.parametrize(
    ("architecture", "form"),
    [("mixtral", "awq"), ("qwen3_moe", "fp8-blocks"), ("deepseek_v3", "compressed-int4"), ("gpt_oss", "mxfp4")],
)
def test_experts_compute_as_those_that_do_not_keep_them(architecture: str, form: str, tmp_path: Path) -> None:
    save_quantized_model(architecture, form, tmp_path, hidden_size=64)
    keeping, dense = load(tmp_path), load(tmp_path, keep=False)
    found = experts(keeping.module)
    assert len(found) == (1 if architecture == "deepseek_v3" else 2)
    assert all(each.experts.get_parameter(name).numel() == 0 for each in found for name in (GATE_UP, DOWN))
    expected = logits(dense)
    assert torch.equal(logits(keeping), expected)
    assert dequantize_kept(keeping.module, keeping.dtype) > 0
    assert experts(keeping.module) == []
    assert torch.equal(logits(keeping), expected)
    assert sum(p.numel() for p in keeping.module.parameters()) == sum(p.numel() for p in dense.module.parameters())


def test_experts_of_which_one_matrix_is_dense_are_dequantized(tmp_path: Path) -> None:
    save_quantized_model("qwen3_moe", "fp8-blocks", tmp_path, hidden_size=64)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    del tensors[f"{name}_scale_inv"]
    tensors[name] = tensors[name].float()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    [layer] = [name for name, each in load(tmp_path).module.named_modules() if isinstance(each, QuantizedExperts)]
    assert layer == "model.layers.0.mlp.experts"

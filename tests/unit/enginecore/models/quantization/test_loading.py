"""Scales of an fp8 KV cache, as checkpoints name them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock_enginecore.attention.kv_cache import KVScales
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.quantization.layers import DOWN, GATE_UP, QuantizedExperts
from penstock_enginecore.models.quantization.loading import dequantize_kept, read_kv_scales
from penstock_enginecore.models.quantization.weights import open_tensors
from tests.fakes.models.quantized_models import save_quantized_model
from tests.unit.enginecore.models.quantization.test_layers import load, logits


def read(directory: Path, **tensors: torch.Tensor) -> dict[str, KVScales]:
    named = {f"layers.0.{name.replace('__', '.')}": tensor for name, tensor in tensors.items()}
    save_file({**named, "layers.0.mlp.weight_scale": torch.ones(3)}, directory / "model.safetensors", {"format": "pt"})
    with open_tensors(directory) as stored:
        return read_kv_scales(stored)


def test_each_tool_has_its_own_names(tmp_path: Path) -> None:
    two, half = torch.tensor([2.0], dtype=torch.bfloat16), torch.tensor(0.5)
    both = {"layers.0.attn": KVScales(2.0, 0.5)}
    assert read(tmp_path, attn__k_scale=two, attn__v_scale=half) == both
    assert read(tmp_path, attn__k_proj__k_scale=two, attn__v_proj__v_scale=half) == both
    assert read(tmp_path, attn__kv_scale=two) == {"layers.0.attn": KVScales(2.0, 2.0)}
    assert read(tmp_path) == {}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(4), r"attn\.k_scale is F32 \[4\]; a scale of the KV cache must be one number per layer"),
        (torch.tensor(1), "attn.k_scale is I64"),
        (torch.tensor(0.0), r"attn\.k_scale is 0\.0; a scale of the KV cache must be a number above 0"),
        (torch.tensor(torch.nan), "attn.k_scale is nan"),
    ],
)
def test_what_is_no_scale_of_a_layer_is_refused_by_name(value: torch.Tensor, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=said):
        read(tmp_path, attn__k_scale=value, attn__v_scale=torch.tensor(1.0))


def test_a_scale_of_keys_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r"layers\.0\.attn has an fp8 KV cache scale for only its keys or only its values"
    ):
        read(tmp_path, attn__k_scale=torch.tensor(1.0))


# Experts that keep their quantized weights: memory, results, and release.


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

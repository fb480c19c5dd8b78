"""Weights of a loaded model are rounded to 8-bit floats, and the fused decoder keeps them."""

from pathlib import Path

import pytest
import torch

from penstock_enginecore.forward.cuda.decoder import FusedForward
from penstock_enginecore.forward.cuda.packing import PackedFloat8
from penstock_enginecore.models.quantization.layers import DOWN, GATE_UP, QuantizedExperts, QuantizedLinear
from penstock_enginecore.models.quantization.rounding import round_to_float8, rounded
from tests.fakes.models.fused_models import load_probed, prove, save_varied_model
from tests.fakes.models.torch_kernels import TorchKernels

_SIZES = {GATE_UP: (64, 32), DOWN: (32, 64)}


class Whole(torch.nn.Module):
    """Model whose only layer is a mixture of experts."""

    def __init__(self, mixture: torch.nn.Module) -> None:
        super().__init__()
        self.mixture = mixture

    def get_output_embeddings(self) -> None:
        """Return None, because the model has no output head."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_rounded_to_the_nearest_8_bit_floats_of_its_row(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(6, 64) * torch.logspace(-3, 2, 6)[:, None]).to(dtype)
    weight[3] = 0.0
    tensors, error = rounded(weight)
    scales = tensors["_scale"]
    assert tensors[""].dtype == torch.float8_e4m3fn
    assert torch.equal(scales[3], torch.tensor([1.0]))
    assert bool((tensors[""][[0, 1, 2, 4, 5]].float().abs().amax(1) == 448).all())
    difference = tensors[""].float() * scales - weight.float()
    # Half of the distance of two neighbours: 1/16 of a normal number, or 2 ** -10 of a subnormal one.
    allowed = torch.maximum(weight.float().abs() / 16, scales * 2**-10)
    assert bool((difference.abs() <= allowed * 1.001).all())
    assert error == pytest.approx(float(difference.double().norm() / weight.double().norm()), rel=1e-4)


def test_the_largest_float16_does_not_become_nan() -> None:
    tensors, _ = rounded(torch.full((1, 32), 65504.0, dtype=torch.float16))
    assert not bool(tensors[""].float().isnan().any())


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "mixtral", "gpt_oss"])
def test_the_decoder_serves_a_rounded_model_from_8_bit_weights(architecture: str, tmp_path: Path) -> None:
    save_varied_model(architecture, tmp_path, hidden_size=64)
    probed = load_probed(tmp_path)
    module = probed.model.module
    mixtures = [layer for layer in module.modules() if GATE_UP in layer._parameters]
    numbers = sum(layer.get_parameter(name).numel() for layer in mixtures for name in (GATE_UP, DOWN))
    linears = [layer for layer in module.modules() if type(layer) is torch.nn.Linear]
    error = round_to_float8(module)
    assert 0 < error < 1 / 16
    assert type(module.get_output_embeddings()) is torch.nn.Linear
    proven = prove(probed, lambda: FusedForward(probed, TorchKernels()))
    assert proven.serves is not None, proven.reasons
    kept = [layer for layer in module.modules() if isinstance(layer, QuantizedLinear)]
    assert len(kept) == len(linears) - 1
    experts = [layer for layer in module.modules() if isinstance(layer, QuantizedExperts)]
    assert [layer.experts for layer in experts] == mixtures
    assert len(mixtures) == (0 if architecture == "llama" else 2)
    kept += [stack for layer in experts for stack in (layer.gate_up, layer.down)]
    assert all(isinstance(layer.scheme, PackedFloat8) for layer in kept)
    held = [weight for layer in proven.serves._layers._layers for weight in layer.mlp.held if mixtures]
    assert sum(part.numel() for each in held for part in each.tensors if part.dtype == torch.int16) == numbers // 2


@pytest.mark.parametrize("transposed", [False, True])
def test_each_row_of_each_expert_is_rounded_with_its_own_scale(transposed: bool) -> None:
    torch.manual_seed(0)
    mixture = torch.nn.Module()
    dense = {name: torch.randn(3, *size) * 10.0 ** torch.randn(3, size[0], 1) for name, size in _SIZES.items()}
    for name, weight in dense.items():
        own = weight.mT.contiguous() if transposed else weight
        mixture.register_parameter(name, torch.nn.Parameter(own))
    mixture.is_transposed = transposed
    whole = Whole(mixture)
    error = round_to_float8(whole)
    assert isinstance(whole.mixture, QuantizedExperts)
    errors = []
    for name, stack in ((GATE_UP, whole.mixture.gate_up), (DOWN, whole.mixture.down)):
        expected = torch.stack([dequantized(weight) for weight in dense[name]])
        found = stack.dequantize(torch.float32)
        assert torch.equal(found, expected.mT if transposed else expected)
        errors.append(float((expected - dense[name]).double().norm() / dense[name].double().norm()))
    assert error == pytest.approx(max(errors), rel=1e-4)
    assert [mixture.get_parameter(name).numel() for name in (GATE_UP, DOWN)] == [0, 0]


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight`` ``[rows, columns]`` rounded to 8-bit floats with a scale per row, as float32."""
    scales = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scales).to(torch.float8_e4m3fn).float() * scales

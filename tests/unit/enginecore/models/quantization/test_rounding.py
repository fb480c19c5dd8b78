"""Weights of a loaded model are rounded to 8-bit floats, and the fused decoder keeps them."""

from pathlib import Path

import pytest
import torch

from penstock_enginecore.forward.cuda.decoder import FusedForward
from penstock_enginecore.forward.cuda.packing import PackedFloat8
from penstock_enginecore.models.quantization.layers import QuantizedLinear
from penstock_enginecore.models.quantization.rounding import round_to_float8, rounded
from tests.fakes.models.fused_models import load_probed, prove, save_varied_model
from tests.fakes.models.torch_kernels import TorchKernels


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


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_the_decoder_serves_a_rounded_model_from_8_bit_weights(architecture: str, tmp_path: Path) -> None:
    save_varied_model(architecture, tmp_path, hidden_size=64)
    probed = load_probed(tmp_path)
    module = probed.model.module
    linears = [layer for layer in module.modules() if type(layer) is torch.nn.Linear]
    error = round_to_float8(module)
    assert 0 < error < 1 / 16
    assert type(module.get_output_embeddings()) is torch.nn.Linear
    proven = prove(probed, lambda: FusedForward(probed, TorchKernels()))
    assert proven.serves is not None, proven.reasons
    kept = [layer for layer in module.modules() if isinstance(layer, QuantizedLinear)]
    assert len(kept) == len(linears) - 1
    assert all(isinstance(layer.scheme, PackedFloat8) for layer in kept)

"""Products of many rows that round activations to 8-bit floats, and the conditions for them."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.forward.cuda.activations import rounds_activations
from penstock_enginecore.forward.cuda.decoder import FusedForward
from penstock_enginecore.forward.cuda.linear import MANY_ROWS, keeps, merged
from penstock_enginecore.forward.modules import probe_model
from penstock_enginecore.models.loader import load_model
from penstock_enginecore.models.quantization.float8 import Float8
from penstock_enginecore.models.quantization.layers import QuantizedLinear
from penstock_enginecore.models.quantization.rounding import rounded
from tests.fakes.models.fused_models import prove
from tests.fakes.models.quantized_models import save_quantized_model
from tests.fakes.models.torch_kernels import TorchKernels, rounded_rows

CPU = torch.device("cpu")
COLUMNS = 64
ROUNDED = Float8("row", "_scale", rounds_activations=True)


def layer(scheme: Float8 = ROUNDED, rows: int = 48) -> QuantizedLinear:
    torch.manual_seed(0)
    linear = torch.nn.Linear(COLUMNS, rows)
    return QuantizedLinear(linear, scheme, rounded(linear.weight.detach())[0])


@pytest.mark.parametrize(
    ("rows", "dtype", "scheme", "features", "kernels", "rounds"),
    [
        (MANY_ROWS, torch.bfloat16, ROUNDED, 48, {}, True),
        (MANY_ROWS, torch.float16, ROUNDED, 48, {}, True),
        (MANY_ROWS - 1, torch.bfloat16, ROUNDED, 48, {}, False),
        (MANY_ROWS, torch.float32, ROUNDED, 48, {}, False),
        (MANY_ROWS, torch.bfloat16, replace(ROUNDED, rounds_activations=False), 48, {}, False),
        (MANY_ROWS, torch.bfloat16, ROUNDED, 40, {}, False),  # torch's product needs multiples of 16
        (MANY_ROWS, torch.bfloat16, ROUNDED, 48, {"rounds_activations": False}, False),
        (MANY_ROWS, torch.bfloat16, ROUNDED, 48, {"batch_invariant": True}, False),
    ],
)
@torch.inference_mode()
def test_a_product_rounds_the_activations_of_many_rows(
    rows: int,
    dtype: torch.dtype,
    scheme: Float8,
    features: int,
    kernels: dict[str, bool],
    rounds: bool,
) -> None:
    linear, fake = layer(scheme, features), TorchKernels()
    for name, value in {"rounds_activations": True, **kernels}.items():
        setattr(fake, name, value)
    assert linear.bias is not None
    linear.bias.data = linear.bias.data.to(dtype)
    product, out = merged([linear], fake), torch.empty(rows, features, dtype=dtype)
    x = torch.randn(rows, COLUMNS).to(dtype)
    numbers, scales = rounded_rows(x)
    dense = linear.scheme.dequantize(linear.tensors, torch.float32)
    inputs = numbers.float() * scales if rounds else x.float()
    product.affine(x, out, 0.5)
    expected = 0.5 * (inputs @ dense.t() + linear.bias.float())
    # Rounded activations differ by up to 1/16, so the norm of the differences shows which product was used.
    assert float((out.float() - expected).norm() / expected.norm()) < 0.01


def chooses(kernels: Any = None, scheme: Float8 = ROUNDED, dtype: torch.dtype = torch.bfloat16, **uses: Any) -> bool:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), layer(scheme))
    return rounds_activations(kernels or TorchKernels(), KernelsConfig(**uses), module, dtype, CPU)


def test_activations_are_rounded_if_checkpoint_settings_and_device_allow_it() -> None:
    assert chooses()
    assert chooses(dtype=torch.float16)
    assert not chooses(scheme=replace(ROUNDED, rounds_activations=False))
    assert not chooses(fp8_activations="off")
    assert not chooses(batch_invariant=True)
    assert not chooses(dtype=torch.float32)


class Broken(TorchKernels):
    """Kernels whose scaled product ignores the factor."""

    def scaled_product(self, x: Any, weight: Any, bias: Any, scale: float, out: Any) -> None:
        super().scaled_product(x, weight, bias, 1.0, out)


class Failing(TorchKernels):
    """Kernels whose scaled product is not available."""

    def scaled_product(self, x: Any, weight: Any, bias: Any, scale: float, out: Any) -> None:
        raise RuntimeError("no such product")


@pytest.mark.parametrize(
    ("kernels", "said"),
    [(Broken(), "a product differs by 100.0%"), (Failing(), "RuntimeError: no such product")],
)
def test_a_wrong_product_is_logged_and_not_used(
    kernels: TorchKernels, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not chooses(kernels)
    assert f"although the checkpoint has 8-bit activations reason={said}" in caplog.text


def test_an_older_gpu_keeps_activations(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    module, kernels = torch.nn.Sequential(layer()), TorchKernels()
    with caplog.at_level(logging.WARNING):
        assert not rounds_activations(kernels, KernelsConfig(), module, torch.bfloat16, torch.device("cuda"))
    assert "reason=the GPU has compute capability 8.6, and 8.9 is required" in caplog.text


@torch.inference_mode()
def test_a_decoder_rounds_in_each_linear_layer_except_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_quantized_model("llama", "fbgemm", tmp_path, hidden_size=64)
    monkeypatch.setattr("penstock_enginecore.forward.cuda.linear.MANY_ROWS", 1)
    config = ModelConfig(path=str(tmp_path), dtype="bfloat16")
    probed = probe_model(load_model(config, CPU, lambda line: None, keeps), CPU, 16)
    kernels, seen = TorchKernels(), []
    scaled = kernels.scaled_product
    monkeypatch.setattr(kernels, "scaled_product", lambda *args: (seen.append(args[1]), scaled(*args)))
    assert rounds_activations(kernels, KernelsConfig(), probed.model.module, torch.bfloat16, CPU)
    kernels.rounds_activations = True
    seen.clear()
    prove(probed, lambda: FusedForward(probed, kernels))
    assert len({weight.numbers.data_ptr() for weight in seen}) == 2 * 4  # qkv, o, gate and up, down

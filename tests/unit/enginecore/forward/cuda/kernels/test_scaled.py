"""Products whose activations are rounded to 8-bit floats, in Triton's interpreter."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_enginecore.forward.cuda.kernel_api import Float8Weight
from penstock_enginecore.forward.cuda.packing import float8_part, pack_float8
from tests.fakes.models.interpreted_kernels import interpreted, round_float8
from tests.fakes.models.torch_kernels import TorchKernels, rounded_rows

scaled = interpreted("scaled")


@pytest.fixture(autouse=True, scope="module")
def exact() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        round_float8(patch)
        yield


def weight_of(out_features: int, in_features: int) -> tuple[Float8Weight, torch.Tensor]:
    """Return a packed weight, and its elements before they were packed."""
    numbers = torch.randn(out_features, in_features).mul_(50).to(torch.float8_e4m3fn)
    part = float8_part(in_features, in_features)
    packed = pack_float8(numbers.clone(), part)
    return Float8Weight(packed, torch.rand(1, out_features) + 0.1, in_features, part), numbers


@settings(max_examples=20)
@given(
    rows=st.integers(0, 5),
    columns=st.integers(1, 70),
    block=st.sampled_from([16, 64]),
    exponent=st.integers(-48, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_rows_are_rounded_as_by_torch(rows: int, columns: int, block: int, exponent: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows + columns)
    x = (torch.randn(rows, columns, generator=generator) * 10.0 ** min(exponent, 4)).to(dtype)
    if dtype != torch.float16:
        x *= 10.0 ** max(exponent - 4, 0)
    x[1:2] = 0.0
    numbers, scales = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaled, "_BLOCK", block)
        scaled.round_rows(x, numbers, scales)
    expected, expected_scales = rounded_rows(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(numbers.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("shape", [(1, 32), (33, 96), (70, 256)])
def test_a_packed_weight_gets_its_byte_order_back(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, numbers = weight_of(*shape)
    out = torch.empty(shape, dtype=torch.float8_e4m3fn)
    scaled.unpack(weight, out)
    assert torch.equal(out.view(torch.uint8), numbers.view(torch.uint8))


@pytest.mark.parametrize(("by_row", "dtype"), [(True, torch.bfloat16), (False, torch.bfloat16), (False, torch.float16)])
@pytest.mark.parametrize(("biased", "scale"), [(False, 1.0), (True, 1.0), (True, 0.5)])
def test_a_product_is_that_of_the_rounded_rows(
    by_row: bool, dtype: torch.dtype, biased: bool, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(scaled, "by_row", lambda device, dtype: by_row)
    weight, _ = weight_of(48, 96)
    x, bias = torch.randn(7, 96).to(dtype), torch.randn(48).to(dtype) if biased else None
    memory, expected = torch.full((8, 48), torch.nan, dtype=dtype), torch.empty(7, 48, dtype=dtype)
    scaled.scaled_product(x, weight, bias, scale, memory[:7])
    TorchKernels().scaled_product(x, weight, bias, scale, expected)
    torch.testing.assert_close(memory[:7], expected, rtol=2e-2, atol=0.5 if dtype == torch.bfloat16 else 0.1)
    assert bool(memory[7].isnan().all())


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("out", torch.zeros(2, 17, dtype=torch.bfloat16), r"output \[2, 17\] do not fit 2 rows and 16 output features"),
        ("x", torch.zeros(32, 2, dtype=torch.bfloat16).t(), "all tensors must be contiguous"),
        (
            "weight",
            Float8Weight(torch.zeros(16, 16, dtype=torch.int16), torch.zeros(2, 16), 16, 16),
            r"scales \[2, 16\] and output \[2, 16\] do not fit",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str, changed: Any, said: str) -> None:
    weight, _ = weight_of(16, 32)
    x, out = torch.zeros(2, 32, dtype=torch.bfloat16), torch.empty(2, 16, dtype=torch.bfloat16)
    arguments: dict[str, Any] = {"x": x, "weight": weight, "bias": None, "scale": 1.0, "out": out, name: changed}
    with pytest.raises(ValueError, match=said):
        scaled.scaled_product(**arguments)

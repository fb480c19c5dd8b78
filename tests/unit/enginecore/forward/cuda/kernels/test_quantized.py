"""Products with weights of 8-bit floats against float64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_enginecore.forward.cuda.kernel_api import Float8Weight
from penstock_enginecore.forward.cuda.packing import float8_part, pack_float8
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.torch_kernels import TorchKernels

float8 = interpreted("quantized")


def draw(rows: int, out_features: int, in_features: int, width: int, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(rows * out_features + in_features)
    numbers = torch.randn(out_features, in_features, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-in_features // width), out_features, generator=generator) + 0.1
    x = torch.randn(rows, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype)
    part = float8_part(in_features, width)
    return x, Float8Weight(pack_float8(numbers, part), scales, width, part), bias


def check(rows: int, out_features: int, in_features: int, width: int, dtype: torch.dtype, *, biased: bool) -> None:
    x, weight, bias = draw(rows, out_features, in_features, width, dtype)
    memory = torch.full((rows + 1, out_features), torch.nan, dtype=dtype)
    expected = torch.empty(rows, out_features, dtype=torch.float64)
    arguments = (weight, bias if biased else None, 0.5)
    TorchKernels().quantized_product(x, *arguments, expected)
    float8.quantized_product(x, *arguments, memory[:rows])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(memory[:rows].double(), expected, rtol=tolerance, atol=tolerance * in_features**0.5)
    assert bool(memory[rows].isnan().all())


@settings(max_examples=15)
@given(
    rows=st.integers(1, 20),
    out_features=st.integers(1, 70),
    in_features=st.integers(1, 6).map(lambda count: 32 * count),
    width=st.sampled_from([16, 32, 64, 128, None]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    biased=st.booleans(),
)
def test_any_shape(
    rows: int, out_features: int, in_features: int, width: int | None, dtype: torch.dtype, biased: bool
) -> None:
    check(rows, out_features, in_features, width or in_features, dtype, biased=biased)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 17])
def test_slices_of_the_columns_are_summed(rows: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "_FEWEST_TILES", 1)
    _, weight, _ = draw(rows, 40, 160, 32, torch.float32)
    assert float8.slices_of(weight, float8.product_tiles(rows, 8)) == (5 if rows <= 16 else 1)
    check(rows, 40, 160, 32, torch.float32, biased=biased)


def test_slices_depend_on_the_shape_of_the_weight_alone() -> None:
    def slices(out_features: int, in_features: int, rows: int = 1) -> int:
        numbers = torch.empty(out_features, in_features // 2, dtype=torch.int16, device="meta")
        weight = Float8Weight(numbers, torch.empty(1, out_features, device="meta"), in_features, 64)
        return int(float8.slices_of(weight, float8.product_tiles(rows, 8)))

    assert [slices(4096, 4096, rows) for rows in (1, 2, 16, 17)] == [8, 8, 8, 1]
    assert slices(28_672, 4096) == 2
    assert slices(128_256, 4096) == 1
    assert slices(4096, 1024) == 2
    assert slices(128, 256) == 1


@pytest.mark.parametrize("rows", [65, 130])
def test_the_tiles_of_prompts(rows: int) -> None:
    check(rows, 136, 256, 128, torch.float16, biased=True)


def test_the_decoder_launches_it() -> None:
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels  # after the interpreter is set

    x, weight, bias = draw(3, 8, 64, 32, torch.float32)
    out, expected = torch.empty(2, 3, 8).unbind()
    for kernels, target in ((TritonKernels(), out), (TorchKernels(), expected)):
        kernels.quantized_product(x, weight, bias, 2.0, target)
    torch.testing.assert_close(out, expected)


def test_no_rows() -> None:
    x, weight, bias = draw(0, 8, 32, 32, torch.float32)
    float8.quantized_product(x, weight, bias, 1.0, torch.empty(0, 8))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.zeros(2, 48)}, r"\[8, 32\] and \[2, 8\] does not fit rows of 48 elements"),
        ({"out": torch.zeros(2, 9)}, r"an output of \[2, 9\] does not fit 2 rows of 8 elements"),
        ({"out": torch.zeros(8, 2).t()}, "tensors are not contiguous"),
        (
            {"weight": Float8Weight(torch.zeros(8, 32, dtype=torch.int16), torch.zeros(3, 8), 24, 16)},
            "parts of 16 columns do not divide blocks of 24 columns",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, Any], said: str) -> None:
    x, weight, bias = draw(2, 8, 64, 32, torch.float32)
    arguments = {"x": x, "weight": weight, "bias": bias, "scale": 1.0, "out": torch.zeros(2, 8), **change}
    with pytest.raises(ValueError, match=said):
        float8.quantized_product(**arguments)

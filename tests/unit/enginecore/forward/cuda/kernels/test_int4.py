"""Products with weights of 4 bits against float64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_enginecore.forward.cuda.kernel_api import Int4Weight
from penstock_enginecore.forward.cuda.packing import words_of_4_bits
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.torch_kernels import TorchKernels

int4 = interpreted("quantized")


def draw(rows: int, out_features: int, blocks: int, width: int, part: int, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(rows * out_features + blocks)
    in_features = blocks * width
    shape = out_features, words_of_4_bits(in_features, part)
    numbers = torch.randint(-0x8000, 0x8000, shape, generator=generator, dtype=torch.int16)
    zeros = torch.randint(0, 17, (blocks, out_features), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(blocks, out_features, generator=generator) * 0.1 + 0.01).half()
    x = torch.randn(rows, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype)
    return x, Int4Weight(numbers, zeros, scales, width, part, in_features), bias


def check(
    rows: int, out_features: int, blocks: int, width: int, part: int, dtype: torch.dtype, *, biased: bool
) -> None:
    x, weight, bias = draw(rows, out_features, blocks, width, part, dtype)
    memory = torch.full((rows + 1, out_features), torch.nan, dtype=dtype)
    expected = torch.empty(rows, out_features, dtype=torch.float64)
    arguments = (weight, bias if biased else None, 0.5)
    TorchKernels().quantized_product(x, *arguments, expected)
    int4.quantized_product(x, *arguments, memory[:rows])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(memory[:rows].double(), expected, rtol=tolerance, atol=tolerance * x.shape[1] ** 0.5)
    assert bool(memory[rows].isnan().all())


@settings(max_examples=15)
@given(
    rows=st.integers(1, 20),
    out_features=st.integers(1, 70),
    blocks=st.integers(1, 3),
    shape=st.sampled_from([(16, 16), (32, 32), (64, 32), (128, 32), (128, 16), (96, 32)]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    biased=st.booleans(),
)
def test_any_shape(
    rows: int, out_features: int, blocks: int, shape: tuple[int, int], dtype: torch.dtype, biased: bool
) -> None:
    check(rows, out_features, blocks, *shape, dtype, biased=biased)


@pytest.mark.parametrize("rows", [65, 130])
def test_the_tiles_of_prompts(rows: int) -> None:
    check(rows, 72, 2, 128, 32, torch.float16, biased=True)


def test_no_rows() -> None:
    x, weight, bias = draw(0, 8, 1, 32, 16, torch.float32)
    int4.quantized_product(x, weight, bias, 1.0, torch.empty(0, 8))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": torch.zeros(2, 48)}, r"\[8, 16\] and \[2, 8\] and \[2, 8\] does not fit rows of 48 elements"),
        ({"out": torch.zeros(2, 9)}, r"an output of \[2, 9\] does not fit 2 rows of 8 elements"),
        ({"out": torch.zeros(8, 2).t()}, "tensors are not contiguous"),
        ({"part": 8}, "parts of 8 columns do not divide blocks of 32 columns"),
        ({"part": 64}, "parts of 64 columns do not divide blocks of 32 columns"),
        ({"part": 32}, "16 words are not a row of 64 columns"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, Any], said: str) -> None:
    x, drawn, bias = draw(2, 8, 2, 32, 16, torch.float32)
    part = change.pop("part", 16)
    weight = Int4Weight(drawn.numbers, drawn.zeros, drawn.scales, drawn.width, part, 64)
    arguments = {"x": x, "weight": weight, "bias": bias, "scale": 1.0, "out": torch.zeros(2, 8), **change}
    with pytest.raises(ValueError, match=said):
        int4.quantized_product(**arguments)

"""Grouped products with dense weights against float64: rows of nobody stay, and rows are gathered and scattered."""

import dataclasses
from typing import Any

import pytest
import torch

from penstock_enginecore.forward.cuda.kernel_api import ClampedGate, SharedProduct
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.torch_kernels import TorchKernels

grouped = interpreted("grouped")
configurations = interpreted("configurations")
# The interpreter uses numpy's exp(), which warns about infinities.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
OUT, ROWS = 24, 76
CLAMPED = ClampedGate(alpha=1.702, limit=0.8)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def stacked(out_features: int, *, transposed: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return weights of five experts for rows of 40 elements."""
    return numbers(5, *((40, out_features) if transposed else (out_features, 40)), dtype=dtype)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("ends", [[0, 70, 71, 71, 74], [3, 3, 3, 3, 3], [0, 0, 0, 0, 0], [1, 2, 3, 4, 76]])
def test_a_product_is_that_of_float64_and_rows_of_nobody_stay(
    ends: list[int], invariant: bool, transposed: bool
) -> None:
    x, bias, weight = numbers(ROWS, 40), numbers(5, OUT), stacked(OUT, transposed=transposed)
    last = torch.tensor(ends, dtype=torch.int32)
    out, expected = torch.full((ROWS, OUT), torch.nan), torch.full((ROWS, OUT), torch.nan)
    TorchKernels().grouped_product(x, weight, bias, last, expected, transposed=transposed)
    grouped.grouped_product(x, weight, bias, last, out, transposed=transposed, invariant=invariant)
    torch.testing.assert_close(out, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("activation", "transposed"), [("silu", False), ("gelu", False), ("gelu_tanh", False), (CLAMPED, True)]
)
@pytest.mark.parametrize("tokens", [3, 38])
def test_rows_are_gathered_and_activated(dtype: torch.dtype, activation: Any, transposed: bool, tokens: int) -> None:
    x, top_k, features = numbers(tokens, 40, dtype=dtype), 2, 2 * 20
    weight, bias = stacked(features, transposed=transposed, dtype=dtype), numbers(5, features, dtype=dtype)
    order = torch.randperm(tokens * top_k, generator=torch.Generator().manual_seed(0)).int()
    ends = torch.tensor([0, 1, 3, 3, tokens * top_k - 1], dtype=torch.int32)
    options: dict[str, Any] = {"order": order, "top_k": top_k, "activation": activation, "transposed": transposed}
    out = torch.full((tokens * top_k, 20), torch.nan, dtype=dtype)
    expected = torch.full(out.shape, torch.nan, dtype=torch.float64)
    TorchKernels().grouped_product(x, weight, bias, ends, expected, **options)
    grouped.grouped_product(x, weight, bias, ends, out, **options)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(out.double(), expected, equal_nan=True, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_scattered_to_their_pairs(dtype: torch.dtype, transposed: bool) -> None:
    x, weight = numbers(8, 40, dtype=dtype), stacked(OUT, transposed=transposed, dtype=dtype)
    order = torch.tensor([7, 0, 3, 5, 4, 6, 1, 2], dtype=torch.int32)
    ends = torch.tensor([0, 4, 4, 5, 7], dtype=torch.int32)
    out = torch.full((8, OUT), torch.nan, dtype=dtype)
    expected = torch.full(out.shape, torch.nan, dtype=torch.float64)
    TorchKernels().grouped_product(x, weight, None, ends, expected, order=order, transposed=transposed)
    grouped.grouped_product(x, weight, None, ends, out, order=order, transposed=transposed)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(out.double(), expected, equal_nan=True, rtol=tolerance, atol=tolerance)
    assert out.isnan().all(1).nonzero().flatten().tolist() == [2]


def test_tiles_follow_the_dtype_and_the_number_of_rows() -> None:
    rows = [configurations.dense_expert_tiles(count, 4096, 2).block_m for count in (1, 16, 17, 64, 65, 9999)]
    assert rows == [16, 16, 64, 64, 128, 128]
    wide = [configurations.dense_expert_tiles(count, 4096, 4) for count in (1, 9999)]
    assert wide == [configurations.invariant_tiles(1, 4096, 4)] * 2


@pytest.mark.parametrize(
    ("activation", "transposed"), [(None, False), ("silu", False), (ClampedGate(alpha=1.702, limit=1.5), True)]
)
@pytest.mark.parametrize(("tokens", "shared_in", "shared_out"), [(4, 40, 44), (19, 64, 300), (1, 8, 2)])
def test_a_shared_product_is_computed_in_the_same_launch(
    activation: Any, transposed: bool, tokens: int, shared_in: int, shared_out: int
) -> None:
    x, ends, experts = numbers(4, 40), torch.tensor([1, 1, 3], dtype=torch.int32), numbers(3, 44, 40)
    weight = experts.transpose(1, 2).contiguous() if transposed else experts
    shared = SharedProduct(numbers(tokens, shared_in), numbers(shared_out, shared_in), torch.empty(0))
    found = []
    for kernels in (TorchKernels(), grouped):
        halves = 1 if activation is None else 2
        out = torch.full((4, 44 // halves), torch.nan)
        of_shared = torch.full((tokens + 1, shared_out // halves), torch.nan)
        both = dataclasses.replace(shared, out=of_shared[:tokens])
        kernels.grouped_product(x, weight, None, ends, out, activation=activation, transposed=transposed, shared=both)
        found.append((out, of_shared))
        assert bool(of_shared[-1].isnan().all())
    torch.testing.assert_close(found[1], found[0], equal_nan=True, rtol=1e-5, atol=1e-4)


def test_no_rows() -> None:
    ends = torch.zeros(2, dtype=torch.int32)
    grouped.grouped_product(torch.empty(0, 8), numbers(2, 4, 8), None, ends, torch.empty(0, 4))


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, out, ends = numbers(3, 8), torch.empty(3, 4), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"input \[3, 8\], weights of 2 experts with 8 rows of 4 columns, output \[3, 4\]"
    ):
        grouped.grouped_product(x, numbers(2, 8, 4), None, ends, out)
    with pytest.raises(ValueError, match=r"`ends` has shape \[2\], but there are 3 experts"):
        grouped.grouped_product(x, numbers(3, 4, 8), None, ends, out)
    with pytest.raises(ValueError, match=r"`order` has shape \[2\], but there are 6 rows"):
        grouped.grouped_product(x, numbers(2, 4, 8), None, ends, out, order=ends, top_k=2)
    with pytest.raises(ValueError, match="the output has 3 rows, but the product has 2 rows"):
        grouped.grouped_product(x[:2], numbers(2, 4, 8), None, ends, out)
    shared = SharedProduct(numbers(3, 8), numbers(5, 8), numbers(3, 4))
    with pytest.raises(ValueError, match=r"shapes of the shared product do not match: \[3, 8\], \[5, 8\], \[3, 4\]"):
        grouped.grouped_product(x, numbers(2, 4, 8), None, ends, out, shared=shared)
    with pytest.raises(ValueError, match=r"`bias` has shape \[2, 3\], but 2 experts have 4 rows each"):
        grouped.grouped_product(x, numbers(2, 4, 8), numbers(2, 3), ends, out)
    with pytest.raises(ValueError, match="contiguous"):
        grouped.grouped_product(numbers(8, 3).t(), numbers(2, 4, 8), None, ends, out)
    with pytest.raises(ValueError, match="contiguous"):
        grouped.grouped_product(x, numbers(2, 4, 8), numbers(4, 2).t(), ends, out)

"""Grouped products with experts' quantized weights against float64, and a row's bits alone and among others."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_enginecore.forward.cuda.kernel_api import (
    ClampedGate,
    Float8Weight,
    Int4Weight,
    Mxfp4Weight,
    StackedWeight,
)
from penstock_enginecore.forward.cuda.packing import float8_part, pack_e2m1, pack_float8, part_of_4_bits
from penstock_enginecore.forward.cuda.packing import words_of_4_bits as words
from tests.fakes.models.interpreted_kernels import interpreted, sum_in_order
from tests.fakes.models.torch_kernels import E2M1, TorchKernels

experts, conversions = interpreted("quantized"), interpreted("conversions")
configurations = interpreted("configurations")
Make = Callable[[int, int, int], StackedWeight]


def generator(*sizes: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(sizes))


def by_blocks(count: int, out_features: int, in_features: int, width: int = 32) -> Float8Weight:
    random = generator(count, out_features, in_features)
    numbers = torch.randn(count, out_features, in_features, generator=random).to(torch.float8_e4m3fn)
    scales = torch.rand(count, -(-in_features // width), out_features, generator=random) + 0.1
    part = float8_part(in_features, width)
    return Float8Weight(pack_float8(numbers, part), scales, width, part)


def by_row(count: int, out_features: int, in_features: int) -> Float8Weight:
    return by_blocks(count, out_features, in_features, in_features)


def of_4_bits(count: int, out_features: int, in_features: int) -> Int4Weight:
    random = generator(count, out_features, in_features)
    shape = count, in_features // 32, out_features
    part = part_of_4_bits(in_features, 32)
    levels = count, out_features, words(in_features, part)
    numbers = torch.randint(-0x8000, 0x8000, levels, generator=random, dtype=torch.int16)
    zeros = torch.randint(17, shape, generator=random, dtype=torch.uint8)
    return Int4Weight(numbers, zeros, (torch.rand(shape, generator=random) * 0.1 + 0.01).half(), 32, part, in_features)


def of_4_bit_floats(count: int, out_features: int, in_features: int) -> Mxfp4Weight:
    random = generator(count, out_features, in_features)
    part = part_of_4_bits(in_features, 32)
    codes = count, out_features, words(in_features, part)
    numbers = torch.randint(-0x8000, 0x8000, codes, generator=random, dtype=torch.int16)
    exponents = torch.randint(121, 129, (count, in_features // 32, out_features), generator=random, dtype=torch.uint8)
    return Mxfp4Weight(numbers, exponents, part, in_features)


KINDS: list[Make] = [by_blocks, by_row, of_4_bits, of_4_bit_floats]


def check(
    make: Make, counts: list[int], rest: int, sizes: tuple[int, int], dtype: torch.dtype, *, biased: bool
) -> None:
    """Check the product of experts with ``counts`` rows each. The last ``rest`` rows belong to no expert."""
    (out_features, in_features), total = sizes, sum(counts)
    weight, random = make(len(counts), out_features, in_features), generator(total, out_features)
    x = torch.randn(total + rest, in_features, generator=random).to(dtype)
    bias = torch.randn(len(counts), out_features, generator=random).to(dtype) if biased else None
    ends = torch.tensor(counts).cumsum(0).int()
    out = torch.full((total + rest, out_features), torch.nan, dtype=dtype)
    expected = torch.full(out.shape, torch.nan, dtype=torch.float64)
    TorchKernels().quantized_grouped_product(x, weight, bias, ends, expected)
    experts.quantized_grouped_product(x, weight, bias, ends, out)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(
        out.double(), expected, rtol=tolerance, atol=tolerance * in_features**0.5, equal_nan=True
    )


@pytest.mark.slow
@settings(max_examples=8)
@given(
    make=st.sampled_from(KINDS),
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    rest=st.integers(0, 2),
    sizes=st.tuples(st.integers(1, 40), st.sampled_from([32, 64, 96])),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    biased=st.booleans(),
)
def test_any_shape(
    make: Make, counts: list[int], rest: int, sizes: tuple[int, int], dtype: torch.dtype, biased: bool
) -> None:
    check(make, counts, rest, sizes, dtype, biased=biased)


@pytest.mark.each_value
@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("counts", [[70, 3, 0], [0, 200]])
def test_the_tiles_of_prompts(make: Make, counts: list[int]) -> None:
    check(make, counts, 1, (24, 64), torch.float16, biased=True)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("activation", ["silu", ClampedGate(alpha=1.702, limit=1.5)])
def test_rows_are_gathered_activated_and_scattered(make: Make, activation: Any) -> None:
    weight, x, top_k = make(3, 44, 64), torch.randn(4, 64, generator=generator(4)), 2
    order = torch.tensor([7, 0, 3, 5, 4, 6, 1, 2], dtype=torch.int32)
    ends, bias = torch.tensor([1, 1, 6], dtype=torch.int32), torch.randn(3, 44, generator=generator(3))
    gated, expected = torch.full((2, 8, 22), torch.nan).unbind()
    options: dict[str, Any] = {"order": order, "top_k": top_k, "activation": activation}
    TorchKernels().quantized_grouped_product(x, weight, bias, ends, expected, **options)
    experts.quantized_grouped_product(x, weight, bias, ends, gated, **options)
    torch.testing.assert_close(gated, expected, equal_nan=True, rtol=1e-5, atol=1e-4)
    down, rows = make(3, 40, 64), torch.randn(8, 64, generator=generator(8))
    out, expected = torch.full((2, 8, 40), torch.nan).unbind()
    TorchKernels().quantized_grouped_product(rows, down, None, ends, expected, order=order)
    experts.quantized_grouped_product(rows, down, None, ends, out, order=order)
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=1e-5, atol=1e-4)


def test_4_bits_mean_the_sixteen_numbers_of_the_format_and_their_powers() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    columns = torch.zeros(16, 64, dtype=torch.uint8)
    columns[:, ::16] = torch.stack([codes, codes.flip(0), codes.roll(5), codes.roll(11)], dim=1)
    numbers = pack_e2m1(columns, 16)[None]
    x = torch.zeros(4, 64)
    x[range(4), range(0, 64, 16)] = 1.0
    for exponent in (1, 126, 127, 128, 250):
        weight = Mxfp4Weight(numbers, torch.full((1, 2, 16), exponent, dtype=torch.uint8), 16, 64)
        out = torch.empty(4, 16)
        experts.quantized_grouped_product(x, weight, None, torch.tensor([4], dtype=torch.int32), out)
        expected = E2M1[columns[:, ::16].long()].t() * 2.0 ** (exponent - 127)
        assert torch.equal(out.double(), expected)


@pytest.mark.parametrize("columns", [96, 128])
@pytest.mark.parametrize("make", [by_blocks, by_row, of_4_bits])
def test_a_weight_is_dequantized(make: Make, columns: int) -> None:
    stacked = make(1, 35, columns)
    weight = dataclasses.replace(
        stacked, numbers=stacked.numbers[0], scales=stacked.scales[0],
        **({"zeros": stacked.zeros[0]} if isinstance(stacked, Int4Weight) else {}),
    )  # fmt: skip
    memory, expected = torch.full((36, columns), torch.nan), torch.empty(35, columns)
    experts.dequantize(weight, memory[:35])
    TorchKernels().dequantize(weight, expected)
    torch.testing.assert_close(memory[:35], expected, rtol=1e-6, atol=0)
    assert bool(memory[35].isnan().all())
    with pytest.raises(ValueError, match=rf"\[35, 32\] does not fit a weight of 35 rows of {columns} columns"):
        experts.dequantize(weight, torch.empty(35, 32))


def test_the_decoder_launches_it() -> None:
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels  # after the interpreter is set

    x, weight, ends = torch.randn(3, 64), of_4_bit_floats(2, 8, 64), torch.tensor([1, 3], dtype=torch.int32)
    out, expected = torch.empty(2, 3, 8).unbind()
    for kernels, target in ((TritonKernels(), out), (TorchKernels(), expected)):
        kernels.quantized_grouped_product(x, weight, None, ends, target)
    torch.testing.assert_close(out, expected)


def changed_bits(make: Make) -> int:
    """Return how many rows of the second of two experts have other bits in smaller steps than in one of forty rows."""
    weight, x = make(2, 24, 64), torch.randn(40, 64, generator=generator(40))

    def product(rows: torch.Tensor, before: int) -> torch.Tensor:
        out = torch.full((len(rows), 24), torch.nan)
        ends = torch.tensor([before, len(rows)], dtype=torch.int32)
        experts.quantized_grouped_product(rows, weight, None, ends, out, invariant=True)
        return out

    expected = product(x, 10)
    differ = 0
    for row in (10, 26, 39):
        alone, few = product(x[row : row + 1], 0)[0], product(x[max(0, row - 3) : row + 1], 3)[-1]
        differ += not (torch.equal(alone, expected[row]) and torch.equal(few, expected[row]))
    return differ


@pytest.mark.parametrize("make", KINDS)
def test_a_row_has_the_same_bits_alone_and_among_others(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sum_in_order(monkeypatch)
    assert changed_bits(make) == 0


@pytest.mark.parametrize("kind", ["float8", "int4", "mxfp4"])
def test_what_sums_depend_on_follows_from_the_weight_alone(kind: Any) -> None:
    tiles = [configurations.expert_tiles(rows, kind, invariant=True) for rows in (1, 64, 65, 5000)]
    assert len(set(tiles)) == 1
    assert tiles[0].block_m == configurations.INVARIANT_ROWS


def without_the_expert(real: Any) -> Any:
    """Return the product with a fault: it multiplies every expert's rows by the first expert's weight."""

    def find(*args: Any) -> Any:
        there, expert, begin, end = real(*args)
        return there, expert * 0, begin, end

    return find


def a_row_late(real: Any) -> Any:
    def find(*args: Any) -> Any:
        there, expert, begin, end = real(*args)
        return there, expert, begin + 1, end

    return find


def next_element(real: Any) -> Any:
    return lambda words, part: real(words, (part + 1) % 4)


def without_signs(real: Any) -> Any:
    return lambda codes: real(codes & 7)


def doubled(real: Any) -> Any:
    return lambda exponents, packed: real(exponents, packed) * 2.0


@pytest.mark.parametrize(
    ("name", "mutation"),
    [
        ("find_rows", without_the_expert),
        ("find_rows", a_row_late),
        ("e2m1_code", next_element),
        ("e2m1", without_signs),
        ("beside_mxfp4", doubled),
    ],
)
def test_a_broken_index_nibble_sign_or_scale_is_seen(name: str, mutation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check(of_4_bit_floats, [2, 3], 0, (8, 64), torch.float32, biased=True)
    module = conversions if name.startswith("e2m1") else experts
    monkeypatch.setattr(module, name, mutation(getattr(module, name)))
    with pytest.raises(AssertionError, match="not close"):
        check(of_4_bit_floats, [2, 3], 0, (8, 64), torch.float32, biased=True)


def test_no_rows() -> None:
    ends = torch.zeros(2, dtype=torch.int32)
    experts.quantized_grouped_product(torch.empty(0, 32), by_row(2, 4, 32), None, ends, torch.empty(0, 4))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"x": torch.zeros(3, 48)},
            r"input \[3, 48\], weights of 2 experts with 8 rows of 64 columns, output \[3, 8\]",
        ),
        ({"out": torch.zeros(3, 9)}, r"input \[3, 64\], .*, output \[3, 9\]"),
        ({"ends": torch.zeros(3, dtype=torch.int32)}, r"`ends` has shape \[3\], but there are 2 experts"),
        ({"bias": torch.zeros(2, 7)}, r"`bias` has shape \[2, 7\], but 2 experts have 8 rows each"),
        ({"out": torch.zeros(8, 3).t()}, "contiguous"),
        (
            {"weight": Float8Weight(by_row(2, 8, 64).numbers, torch.zeros(2, 3, 8), 24, 16)},
            "parts of 16 columns do not divide blocks of 24 columns",
        ),
        (
            {"weight": Int4Weight(*of_4_bits(2, 8, 64).tensors, 32, 32, 64)},
            "16 words are not a row of 64 columns",
        ),
        (
            {"weight": Mxfp4Weight(*of_4_bit_floats(2, 8, 64).tensors, 64, 64)},
            "parts of 64 columns do not divide blocks of 32 columns",
        ),
        (
            {"weight": Float8Weight(by_row(2, 8, 64).numbers, torch.zeros(2, 3, 8), 64, 32)},
            r"scales or zeros have shape \[2, 3, 8\]",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, Any], said: str) -> None:
    ends = torch.tensor([1, 3], dtype=torch.int32)
    arguments = {"x": torch.zeros(3, 64), "weight": by_row(2, 8, 64), "bias": None, "ends": ends}
    with pytest.raises(ValueError, match=said):
        experts.quantized_grouped_product(**{**arguments, "out": torch.zeros(3, 8), **change})

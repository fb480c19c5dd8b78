"""Batch-invariant kernels: products against float64, and of all the same bits alone and among others."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.forward.cuda.kernel_api import Float8Weight, Int4Weight, Norm, WeightedRows
from penstock_enginecore.forward.cuda.packing import float8_part, pack_float8
from tests.fakes.models.interpreted_kernels import interpreted, sum_in_order
from tests.fakes.models.torch_kernels import TorchKernels
from tests.unit.enginecore.attention.test_backends import PARAMS, make_step
from tests.unit.enginecore.forward.cuda.kernels.paged import Paged, attention

invariant, by_expert, mixture = interpreted("invariant"), interpreted("grouped"), interpreted("mixture")
configurations = interpreted("configurations")
float8 = int4 = interpreted("quantized")
norm, activation = interpreted("norm"), interpreted("activation")
IN, OUT, MAX_ROWS = 160, 24, 40
ALONE = (0, 17, 39)
FIRST = (1, 2, 9, 16, 17, 25, 32, 36, 38, 39)
"""First rows of steps with 1 to 39 rows, on both sides of the borders between ordinary tiles."""


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    sum_in_order(monkeypatch)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 65])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("columns", [128, 200])
def test_a_product_is_that_of_float64(dtype: torch.dtype, rows: int, biased: bool, columns: int) -> None:
    x, weight = numbers(rows, columns, dtype=dtype), numbers(OUT, columns, dtype=dtype)
    bias = numbers(OUT, dtype=dtype) if biased else None
    memory = torch.full((rows + 1, OUT), torch.nan, dtype=dtype)
    expected = torch.empty(rows, OUT, dtype=torch.float64)
    TorchKernels().product(x, weight, bias, 0.5, expected)
    invariant.invariant_product(x, weight, bias, 0.5, memory[:rows])
    tolerance = 1e-4 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(memory[:rows].double(), expected, rtol=tolerance, atol=tolerance)
    assert bool(memory[rows].isnan().all())


def dense(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(len(x), OUT)
    invariant.invariant_product(x, numbers(OUT, x.shape[1], dtype=x.dtype), numbers(OUT, dtype=x.dtype), 0.3, out)
    return out


def grouped(x: torch.Tensor) -> torch.Tensor:
    """Run two experts. The checked row belongs to the second one, after or before its other rows."""
    out = x.new_empty(len(x), OUT)
    ends = torch.tensor([len(x) // 3, len(x)], dtype=torch.int32)
    weight = numbers(1, OUT, x.shape[1], dtype=x.dtype).expand(2, -1, -1).contiguous()
    by_expert.grouped_product(x, weight, None, ends, out, invariant=True)
    return out


def weight_of_8_bits(width: int) -> Float8Weight:
    part = float8_part(IN, width)
    words = pack_float8(numbers(OUT, IN).to(torch.float8_e4m3fn), part)
    return Float8Weight(words, numbers(-(-IN // width), OUT).abs(), width, part)


def of_8_bits(x: torch.Tensor, *, invariant: bool = True) -> torch.Tensor:
    out = x.new_empty(len(x), OUT)
    float8.quantized_product(x, weight_of_8_bits(128), None, 1.0, out, invariant=invariant)
    return out


def of_8_bits_by_row(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(len(x), OUT)
    float8.quantized_product(x, weight_of_8_bits(IN), None, 1.0, out, invariant=True)
    return out


def of_4_bits(x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(-0x8000, 0x8000, (OUT, 32), generator=generator, dtype=torch.int16)
    zeros, scales = torch.full((2, OUT), 8, dtype=torch.uint8), numbers(2, OUT).abs()
    out = x.new_empty(len(x), OUT)
    weight = Int4Weight(levels, zeros, scales, 64, 32, 128)
    int4.quantized_product(x[:, :128].contiguous(), weight, None, 1.0, out, invariant=True)
    return out


KINDS = [dense, grouped, of_8_bits, of_8_bits_by_row, of_4_bits]


def changed_bits(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> int:
    """Return how many of the rows ``ALONE`` have other bits in a smaller step, or alone, than in the whole one."""
    expected = product(x)
    differ = {row for row in ALONE if not torch.equal(product(x[row : row + 1])[0], expected[row])}
    for first in FIRST:
        found = product(x[first:])
        differ |= {row for row in ALONE if row >= first and not torch.equal(found[row - first], expected[row])}
    return len(differ)


@pytest.mark.parametrize("product", KINDS)
@pytest.mark.usefixtures("in_order")
def test_a_row_has_the_same_bits_alone_and_among_up_to_forty(product: Any) -> None:
    assert changed_bits(product, numbers(MAX_ROWS, IN)) == 0


@pytest.mark.parametrize("product", KINDS)
@pytest.mark.usefixtures("in_order")
def test_a_row_has_the_same_bits_among_more_than_a_tile(product: Any) -> None:
    x = numbers(130, IN, dtype=torch.float16)
    found = product(x)
    for row in (0, 63, 64, 129):
        assert torch.equal(found[row], product(x[row : row + 1])[0])


@pytest.mark.parametrize("product", [dense, grouped])
@pytest.mark.usefixtures("in_order")
def test_columns_that_are_cut_by_the_number_of_rows_are_seen(product: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = configurations.invariant_tiles

    def by_rows(rows: int, out_features: int, itemsize: int, device: str) -> Any:
        tiles = real(rows, out_features, itemsize, device)
        return configurations.InvariantTiles(
            tiles.block_m, tiles.block_n, 32 if rows < 8 else 64, tiles.warps, tiles.stages
        )

    monkeypatch.setattr(invariant, "invariant_tiles", by_rows)
    monkeypatch.setattr(by_expert, "dense_expert_tiles", lambda *shape, invariant: by_rows(*shape))
    assert changed_bits(product, numbers(MAX_ROWS, IN)) > 0


@pytest.mark.usefixtures("in_order")
def test_slices_of_usual_quantized_products_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "_FEWEST_TILES", 2)
    assert changed_bits(functools.partial(of_8_bits, invariant=False), numbers(MAX_ROWS, IN)) > 0
    assert changed_bits(of_8_bits, numbers(MAX_ROWS, IN)) == 0


def attended(query_lens: list[int], params: AttentionParams, *, invariant: bool = True) -> torch.Tensor:
    """Return the attention of the last of 530 tokens, after requests of 50 tokens. Its last tokens are new."""
    count = len(query_lens)
    step = make_step([50] * count, [*[50] * (count - 1), 530], block_size=16)
    paged = Paged.of(step)
    kept = torch.cat([part[-count:] for part, count in zip(step.query.split(50), query_lens, strict=True)])
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    paged = dataclasses.replace(paged, step=dataclasses.replace(step, query=kept))
    paged.group = dataclasses.replace(paged.group, query_start_loc=starts)
    return paged.attend(params, invariant=invariant)[-1]


@pytest.mark.parametrize("name", ["full", "window", "sinks and window", "chunk, softcap and sinks"])
@pytest.mark.usefixtures("in_order")
def test_attention_of_a_token_is_the_same_as_a_decode_and_in_a_prompt(name: str) -> None:
    expected = attended([1, 7, 50], PARAMS[name])
    for query_lens in ([1, 7, 1], [9, 1, 17]):
        assert torch.equal(attended(query_lens, PARAMS[name]), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("in_order")
def test_ordinary_attention_of_decodes_in_pieces_of_the_keys_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LONGEST_SPLIT", 16)  # otherwise the keys of 50 new tokens are split too
    prompt, decode = (attended([1, 7, new], PARAMS["full"], invariant=False) for new in (50, 1))
    torch.testing.assert_close(decode, prompt)
    assert not torch.equal(decode, prompt)


def normed(x: torch.Tensor) -> torch.Tensor:
    out, residual = torch.empty_like(x), x.flip(1).contiguous()
    norm.add_rms_norm(x, residual, Norm(numbers(x.shape[1]), 1e-6, 1.0), out)
    return torch.cat([out, residual], dim=1)


def activated(x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(len(x), x.shape[1] // 2)
    activation.gated(x, "silu", out)
    return out


def summed(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    rows = x.repeat_interleave(2, 0) * torch.tensor([1.0, 0.3]).repeat(len(x))[:, None]
    mixture.weighted_sum(WeightedRows(rows, x[:, :2].abs().contiguous(), x), out)
    return out


@pytest.mark.parametrize("kernel", [normed, activated, summed])
def test_a_programs_result_for_a_token_is_the_same_alone_and_in_a_batch(kernel: Any) -> None:
    x = numbers(9, IN)
    found = kernel(x)
    for row in (0, 8):
        assert torch.equal(kernel(x[row : row + 1])[0], found[row])


@pytest.mark.parametrize("bits", [4, 8])
def test_what_sums_depend_on_follows_from_the_weight_alone(bits: int) -> None:
    tiles = [configurations.product_tiles(rows, bits, invariant=True) for rows in (1, 64, 65, 5000)]
    assert len(set(tiles)) == 1
    assert tiles[0].block_m == configurations.INVARIANT_ROWS
    for features in (32, 8192, 8193, 300_000):
        dense_tiles = [configurations.invariant_tiles(rows, features, 2) for rows in (1, 64, 65, 5000)]
        assert len({(one.block_n, one.block_k) for one in dense_tiles}) == 1
        assert [(one.block_m, one.warps) for one in dense_tiles] == [(64, 4)] * 2 + [(128, 8)] * 2


def test_no_rows() -> None:
    invariant.invariant_product(torch.empty(0, 8), numbers(4, 8), None, 1.0, torch.empty(0, 4))


def test_shapes_that_do_not_fit_are_refused() -> None:
    x, weight, out = numbers(3, 8), numbers(4, 8), torch.empty(3, 4)
    with pytest.raises(ValueError, match=r"input \[3, 8\], weight \[4, 7\], output \[3, 4\]"):
        invariant.invariant_product(x, numbers(4, 7), None, 1.0, out)
    with pytest.raises(ValueError, match="contiguous"):
        invariant.invariant_product(numbers(8, 3).t(), weight, None, 1.0, out)

"""Products with quantized weights: 8-bit floats, 4-bit integers and MXFP4."""

import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernel_api import Float8Weight, Int4Weight
from penstock_enginecore.forward.cuda.kernels.configurations import product_tiles

# Products with weights of 8-bit floats: numbers are multiplied in the dtype of what they are multiplied with, which holds each
# of them exactly, and sums by their scales. So weights alone are read in 8 bits: what a step of few rows takes its time for.

_FLOAT8_BITS = 8
MIN_WIDTH = 16
"""Columns that a tile has at least."""


def float8_product(
    x: torch.Tensor,
    weight: Float8Weight,
    bias: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    *,
    invariant: bool = False,
) -> None:
    """``x`` ``[rows, in_features]`` times ``weight``, with the ``bias`` where there is one, times ``scale``, into ``out``
    ``[rows, out_features]``. All contiguous. Summed in float32, block of columns by block; if ``invariant`` in one order for any
    number of rows. ValueError for other shapes, strides, and for blocks whose width is no power of two from 16 on.
    """
    numbers, width = weight.numbers, weight.width
    (rows, in_features), out_features = x.shape, numbers.shape[0]
    blocks = triton.cdiv(in_features, width)
    if numbers.shape[1] != in_features or weight.scales.shape != (blocks, out_features):
        raise ValueError(
            f"{list(numbers.shape)} and scales {list(weight.scales.shape)} for rows of {in_features} numbers"
        )
    if out.shape != (rows, out_features) or not all(t.is_contiguous() for t in (x, numbers, weight.scales, out)):
        raise ValueError(
            f"an output of {list(out.shape)} for {rows} rows of {out_features} numbers, or strides between"
        )
    if blocks > 1 and not fits(width):
        raise ValueError(f"blocks of {width} columns: their width must be a power of two from {MIN_WIDTH} on")
    if not rows:
        return
    tiles = product_tiles(rows, _FLOAT8_BITS, invariant=invariant)
    block_k = tiles.block_k if blocks == 1 else min(tiles.block_k, width)
    grid = triton.cdiv(out_features, tiles.block_n), triton.cdiv(rows, tiles.block_m)
    float8_tiles[grid](
        x,
        numbers,
        weight.scales,
        bias,
        out,
        rows,
        out_features,
        in_features,
        scale,
        WIDTH=width if blocks > 1 else 0,
        EVEN=in_features % block_k == 0,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=block_k,
        PRECISION="ieee",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def fits(width: int) -> bool:
    """Whether blocks of ``width`` columns can be told apart."""
    return width >= MIN_WIDTH and width & (width - 1) == 0


@triton.jit
def float8_sums(
    x_rows, numbers, scales, n_read, out_features, in_features,
    WIDTH: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of products of rows, which begin at ``x_rows``, and the rows ``n_read`` of a weight. ``WIDTH``: columns of a block
    of scales, 0 for one of all columns; ``EVEN``: tiles end where columns do.
    """
    k = tl.arange(0, BLOCK_K)
    x_tile = x_rows[:, None] + k[None, :]
    number_tile = numbers + n_read[:, None].to(tl.int64) * in_features + k[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, in_features, BLOCK_K):
        if EVEN:
            left = tl.load(x_tile + start)
            right = tl.load(number_tile + start)
        else:
            inside = (start + k < in_features)[None, :]
            left = tl.load(x_tile + start, mask=inside, other=0.0)
            behind = tl.minimum(start + k, in_features - 1) - k
            right = tl.load(number_tile + behind[None, :])
        right = tl.trans(right.to(left.dtype))
        if WIDTH > 0:
            factor = tl.load(scales + (start // WIDTH) * out_features + n_read)
            total += tl.dot(left, right, input_precision=PRECISION) * factor[None, :]
        else:
            total = tl.dot(left, right, total, input_precision=PRECISION)
    if WIDTH == 0:
        total *= tl.load(scales + n_read)[None, :]
    return total


@triton.jit
def float8_tiles(
    x,
    numbers,
    scales,
    bias,
    out,
    rows,
    out_features,
    in_features,
    scale,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program makes a tile of ``out``."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    # What is behind the last row or feature is computed on the last one's numbers, and not stored.
    n_read = tl.minimum(n, out_features - 1)
    m_read = tl.minimum(m, rows - 1)
    x_rows = x + m_read.to(tl.int64) * in_features
    total = float8_sums(
        x_rows, numbers, scales, n_read, out_features, in_features, WIDTH, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION
    )
    if bias is not None:
        total += tl.load(bias + n_read).to(tl.float32)[None, :]
    place = m[:, None].to(tl.int64) * out_features + n[None, :]
    inside = (m[:, None] < rows) & (n[None, :] < out_features)
    tl.store(out + place, (total * scale).to(out.dtype.element_ty), mask=inside)


# Products with weights of 4 bits: levels, less their zeros, are multiplied in the dtype of what they are multiplied with, which
# holds each of them exactly, and sums by their scales.

_INT4_BITS = 4
MIN_HALF = 16
"""Columns that half of a tile has at least."""


def int4_product(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    *,
    invariant: bool = False,
) -> None:
    """``x`` ``[rows, in_features]`` times ``weight``, with the ``bias`` where there is one, times ``scale``, into ``out``
    ``[rows, out_features]``. All contiguous. Summed in float32, ``2 * half`` columns by as many; if ``invariant`` in one order
    for any number of rows. ValueError for other shapes, strides, and for halves that are no power of two from 16 on or do not
    divide blocks.
    """
    numbers, half = weight.numbers, weight.half
    (rows, in_features), out_features = x.shape, numbers.shape[0]
    blocks = triton.cdiv(in_features, weight.width)
    parts = x, numbers, weight.zeros, weight.scales, out
    if weight.in_features != in_features or {weight.zeros.shape, weight.scales.shape} != {(blocks, out_features)}:
        shapes = f"{list(weight.zeros.shape)} zeros and {list(weight.scales.shape)} scales"
        raise ValueError(f"{list(numbers.shape)} bytes, {shapes} for rows of {in_features} numbers")
    if out.shape != (rows, out_features) or not all(part.is_contiguous() for part in parts):
        raise ValueError(
            f"an output of {list(out.shape)} for {rows} rows of {out_features} numbers, or strides between"
        )
    if half < MIN_HALF or half & (half - 1) or weight.width % (2 * half) or in_features % (2 * half):
        raise ValueError(f"halves of {half} columns in blocks of {weight.width} of {in_features}")
    if not rows:
        return
    tiles = product_tiles(rows, _INT4_BITS, invariant=invariant)
    grid = triton.cdiv(out_features, tiles.block_n), triton.cdiv(rows, tiles.block_m)
    int4_tiles[grid](
        x,
        numbers,
        weight.zeros,
        weight.scales,
        bias,
        out,
        rows,
        out_features,
        in_features,
        scale,
        WIDTH=weight.width,
        HALF=half,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        PRECISION="ieee",
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


@triton.jit
def int4_sums(
    x_rows, numbers, zeros, scales, n_read, out_features, in_features,
    WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of products of rows, which begin at ``x_rows``, and the rows ``n_read`` of a weight. ``WIDTH``: columns of a block
    of zeros and scales.
    """
    k = tl.arange(0, HALF)
    x_tile = x_rows[:, None] + k[None, :]
    number_tile = numbers + n_read[:, None].to(tl.int64) * (in_features // 2) + k[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, in_features, 2 * HALF):
        first = tl.load(x_tile + start)
        second = tl.load(x_tile + start + HALF)
        both = tl.load(number_tile + start // 2)
        place = (start // WIDTH) * out_features + n_read
        zero = tl.load(zeros + place).to(first.dtype)[:, None]
        lower = tl.trans((both & 15).to(first.dtype) - zero)
        upper = tl.trans((both >> 4).to(first.dtype) - zero)
        part = tl.dot(first, lower, input_precision=PRECISION)
        part = tl.dot(second, upper, part, input_precision=PRECISION)
        total += part * tl.load(scales + place).to(tl.float32)[None, :]
    return total


@triton.jit
def int4_tiles(
    x,
    numbers,
    zeros,
    scales,
    bias,
    out,
    rows,
    out_features,
    in_features,
    scale,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program makes a tile of ``out``."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    # What is behind the last row or feature is computed on the last one's numbers, and not stored.
    n_read = tl.minimum(n, out_features - 1)
    m_read = tl.minimum(m, rows - 1)
    x_rows = x + m_read.to(tl.int64) * in_features
    total = int4_sums(
        x_rows, numbers, zeros, scales, n_read, out_features, in_features, WIDTH, HALF, BLOCK_M, BLOCK_N, PRECISION
    )
    if bias is not None:
        total += tl.load(bias + n_read).to(tl.float32)[None, :]
    target = m[:, None].to(tl.int64) * out_features + n[None, :]
    inside = (m[:, None] < rows) & (n[None, :] < out_features)
    tl.store(out + target, (total * scale).to(out.dtype.element_ty), mask=inside)


# Sums of products with MXFP4 weights: 4-bit floats, a power of two for each 32 of them. A tile is dequantized as it is read, to
# the numbers that the weight has where it is dequantized at load, rounded as there.

BLOCK = 32
"""Columns that share an exponent."""


@triton.jit
def e2m1(codes):
    """What the lower 4 bits of uint8 ``codes`` mean, float32: a sign, two bits of exponent, one of mantissa."""
    magnitudes = (codes & 7).to(tl.int32)
    normal = ((magnitudes << 22) + 0x3F000000).to(tl.float32, bitcast=True)  # an exponent of 0 stands for 2 ** -1 here
    values = tl.where(magnitudes > 1, normal, magnitudes.to(tl.float32) * 0.5)
    return tl.where((codes & 8) != 0, -values, values)


@triton.jit
def mxfp4_sums(
    x_rows, numbers, exponents, n_read, out_features, in_features,
    HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of products of rows, which begin at ``x_rows``, and the rows ``n_read`` of a weight."""
    k = tl.arange(0, HALF)
    x_tile = x_rows[:, None] + k[None, :]
    number_tile = numbers + n_read[:, None].to(tl.int64) * (in_features // 2) + k[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, in_features, 2 * HALF):
        first = tl.load(x_tile + start)
        second = tl.load(x_tile + start + HALF)
        both = tl.load(number_tile + start // 2)
        place = exponents + (start // 32) * out_features + n_read
        lower_scale = _power(tl.load(place))
        upper_scale = _power(tl.load(place + (HALF // 32) * out_features))
        lower = (e2m1(both) * lower_scale[:, None]).to(first.dtype)
        upper = (e2m1(both >> 4) * upper_scale[:, None]).to(first.dtype)
        total = tl.dot(first, tl.trans(lower), total, input_precision=PRECISION)
        total = tl.dot(second, tl.trans(upper), total, input_precision=PRECISION)
    return total


@triton.jit
def _power(exponent):
    """``2 ** (exponent - 127)`` of uint8, float32; 0 for an exponent of 0, of which no float32 that devices keep is made."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)

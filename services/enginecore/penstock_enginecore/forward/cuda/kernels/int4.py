"""Products with weights of 4 bits: levels, less their zeros, are multiplied in the dtype of what they are multiplied with, which
holds each of them exactly, and sums by their scales.
"""

import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernels.configurations import product_tiles
from penstock_enginecore.forward.cuda.weights import Int4Weight

_BITS = 4
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
    tiles = product_tiles(rows, _BITS, invariant=invariant)
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

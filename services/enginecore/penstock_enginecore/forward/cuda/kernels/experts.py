"""Products of experts with weights that stay quantized: each expert's rows times its own, in one launch."""

from typing import Any

import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernel_api import Float8Weight, Int4Weight, Mxfp4Weight, StackedWeight
from penstock_enginecore.forward.cuda.kernels.configurations import ExpertTiles, expert_tiles
from penstock_enginecore.forward.cuda.kernels.invariant import find_rows, grid_rows
from penstock_enginecore.forward.cuda.kernels.quantized import (
    BLOCK,
    MIN_HALF,
    MIN_WIDTH,
    fits,
    float8_sums,
    int4_sums,
    mxfp4_sums,
)


def quantized_grouped_product(
    x: torch.Tensor,
    weight: StackedWeight,
    bias: torch.Tensor | None,
    ends: torch.Tensor,
    out: torch.Tensor,
    *,
    invariant: bool = False,
) -> None:
    """Each expert's rows of ``x`` ``[rows, in_features]``, which end where ``ends`` int32 ``[experts]`` says, times its part of
    ``weight``, with its part of ``bias`` ``[experts, out_features]``, into ``out`` ``[rows, out_features]``. Rows behind the last
    end stay as they are. All contiguous. Summed in float32; if ``invariant`` in one order for any number of rows. ValueError for
    other shapes, strides, and for blocks that tiles of columns do not divide.
    """
    (rows, in_features), (experts, out_features) = x.shape, weight.numbers.shape[:2]
    if weight.in_features != in_features or out.shape != (rows, out_features):
        raise ValueError(
            f"{list(x.shape)} times {experts} weights of {out_features} rows of {weight.in_features} into {list(out.shape)}"
        )
    if ends.shape != (experts,) or (bias is not None and bias.shape != (experts, out_features)):
        raise ValueError(
            f"{list(ends.shape)} ends, or biases of another shape, for {experts} experts of {out_features}"
        )
    if not all(part.is_contiguous() for part in (x, ends, out, *weight.tensors)):
        raise ValueError("products take contiguous tensors")
    blocks = _check_blocks(weight)
    if not rows:
        return
    tiles = expert_tiles(rows // experts, weight.kind, invariant=invariant)
    grid = grid_rows(rows, experts, tiles.block_m), triton.cdiv(out_features, tiles.block_n)
    constants: dict[str, Any] = {
        "EXPERTS": max(16, triton.next_power_of_2(experts)), "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
        "PRECISION": "ieee", "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip
    sizes = experts, out_features, in_features
    if isinstance(weight, Float8Weight):
        width = weight.width if blocks > 1 else 0
        block_k = _columns(tiles, width)
        float8_experts[grid](
            x, weight.numbers, weight.scales, bias, ends, out, *sizes, blocks,
            WIDTH=width, EVEN=in_features % block_k == 0, BLOCK_K=block_k, **constants,
        )  # fmt: skip
    elif isinstance(weight, Int4Weight):
        int4_experts[grid](
            x, weight.numbers, weight.zeros, weight.scales, bias, ends, out, *sizes, blocks,
            WIDTH=weight.width, HALF=weight.half, **constants,
        )  # fmt: skip
    else:
        mxfp4_experts[grid](
            x, weight.numbers, weight.exponents, bias, ends, out, *sizes, blocks, HALF=weight.half, **constants
        )


def _columns(tiles: ExpertTiles, width: int) -> int:
    return min(tiles.block_k, width) if width else tiles.block_k


def _check_blocks(weight: StackedWeight) -> int:
    """How many blocks of columns there are."""
    experts, out_features = weight.numbers.shape[:2]
    width = BLOCK if isinstance(weight, Mxfp4Weight) else weight.width
    blocks = int(triton.cdiv(weight.in_features, width))
    for part in weight.tensors[1:]:
        if part.shape != (experts, blocks, out_features):
            raise ValueError(
                f"{list(part.shape)} scales or zeros, for {blocks} blocks of {experts} times {out_features} rows"
            )
    if isinstance(weight, Float8Weight):
        if blocks > 1 and not fits(width):
            raise ValueError(f"blocks of {width} columns: their width must be a power of two from {MIN_WIDTH} on")
        return blocks
    half, largest = weight.half, width if isinstance(weight, Mxfp4Weight) else width // 2
    if half < MIN_HALF or half & (half - 1) or half > largest or weight.in_features % (2 * half) or width % half:
        raise ValueError(f"halves of {half} columns in blocks of {width} of {weight.in_features}")
    if isinstance(weight, Int4Weight) and width % (2 * half):
        raise ValueError(f"halves of {half} columns in blocks of {width} of {weight.in_features}")
    return blocks


@triton.jit
def float8_experts(
    x, numbers, scales, bias, ends, out, experts, out_features, in_features, blocks,
    WIDTH: tl.constexpr, EVEN: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program makes a tile of one expert's rows, if there is one for it."""
    there, expert, begin, end = find_rows(ends, experts, tl.program_id(0), BLOCK_M, EXPERTS)
    if there:
        m, n_read, x_rows = _places(x, begin, end, out_features, in_features, BLOCK_M, BLOCK_N)
        numbers += expert.to(tl.int64) * out_features * in_features
        scales += expert.to(tl.int64) * blocks * out_features
        total = float8_sums(
            x_rows,
            numbers,
            scales,
            n_read,
            out_features,
            in_features,
            WIDTH,
            EVEN,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            PRECISION,
        )
        _store(total, bias, expert, n_read, out, m, end, out_features, BLOCK_N)


@triton.jit
def int4_experts(
    x, numbers, zeros, scales, bias, ends, out, experts, out_features, in_features, blocks,
    WIDTH: tl.constexpr, HALF: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As ``float8_experts``."""
    there, expert, begin, end = find_rows(ends, experts, tl.program_id(0), BLOCK_M, EXPERTS)
    if there:
        m, n_read, x_rows = _places(x, begin, end, out_features, in_features, BLOCK_M, BLOCK_N)
        numbers += expert.to(tl.int64) * out_features * (in_features // 2)
        zeros += expert.to(tl.int64) * blocks * out_features
        scales += expert.to(tl.int64) * blocks * out_features
        total = int4_sums(
            x_rows, numbers, zeros, scales, n_read, out_features, in_features, WIDTH, HALF, BLOCK_M, BLOCK_N, PRECISION
        )
        _store(total, bias, expert, n_read, out, m, end, out_features, BLOCK_N)


@triton.jit
def mxfp4_experts(
    x, numbers, exponents, bias, ends, out, experts, out_features, in_features, blocks,
    HALF: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As ``float8_experts``."""
    there, expert, begin, end = find_rows(ends, experts, tl.program_id(0), BLOCK_M, EXPERTS)
    if there:
        m, n_read, x_rows = _places(x, begin, end, out_features, in_features, BLOCK_M, BLOCK_N)
        numbers += expert.to(tl.int64) * out_features * (in_features // 2)
        exponents += expert.to(tl.int64) * blocks * out_features
        total = mxfp4_sums(
            x_rows, numbers, exponents, n_read, out_features, in_features, HALF, BLOCK_M, BLOCK_N, PRECISION
        )
        _store(total, bias, expert, n_read, out, m, end, out_features, BLOCK_N)


@triton.jit
def _places(x, begin, end, out_features, in_features, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows of a tile, the features that it reads, and where what its rows are multiplied with begins. What is behind the last
    row or feature is computed on the last one's numbers, and not stored.
    """
    m = begin + tl.arange(0, BLOCK_M)
    n_read = tl.minimum(tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), out_features - 1)
    return m, n_read, x + tl.minimum(m, end - 1).to(tl.int64) * in_features


@triton.jit
def _store(total, bias, expert, n_read, out, m, end, out_features, BLOCK_N: tl.constexpr):
    """The tile, with the expert's bias where there is one."""
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if bias is not None:
        total += tl.load(bias + expert * out_features + n_read).to(tl.float32)[None, :]
    inside = (m[:, None] < end) & (n[None, :] < out_features)
    tl.store(out + m[:, None].to(tl.int64) * out_features + n[None, :], total.to(out.dtype.element_ty), mask=inside)

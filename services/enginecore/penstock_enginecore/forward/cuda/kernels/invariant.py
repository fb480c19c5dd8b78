"""Batch-invariant matrix products: sums have a fixed order, so the result of a row is bit-identical alone and in a
batch.

A program computes a tile of outputs. The program multiplies ``BLOCK_K`` input columns at a time, in order, and adds the
products to one sum per output. No output is split among programs. ``BLOCK_N`` and ``BLOCK_K`` depend only on the shape
of the weight. A program has 64 rows per four warps. For 16-bit elements these warps always use the instruction
``wgmma.m64n{BLOCK_N}k16``, for any number of warps. Libraries such as cuBLAS choose tiles by the batch size, so their
sums have different orders. Source of the idea: Thinking Machines, "Defeating Nondeterminism in LLM Inference" (2025).
"""

import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernels.configurations import (
    InvariantTiles,
    device_name,
    invariant_tiles,
)
from penstock_enginecore.forward.cuda.kernels.dependent_launch import pdl_options, wait_for_inputs


def invariant_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Multiply ``x`` by ``weight``, add ``bias`` if given, multiply by ``scale``, and write the result to ``out``. Sums
    are float32.

    Args:
        x: ``[rows, in_features]``, contiguous like all tensors.
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]``, or None.
        scale: Factor of the result.
        out: ``[rows, out_features]``.
        pdl: Whether to launch the kernel before the previous kernel has ended; see ``dependent_launch.py``.

    Raises:
        ValueError: Shapes or strides are not supported.
    """
    (rows, in_features), out_features = x.shape, weight.shape[0]
    if weight.shape[1] != in_features or out.shape != (rows, out_features):
        raise ValueError(
            f"shapes do not match: input {list(x.shape)}, weight {list(weight.shape)}, output {list(out.shape)}"
        )
    _check_strides(x, weight, out)
    if not rows:
        return
    tiles = invariant_tiles(rows, out_features, x.element_size(), device_name(x.device))
    grid = triton.cdiv(rows, tiles.block_m), triton.cdiv(out_features, tiles.block_n)
    product_tiles[grid](
        x, weight, bias, out, rows, out_features, in_features, scale, **_constants(tiles, x, in_features),
        num_warps=tiles.warps, num_stages=tiles.stages, **pdl_options(pdl=pdl),
    )  # fmt: skip


def _check_strides(*tensors: torch.Tensor) -> None:
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("all tensors of a matrix product must be contiguous")


def _constants(tiles: InvariantTiles, x: torch.Tensor, in_features: int) -> dict[str, object]:
    return {
        "EVEN": in_features % tiles.block_k == 0,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }


@triton.jit
def places(x, begin, end, nth, out_features, in_features, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the indices of a tile's rows, the indices of its output features, the features to read, and the addresses
    of the rows of ``x``. The tile's first row is ``begin``.

    Indices beyond the last row or feature read the last row or feature instead. The results for such indices are not
    stored.
    """
    m = begin + tl.arange(0, BLOCK_M)
    n = nth * BLOCK_N + tl.arange(0, BLOCK_N)
    return m, n, tl.minimum(n, out_features - 1), x + tl.minimum(m, end - 1).to(tl.int64) * in_features


@triton.jit
def store(total, bias, scale, n_read, out, m, end, n, out_features):
    """Add ``bias`` to the sums if given, multiply by ``scale``, and write the rows before ``end`` to ``out``."""
    if bias is not None:
        total += tl.load(bias + n_read).to(tl.float32)[None, :]
    inside = (m[:, None] < end) & (n[None, :] < out_features)
    place = m[:, None].to(tl.int64) * out_features + n[None, :]
    tl.store(out + place, (total * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def tile_sums(
    x_rows, weight_columns, in_features, weight_stride,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the sums of products of a tile. ``x_rows`` ``[BLOCK_M]`` are addresses of rows of ``x``, and
    ``weight_columns`` ``[1, BLOCK_N]`` are addresses of output features of the weight.

    ``weight_stride`` is the distance between consecutive elements of one output feature.
    """
    k = tl.arange(0, BLOCK_K)
    x_tile = x_rows[:, None] + k[None, :]
    weight_tile = weight_columns + k[:, None] * weight_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, in_features, BLOCK_K):
        if EVEN:
            left = tl.load(x_tile + start)
            right = tl.load(weight_tile + start * weight_stride)
        else:
            inside = start + k < in_features
            left = tl.load(x_tile + start, mask=inside[None, :], other=0.0)
            right = tl.load(weight_tile + start * weight_stride, mask=inside[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["rows"])
def product_tiles(
    x, weight, bias, out, rows, out_features, in_features, scale,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute a tile of ``out``. Consecutive programs use the same output features, so each feature's weights are read
    from memory once.
    """
    wait_for_inputs(PDL)
    begin = tl.program_id(0) * BLOCK_M
    m, n, n_read, x_rows = places(x, begin, rows, tl.program_id(1), out_features, in_features, BLOCK_M, BLOCK_N)
    columns = weight + n_read[None, :].to(tl.int64) * in_features
    total = tile_sums(x_rows, columns, in_features, 1, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    store(total, bias, scale, n_read, out, m, rows, n, out_features)

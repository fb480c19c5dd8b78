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

from penstock_enginecore.forward.cuda.kernels.attention import find
from penstock_enginecore.forward.cuda.kernels.configurations import InvariantTiles, invariant_tiles

# Assignment of rows to programs. Rows are sorted by expert, and only a tensor on the device contains where each
# expert's rows end.


def grid_rows(rows: int, experts: int, block_m: int) -> int:
    """Return the maximum number of tiles of ``block_m`` rows for ``rows`` rows. A tile has at least one row, and each
    expert has at most one partial tile.
    """
    return min(rows, rows // block_m + experts)


@triton.jit
def find_rows(ends, experts, tile, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Find the expert and the rows of the tile with index ``tile``. A tile has at most ``BLOCK_M`` rows of one expert.

    ``ends`` is int32 ``[experts]``, the end of each expert's rows. Returns whether the tile exists, the tile's expert,
    the index of the tile's first row, and the end of the expert's rows.
    """
    indices = tl.arange(0, EXPERTS)
    known = indices < experts
    upto_rows = tl.load(ends + indices, mask=known, other=0)
    from_rows = tl.load(ends + indices - 1, mask=known & (indices > 0), other=0)
    counts = tl.where(known, tl.cdiv(upto_rows - from_rows, BLOCK_M), 0)
    expert, nth = find(counts, tl.cumsum(counts, 0), indices, tile)
    begin = tl.sum(tl.where(indices == expert, from_rows, 0), 0)
    end = tl.sum(tl.where(indices == expert, upto_rows, 0), 0)
    return tile < tl.sum(counts, 0), expert, begin + nth * BLOCK_M, end


_BLOCK = 1024


def invariant_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: float, out: torch.Tensor
) -> None:
    """Multiply ``x`` by ``weight``, add ``bias`` if given, multiply by ``scale``, and write the result to ``out``. Sums
    are float32.

    Args:
        x: ``[rows, in_features]``, contiguous like all tensors.
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]``, or None.
        scale: Factor of the result.
        out: ``[rows, out_features]``.

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
    tiles = invariant_tiles(rows, out_features, x.element_size())
    grid = triton.cdiv(rows, tiles.block_m), triton.cdiv(out_features, tiles.block_n)
    product_tiles[grid](
        x, weight, bias, out, rows, out_features, in_features, scale, **_constants(tiles, x, in_features),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def invariant_grouped_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ends: torch.Tensor,
    out: torch.Tensor,
    *,
    transposed: bool = False,
) -> None:
    """Multiply each expert's rows of ``x`` by the expert's weight, add the expert's bias, and write the result to
    ``out``. Sums are float32. Rows of ``out`` after the last expert's rows are unchanged.

    Args:
        x: ``[rows, in_features]``, sorted by expert. All tensors are contiguous.
        weight: ``[experts, out_features, in_features]``, or ``[experts, in_features, out_features]`` if ``transposed``.
        bias: ``[experts, out_features]``, or None.
        ends: int32 ``[experts]``, the end of each expert's rows.
        out: ``[rows, out_features]``.
        transposed: Whether the last two dimensions of ``weight`` are swapped.

    Raises:
        ValueError: Shapes or strides are not supported.
    """
    (rows, in_features), experts = x.shape, len(weight)
    out_features = weight.shape[2 if transposed else 1]
    if weight.shape[1 if transposed else 2] != in_features or out.shape != (rows, out_features):
        raise ValueError(
            f"shapes do not match: input {list(x.shape)}, weight {list(weight.shape)}, output {list(out.shape)}"
        )
    if ends.shape != (experts,):
        raise ValueError(f"`ends` has shape {list(ends.shape)}, but there are {experts} experts")
    _check_strides(x, weight, out, ends)
    if not rows:
        return
    tiles = invariant_tiles(rows // experts, out_features, x.element_size())
    grid = grid_rows(rows, experts, tiles.block_m), triton.cdiv(out_features, tiles.block_n)
    grouped_tiles[grid](
        x, weight, bias, ends, out, experts, out_features, in_features, **_constants(tiles, x, in_features),
        EXPERTS=max(16, triton.next_power_of_2(experts)), TRANSPOSED=transposed,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def weighted_sum(
    x: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, scale: float, out: torch.Tensor, *, renormalize: bool
) -> None:
    """Multiply each token's rows of ``x`` by their weights and by ``scale``, and write the sum over the token's rows to
    ``out``. The order of the sum is fixed.

    Args:
        x: ``[rows, width]``. All tensors are contiguous.
        places: int64 ``[tokens, top_k]``, indices of each token's rows in ``x``.
        weights: float32 ``[tokens, top_k]``, weights of these rows.
        scale: Factor of the result.
        out: ``[tokens, width]``.
        renormalize: Whether to divide each token's weights by their sum.

    Raises:
        ValueError: Shapes or strides are not supported.
    """
    tokens, top_k = weights.shape
    width = x.shape[1]
    if places.shape != weights.shape or out.shape != (tokens, width):
        raise ValueError(
            f"shapes do not match: places {list(places.shape)}, weights {list(weights.shape)}, output {list(out.shape)}"
        )
    _check_strides(x, places, weights, out)
    if not tokens:
        return
    weighted_rows[(tokens, triton.cdiv(width, _BLOCK))](
        x, places, weights, out, width, scale, TOP_K=top_k, RENORMALIZE=renormalize, BLOCK=_BLOCK
    )


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
def _sums(
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
):  # fmt: skip
    """Compute a tile of ``out``. Consecutive programs use the same output features, so each feature's weights are read
    from memory once.
    """
    begin = tl.program_id(0) * BLOCK_M
    m, n, n_read, x_rows = places(x, begin, rows, tl.program_id(1), out_features, in_features, BLOCK_M, BLOCK_N)
    columns = weight + n_read[None, :].to(tl.int64) * in_features
    total = _sums(x_rows, columns, in_features, 1, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    store(total, bias, scale, n_read, out, m, rows, n, out_features)


@triton.jit
def grouped_tiles(
    x, weight, bias, ends, out, experts, out_features, in_features,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    EXPERTS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Compute a tile of ``out`` with rows of one expert, if the program's tile exists."""
    there, expert, begin, end = find_rows(ends, experts, tl.program_id(0), BLOCK_M, EXPERTS)
    if there:
        m, n, n_read, x_rows = places(x, begin, end, tl.program_id(1), out_features, in_features, BLOCK_M, BLOCK_N)
        own = weight + expert.to(tl.int64) * in_features * out_features
        if TRANSPOSED:
            columns = own + n_read[None, :]
            total = _sums(x_rows, columns, in_features, out_features, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
        else:
            columns = own + n_read[None, :].to(tl.int64) * in_features
            total = _sums(x_rows, columns, in_features, 1, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
        if bias is not None:
            bias += expert * out_features
        store(total, bias, 1.0, n_read, out, m, end, n, out_features)


@triton.jit
def weighted_rows(
    x, places, weights, out, width, scale, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute ``BLOCK`` elements of one token's weighted sum."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    factor = scale
    if RENORMALIZE:
        of_all = tl.zeros((), tl.float32)
        for i in range(TOP_K):
            of_all += tl.load(weights + token * TOP_K + i)
        factor = scale / of_all
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(TOP_K):
        weight = tl.load(weights + token * TOP_K + i) * factor
        row = tl.load(places + token * TOP_K + i)
        total += weight * tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)

"""Triton kernels that add adapters to a matrix product of many rows. Each row may use a different adapter or none
(Punica; Chen et al., 2023).

All rows of a tile use the same adapter. The shrink kernel computes ``h = x A`` for each tile. The expand kernel adds
``h B`` to the product's output for the tile's rows. Rows that are in no tile are neither read nor written.

A sum over columns of A adds the sums of chunks, and the size of a chunk depends only on the weight's shape. A sum over
the ranks of an update runs from the first to the last. A row's result is therefore bit-identical alone and in any
batch.

The launch grids of both kernels depend only on the maximum number of tiles, so that steps can be captured and replayed.
Programs for unused tiles, ranks and projections return immediately.
"""

import torch
import triton
import triton.language as tl

from penstock_enginecore.lora.device_slots import PIECE, ROW_ALIGNED, TILE_ROWS, RowTiles, SlotMatrices

RANKS = 16
COLUMNS = 128
WARPS = 4
STAGES = 4


def add_low_rank(
    x: torch.Tensor,
    matrices: SlotMatrices,
    tiles: RowTiles,
    scratch: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Add the update ``x A B * scale`` to ``out`` for the rows of ``tiles``.

    ``x``, ``out`` and the matrices have the same dtype, and the rows are contiguous. Sums are float32. ``h`` is rounded
    to the matrices' dtype.

    Args:
        matrices: Matrices of all slots.
        tiles: Tiles of the step.
        scale: Factor of the update.
        x: ``[rows, in features]``.
        scratch: float32, with at least ``SlotMatrices.scratch_numbers`` elements.
        out: ``[rows, out features]``.

    Raises:
        ValueError: A tensor has another shape, dtype or layout.
    """
    shape, numbers = matrices.shape, matrices.numbers
    if x.shape[1] != shape.in_features or out.shape != (len(x), sum(shape.features)):
        raise ValueError(
            f"input has shape {list(x.shape)} and output has shape {list(out.shape)}, but the adapter has shape {shape}"
        )
    if not x.dtype == out.dtype == numbers.dtype:
        raise ValueError(f"input is {x.dtype} and output is {out.dtype}; both must be {numbers.dtype}")
    if x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the rows of input, output and matrices must be contiguous in memory")
    if scratch.numel() < matrices.scratch_numbers(len(tiles), TILE_ROWS):
        raise ValueError(f"scratch has {scratch.numel()} elements, too few for {len(tiles)} tiles")
    if not len(tiles):
        return
    parts, most_ranks = len(shape.features), matrices.most_ranks
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    common = {"PARTS": parts, "TILE": TILE_ROWS, "RANKS": RANKS, "PRECISION": precision}
    shrink_tiles[(len(tiles), triton.cdiv(most_ranks, RANKS), shape.chunks)](
        x, numbers, matrices.table, tiles.slots, tiles.rows, scratch,
        shape.in_features, shape.chunk, x.stride(0), numbers.stride(0), matrices.table.stride(0), most_ranks,
        **common, COLUMNS=COLUMNS, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    expand_tiles[(len(tiles), len(matrices.pieces))](
        scratch, numbers, matrices.table, tiles.slots, tiles.rows, matrices.pieces, out,
        out.stride(0), numbers.stride(0), matrices.table.stride(0), most_ranks, scale,
        **common, CHUNKS=shape.chunks, FEATURES=PIECE, ROW_ALIGNED=ROW_ALIGNED, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


@triton.jit
def shrink_tiles(
    x, numbers, table, slots, tile_rows, h,
    in_features, chunk, x_stride, slot_stride, table_stride, most_ranks,
    PARTS: tl.constexpr, TILE: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a part of ``h = x A``: some ranks of one tile, summed over one chunk of columns. ``h`` has the shape
    ``[chunks, tiles, TILE, most_ranks]``.
    """
    tile = tl.program_id(0)
    slot = tl.load(slots + tile).to(tl.int64)
    if slot >= 0:
        own = table + slot * table_stride
        ranks = tl.load(own + 2 * PARTS + 1).to(tl.int32)
        r = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
        if tl.program_id(1) * RANKS < ranks:
            at = tl.arange(0, TILE)
            row = tl.load(tile_rows + tile * TILE + at)
            k = tl.arange(0, COLUMNS)
            first = tl.program_id(2) * chunk
            end = tl.minimum(first + chunk, in_features)
            a = numbers + slot * slot_stride + tl.multiple_of(tl.load(own), 16)
            x_tile = x + tl.maximum(row, 0).to(tl.int64)[:, None] * x_stride + k[None, :]
            a_tile = a + r[None, :].to(tl.int64) * in_features + k[:, None]
            total = tl.zeros((TILE, RANKS), tl.float32)
            for start in range(first, end, COLUMNS):
                inside = start + k < end
                left = tl.load(x_tile + start, mask=(row >= 0)[:, None] & inside[None, :], other=0.0)
                right = tl.load(a_tile + start, mask=(r < ranks)[None, :] & inside[:, None], other=0.0)
                total = tl.dot(left, right, total, input_precision=PRECISION)
            place = (tl.program_id(2) * tl.num_programs(0) + tile) * TILE + at
            tl.store(h + place[:, None].to(tl.int64) * most_ranks + r[None, :], total, mask=(r < ranks)[None, :])


@triton.jit
def expand_tiles(
    h, numbers, table, slots, tile_rows, pieces, out,
    out_stride, slot_stride, table_stride, most_ranks, scale,
    PARTS: tl.constexpr, TILE: tl.constexpr, RANKS: tl.constexpr, CHUNKS: tl.constexpr, FEATURES: tl.constexpr,
    ROW_ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the update to the rows of a tile, for one piece of the output features of one projection."""
    tile = tl.program_id(0)
    slot = tl.load(slots + tile).to(tl.int64)
    if slot >= 0:
        piece = pieces + tl.program_id(1) * 4
        part = tl.load(piece)
        n = tl.load(piece + 1) + tl.arange(0, FEATURES)
        begin, end = tl.load(piece + 2), tl.load(piece + 3)
        own = table + slot * table_stride
        first = tl.load(own + PARTS + 1 + part).to(tl.int32)
        rank = tl.load(own + PARTS + 2 + part).to(tl.int32) - first
        if rank > 0:
            stride = tl.multiple_of(tl.cdiv(rank, ROW_ALIGNED) * ROW_ALIGNED, ROW_ALIGNED)
            b = numbers + slot * slot_stride + tl.multiple_of(tl.load(own + 1 + part), 16)
            at = tl.arange(0, TILE)
            row = tl.load(tile_rows + tile * TILE + at)
            r = tl.arange(0, RANKS)
            total = tl.zeros((TILE, FEATURES), tl.float32)
            for start in range(0, rank, RANKS):
                held = start + r < rank
                left = tl.zeros((TILE, RANKS), tl.float32)
                for chunk in range(CHUNKS):
                    place = (chunk * tl.num_programs(0) + tile) * TILE + at
                    from_h = h + place[:, None].to(tl.int64) * most_ranks + (first + start + r)[None, :]
                    left += tl.load(from_h, mask=held[None, :], other=0.0)
                right = tl.load(
                    b + (n - begin)[None, :].to(tl.int64) * stride + (start + r)[:, None],
                    mask=held[:, None] & (n < end)[None, :], other=0.0,
                )  # fmt: skip
                total = tl.dot(left.to(numbers.dtype.element_ty), right, total, input_precision=PRECISION)
            place = out + tl.maximum(row, 0).to(tl.int64)[:, None] * out_stride + n[None, :]
            inside = (row >= 0)[:, None] & (n < end)[None, :]
            sums = tl.load(place, mask=inside, other=0.0).to(tl.float32) + total * scale
            tl.store(place, sums.to(out.dtype.element_ty), mask=inside)

"""Which rows are whose, where each expert has some: they follow one another, and the device alone knows where each one's end."""

import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernels.attention_softmax import find


def grid_rows(rows: int, experts: int, block_m: int) -> int:
    """The most tiles of ``block_m`` rows that there can be: a tile has a row at least, of each expert one at most is not full."""
    return min(rows, rows // block_m + experts)


@triton.jit
def find_rows(ends, experts, tile, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Whether there is this ``tile`` of ``BLOCK_M`` rows of one expert; the expert, where the tile's rows begin and the expert's
    end. ``ends`` int32 ``[experts]``: where those of each do.
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

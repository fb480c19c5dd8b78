"""What kernels read to add adapters to a product: where matrices are in their slots, and tiles of the rows that have them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.lora.adapter import LoraSegment, LowRankUpdate

# A slot is one piece of memory for all of an adapter's matrices, as large as ``max_lora_rank`` asks for, of which an adapter
# fills what its ranks take. So an adapter comes to the device in one copy, and a second one for the table that says where its
# matrices begin.

ALIGNED = 16
"""Numbers at a multiple of which a matrix begins, and of half of which a row of B does: vectors are loaded."""
ROW_ALIGNED = 8
PIECE = 128
"""Output features of a program. A piece has features of one projection."""
_CHUNK = 1024
_MOST_CHUNKS = 8
_STEP = 128


@dataclass(frozen=True, slots=True)
class ProductShape:
    """Projections of one input ``[rows, in_features]``, whose outputs, of ``features``, are side by side. Each has an A and a B
    in an adapter, or none.
    """

    in_features: int
    features: tuple[int, ...]

    @property
    def columns(self) -> int:
        """Of its table: where A begins, where each projection's B does, and where its rows in A begin and those of the last
        end.
        """
        return 2 * len(self.features) + 2

    @property
    def chunk(self) -> int:
        """Columns of A that a program takes, of any step: a long sum is the sum of sums of chunks, in their order."""
        whole = -(-self.in_features // (_MOST_CHUNKS * _STEP)) * _STEP
        return max(_CHUNK, whole)

    @property
    def chunks(self) -> int:
        """How many there are."""
        return -(-self.in_features // self.chunk)

    def numbers(self, ranks: Sequence[int]) -> int:
        """That matrices of ``ranks`` take, one for each projection, 0 where it has none."""
        of_b = [_whole(features * row_stride(rank)) for features, rank in zip(self.features, ranks, strict=True)]
        return _whole(sum(ranks) * self.in_features) + sum(of_b)

    def pieces(self) -> npt.NDArray[np.int32]:
        """int32 ``[pieces, 4]``: the projection of each, its first feature, and where the projection's begin and end."""
        starts = [0, *accumulate(self.features)]
        found = [
            (part, first, starts[part], starts[part + 1])
            for part in range(len(self.features))
            for first in range(starts[part], starts[part + 1], PIECE)
        ]
        return np.array(found, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class SlotMatrices:
    """Those of one product in all slots, on the device. ``numbers`` ``[slots, numbers of a slot]``, of all products; ``table``
    int64 ``[slots, columns]``, see ``ProductShape``; ``pieces`` int32 ``[pieces, 4]``. ``max_rank``: of a projection.
    """

    shape: ProductShape
    numbers: torch.Tensor
    table: torch.Tensor
    pieces: torch.Tensor
    max_rank: int

    @property
    def most_ranks(self) -> int:
        """Rows of A at most."""
        return len(self.shape.features) * self.max_rank

    def scratch_numbers(self, tiles: int, tile_rows: int) -> int:
        """Float32 numbers that stand between the two kernels, for so many tiles."""
        return self.shape.chunks * tiles * tile_rows * self.most_ranks


def row_stride(rank: int) -> int:
    """Numbers from one row of a B of ``rank`` to the next."""
    return -(-rank // ROW_ALIGNED) * ROW_ALIGNED


def pack(
    shape: ProductShape, updates: Sequence[LowRankUpdate | None], memory: torch.Tensor, start: int, table: IntArray
) -> int:
    """Write the matrices of ``updates``, one for each projection, to ``memory`` ``[numbers]`` from number ``start`` on, and where
    they are to ``table`` ``[columns]``. Returns where they end. A: rows of the projections one behind the other, those of each
    from its start on. B: a row for each feature, with the projection's rank, zeros behind.
    """
    parts = len(shape.features)
    ranks = [0 if update is None else update.rank for update in updates]
    table[0] = start
    table[parts + 1 :] = [0, *accumulate(ranks)]
    own = [update.a for update in updates if update is not None]
    if own:
        a = memory[start : start + sum(ranks) * shape.in_features]
        a.copy_(torch.cat(own).reshape(-1))
    end = start + _whole(sum(ranks) * shape.in_features)
    for part, (update, features) in enumerate(zip(updates, shape.features, strict=True)):
        table[1 + part] = end
        if update is None:
            continue
        stride = row_stride(update.rank)
        b = memory[end : end + features * stride].view(features, stride)
        b[:, : update.rank].copy_(update.b)
        b[:, update.rank :].zero_()
        end += _whole(features * stride)
    return end


def _whole(numbers: int) -> int:
    return -(-numbers // ALIGNED) * ALIGNED


# Rows of a step that have adapters, in the tiles that kernels multiply: which rows, and whose matrices.

TILE_ROWS = 16
"""Rows of a tile: the fewest that tensor cores multiply, in steps of any size. So a row's sums are those of one instruction,
whatever is computed beside it.
"""


@dataclass(frozen=True, slots=True)
class RowTiles:
    """On the device. ``slots`` int32 ``[tiles]``: where the adapter of a tile's rows is, -1 for a tile of none; ``rows`` int32
    ``[tiles, TILE_ROWS]``: which rows, -1 for none. No row is in two tiles.
    """

    slots: torch.Tensor
    rows: torch.Tensor

    def __len__(self) -> int:
        return len(self.slots)


def most_tiles(rows: int, max_loras: int) -> int:
    """The most tiles that ``rows`` rows with up to ``max_loras`` adapters fill: of each adapter one at most is not full."""
    return min(rows, rows // TILE_ROWS + max_loras)


def lay_out(
    segments: Sequence[LoraSegment],
    slots: Mapping[bytes, int],
    of_tiles: npt.NDArray[np.int32],
    of_rows: npt.NDArray[np.int32],
) -> None:
    """Write the tiles of ``segments`` to ``of_tiles`` ``[tiles]`` and ``of_rows`` ``[tiles, TILE_ROWS]``, see ``RowTiles``. An
    adapter's rows share tiles, wherever they are. ``slots``: by digest. ValueError for more than there are tiles.
    """
    of_tiles[:], of_rows[:] = -1, -1
    rows: dict[int, list[IntArray]] = {}
    for segment in segments:
        rows.setdefault(slots[segment.digest], []).append(np.arange(segment.first, segment.end))
    first = 0
    for slot, parts in rows.items():
        own = np.concatenate(parts)
        end = first + -(-len(own) // TILE_ROWS)
        if end > len(of_tiles):
            raise ValueError(f"rows with adapters fill more than {len(of_tiles)} tiles")
        of_tiles[first:end] = slot
        of_rows[first:end].reshape(-1)[: len(own)] = own
        first = end

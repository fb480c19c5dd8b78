"""Rows of a step that have adapters, in the tiles that kernels multiply: which rows, and whose matrices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.lora.adapter import LoraSegment

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

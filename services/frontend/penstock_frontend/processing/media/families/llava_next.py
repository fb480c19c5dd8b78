"""LLaVA-NeXT: an image whole, then in tiles, rows of whose features end in a newline's.

https://huggingface.co/docs/transformers/model_doc/llava_next
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock_common.errors import ConfigError
from penstock_common.types.media import TensorData
from penstock_frontend.processing.media.families import base as arguments
from penstock_frontend.processing.media.families import tensors
from penstock_frontend.processing.media.families.base import ProcessedItem
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.llava import extra_rows, image_size, patch_size
from penstock_frontend.processing.media.families.single_images import ImageFamily

# Images in tiles that a grid of them fits best, and what is left of their rows without padding (LLaVA-NeXT, LLaVA-OneVision).

Size = tuple[int, int]
"""Height and width."""


def pinpoints(checkpoint: Checkpoint) -> tuple[Size, ...]:
    """Resolutions of grids of tiles. Raises ConfigError."""
    given = checkpoint.image_processor.get("image_grid_pinpoints") or checkpoint.config.get("image_grid_pinpoints")
    if not isinstance(given, list) or not given:
        raise ConfigError(f"{checkpoint.folder}: image_grid_pinpoints is missing")
    return tuple((int(height), int(width)) for height, width in given)


def best_resolution(size: Size, resolutions: Sequence[Size]) -> Size:
    """The resolution that keeps most of an image of ``size``, of those the one that wastes least."""
    height, width = size
    best, most, least_wasted = resolutions[0], 0, math.inf
    for candidate in resolutions:
        scale = min(candidate[1] / width, candidate[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = candidate[0] * candidate[1] - kept
        if kept > most or (kept == most and wasted < least_wasted):
            best, most, least_wasted = candidate, kept, wasted
    return best


def unpadded(size: Size, grid: Size) -> Size:
    """Rows and columns of a grid of features that show an image of ``size``, and not what was put around it."""
    (height, width), (rows, columns) = size, grid
    if width / height > columns / rows:
        shown = int(round(height * (columns / width), 7))
        return rows - (rows - shown) // 2 * 2, columns
    shown = int(round(width * (rows / height), 7))
    return rows, columns - (columns - shown) // 2 * 2


class Tiles(NamedTuple):
    """``tile``: pixels of a tile; ``grid``: its features; ``extra``: rows of the whole image that are no patches."""

    tile: Size
    grid: Size
    extra: int
    resolutions: tuple[Size, ...]
    names: tuple[str, ...] = ("pixel_values", "image_sizes")

    @property
    def max_rows(self) -> int:
        """Of an image that fills a resolution."""
        return max(self.rows(size) for size in self.resolutions)

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Of ``pixel_values`` ``[1, tiles and the whole, 3, height, width]`` and ``image_sizes`` ``[1, 2]``."""
        size = checked_size(data)
        tensors.taken(data, "pixel_values", (1, num_tiles(size, self.tile, self.resolutions), 3, *self.tile))
        return ProcessedItem(modality="image", data=dict(data), num_embeds=self.rows(size))

    def rows(self, size: Size) -> int:
        """Of an image of that size."""
        best = best_resolution(size, self.resolutions)
        scale = (best[0] // self.tile[0], best[1] // self.tile[1])
        rows, columns = unpadded(size, (self.grid[0] * scale[0], self.grid[1] * scale[1]))
        return rows * columns + rows + self.grid[0] * self.grid[1] + self.extra

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """None: the tower knows the same resolutions."""
        arguments.check_names(kwargs, ())
        return {}


class LlavaNext(ImageFamily):
    """One image token for each row."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        tile, patch = image_size(checkpoint), patch_size(checkpoint)
        tiles = Tiles(tile, (tile[0] // patch, tile[1] // patch), extra_rows(checkpoint), pinpoints(checkpoint))
        super().__init__(checkpoint, checkpoint.token("image_token", "<image>"), tiles, least_embeds=1)


def checked_size(data: Mapping[str, TensorData]) -> Size:
    """The image's own size, of ``image_sizes``. Raises ValueError."""
    height, width = tensors.numbers(data, "image_sizes", (1, 2))
    if height < 1 or width < 1:
        raise ValueError(f"image_sizes is {height}, {width}; an image has pixels")
    return height, width


def num_tiles(size: Size, tile: Size, resolutions: Sequence[Size]) -> int:
    """How many pictures are made of an image: the whole, and its tiles."""
    best = best_resolution(size, resolutions)
    return 1 + -(-best[0] // tile[0]) * -(-best[1] // tile[1])

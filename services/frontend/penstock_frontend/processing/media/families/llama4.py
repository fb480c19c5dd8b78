"""Family of Llama 4, whose images are divided into tiles of one size, with the whole image as the last tile.

transformers has the image processor of Llama 4 only for torchvision. This module computes the same pictures with Pillow,
up to the rounding of resized pixels.

https://huggingface.co/docs/transformers/model_doc/llama4
"""

import functools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
from PIL.Image import Image

from penstock_common.errors import ConfigError
from penstock_common.types.media import Modality, TensorData
from penstock_frontend.processing.media.families import base as arguments
from penstock_frontend.processing.media.families import tensors
from penstock_frontend.processing.media.families.base import FamilyProcessor, ProcessedItem, Replacement
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.single_images import ImageFamily, checked, grown
from penstock_frontend.processing.media.families.tensors import MediaProcessor

Size = tuple[int, int]
"""Height and width of an image in pixels, or of a grid in tiles."""
_SIZE, _MAX_TILES = 336, 16
"""Side of a tile in pixels, and maximum number of tiles, if the checkpoint's image processor does not set them."""


class Llama4Tiles(NamedTuple):
    """Format of images that are divided into the grid of tiles that fits best.

    Attributes:
        tile: Side length of a tile in pixels.
        rows_of_tile: Number of embeddings per tile.
        max_tiles: Maximum number of tiles of a grid.
        to_largest: Whether small images are enlarged as far as the largest grid allows.
        resample: Resampling filter, as a constant of Pillow.
        names: Names of the input tensors.
    """

    tile: int
    rows_of_tile: int
    max_tiles: int
    to_largest: bool
    resample: int
    names: tuple[str, ...] = ("pixel_values", "aspect_ratios")

    @property
    def max_rows(self) -> int:
        """Maximum number of embeddings of an image."""
        return (self.max_tiles + int(self.max_tiles > 1)) * self.rows_of_tile

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for the tensors ``pixel_values`` ``[tiles, 3, height, width]`` and ``aspect_ratios``
        ``[1, 2]``, the number of rows and of columns of the grid.

        ``layout`` of the item has the same two numbers.
        """
        rows, columns = tensors.numbers(data, "aspect_ratios", (1, 2))
        if min(rows, columns) < 1:
            raise ValueError(f"aspect_ratios is [{rows}, {columns}]; both numbers must be at least 1")
        count = rows * columns + int(rows * columns > 1)
        tensors.taken(data, "pixel_values", (count, 3, self.tile, self.tile))
        return ProcessedItem(
            modality="image", data=dict(data), num_embeds=count * self.rows_of_tile, layout=(rows, columns)
        )

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments ``max_patches``, which may not be larger than in the checkpoint, and
        ``resize_to_max_canvas``.
        """
        arguments.check_names(kwargs, ("max_patches", "resize_to_max_canvas"))
        most = arguments.whole_number(kwargs, "max_patches", most=self.max_tiles)
        to_largest = arguments.flag(kwargs, "resize_to_max_canvas")
        return {
            "max_patches": most or self.max_tiles,
            "resize_to_max_canvas": self.to_largest if to_largest is None else to_largest,
        }


class Llama4Processor(MediaProcessor):
    """Processor that divides images into tiles with Pillow and numpy."""

    def __init__(self, tiles: Llama4Tiles) -> None:
        self._tiles = tiles

    def image(self, image: Image, kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Divide an image into tiles. The part of the grid that the image does not cover is black."""
        given = self._tiles.arguments(kwargs)
        side, size = self._tiles.tile, (image.height, image.width)
        rows, columns = best_grid(size, side, given["max_patches"], to_largest=given["resize_to_max_canvas"])
        canvas = (rows * side, columns * side)
        most = canvas if given["resize_to_max_canvas"] else tuple(map(min, map(max, size, (side, side)), canvas))
        shown = self._resized(image, undistorted(size, (most[0], most[1])))
        padded = np.zeros((*canvas, 3), dtype=np.uint8)
        padded[: shown.shape[0], : shown.shape[1]] = shown
        tiles = padded.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, side, side)
        if rows * columns > 1:
            whole = self._resized(image, (side, side)).transpose(2, 0, 1)
            tiles = np.concatenate([tiles, whole[None]])
        arrays = {"pixel_values": np.ascontiguousarray(tiles), "aspect_ratios": np.array([[rows, columns]])}
        return checked(self._tiles, tensors.from_arrays(arrays))

    def _resized(self, image: Image, size: Size) -> Any:
        """Return the pixels ``[height, width, 3]`` of the image at this size."""
        filters = PIL.Image.Resampling(self._tiles.resample)
        return np.asarray(image.resize((size[1], size[0]), filters))


@functools.lru_cache(maxsize=16)
def grids(max_tiles: int) -> tuple[Size, ...]:
    """Return all grids of at most ``max_tiles`` tiles, grouped by aspect ratio. The largest grid of a ratio is first."""
    by_ratio: dict[float, list[Size]] = {}
    for count in range(max_tiles, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                columns = count // rows
                by_ratio.setdefault(rows / columns, []).append((rows, columns))
    return tuple(grid for group in by_ratio.values() for grid in group)


def best_grid(size: Size, tile: int, max_tiles: int, *, to_largest: bool) -> Size:
    """Return the grid for an image of ``size``.

    If the image can be enlarged to grids, the function returns the grid that enlarges it least, or most if
    ``to_largest``. Otherwise it returns the grid that reduces the image least. Of several such grids, it returns the first
    one with the smallest area. Scales are float32, as in transformers, because equal scales decide.
    """
    height, width = (np.float32(each) for each in size)
    scales = {
        grid: min(np.float32(grid[0] * tile) / height, np.float32(grid[1] * tile) / width) for grid in grids(max_tiles)
    }
    enlarging = [scale for scale in scales.values() if scale >= 1]
    chosen = min(enlarging) if enlarging and not to_largest else max(scales.values())
    return min((grid for grid, scale in scales.items() if scale == chosen), key=lambda grid: grid[0] * grid[1])


def undistorted(size: Size, most: Size) -> Size:
    """Return the largest size with the aspect ratio of ``size`` that fits into ``most``. Both sides are at least 1."""
    height, width = size
    by_width, by_height = most[1] / width, most[0] / height
    if by_width < by_height:
        return max(min(math.floor(height * by_width), most[0]), 1), max(most[1], 1)
    return max(most[0], 1), max(min(math.floor(width * by_height), most[1]), 1)


class Llama4(ImageFamily):
    """Family of Llama 4, whose images have tokens between tiles, and at the ends of rows of tiles.

    The placeholder is another token than the token that stands for an embedding.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        settings, tower = checkpoint.image_processor, checkpoint.sub_config("vision_config")
        size = settings.get("size") or {}
        side = checkpoint.number("height", size, default=_SIZE)
        if checkpoint.number("width", size, default=side) != side:
            raise ConfigError(
                f"{checkpoint.folder}: size of Llama 4's image processor is {dict(size)}; it must be square"
            )
        ratio = checkpoint.processor.get("pixel_shuffle_ratio", tower.get("pixel_shuffle_ratio", 0.5))
        patch = checkpoint.number("patch_size", checkpoint.processor, tower, default=14)
        self._tiles = Llama4Tiles(
            tile=side,
            rows_of_tile=(side // patch) ** 2 // round(1 / ratio**2),
            max_tiles=checkpoint.number("max_patches", settings, default=_MAX_TILES),
            to_largest=bool(settings.get("resize_to_max_canvas", False)),
            resample=checkpoint.number("resample", settings, default=int(PIL.Image.Resampling.BILINEAR)),
        )
        self._whole = checkpoint.token("image_token", "<|image|>")
        self._patch = checkpoint.token("patch_token", "<|patch|>")
        self._begin = checkpoint.token("start_of_image_token", "<|image_start|>")
        self._end = checkpoint.token("end_of_image_token", "<|image_end|>")
        self._next = checkpoint.token("tile_x_separator_token", "<|tile_x_separator|>")
        self._last = checkpoint.token("tile_y_separator_token", "<|tile_y_separator|>")
        others = (self._patch, self._begin, self._end, self._next, self._last)
        super().__init__(checkpoint, self._whole, self._tiles, media_tokens=others)
        self._patch_id = checkpoint.token_id(self._patch)
        self._laid_out = functools.lru_cache(maxsize=64)(self._lay_out)

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        """Return a function that creates a ``Llama4Processor``."""
        return partial(Llama4Processor, self._tiles)

    def replacement(self, item: ProcessedItem) -> Replacement:
        """Return the replacement of an image, with tokens for each of its tiles."""
        return self._laid_out(*item.layout)

    def _lay_out(self, rows: int, columns: int) -> Replacement:
        row = self._next.join([self._patch] * columns) + self._last
        tiles = row * rows if rows * columns > 1 else ""
        text = f"{self._begin}{tiles}{self._whole}{self._patch}{self._end}"
        return grown(self.encode(text), self._patch_id, self._tiles.rows_of_tile)

    def max_tokens(self, modality: Modality) -> int:
        """Return the number of positions of the largest image: a column of tiles, which has most separators."""
        del modality
        return max(self._laid_out(*grid).span for grid in grids(self._tiles.max_tiles))

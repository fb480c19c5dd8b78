"""LLaVA: images of one size, and in LLaVA-NeXT and LLaVA-OneVision in tiles of a grid that suits them.

https://huggingface.co/docs/transformers/model_doc/llava, .../llava_next, .../llava_onevision
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import PIL.Image
from PIL.Image import Image

from penstock_common.errors import ConfigError
from penstock_common.types.media import TensorData
from penstock_frontend.processing.media.families import base as arguments
from penstock_frontend.processing.media.families import tensors
from penstock_frontend.processing.media.families.base import ProcessedItem, Replacement
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.frames import frame_videos
from penstock_frontend.processing.media.families.single_images import ImageFamily, ImageProcessor


class Square(NamedTuple):
    """Images of one ``size`` (height, width), each of ``max_rows``."""

    size: tuple[int, int]
    max_rows: int
    names: tuple[str, ...] = ("pixel_values",)

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Of ``pixel_values`` ``[1, 3, height, width]``. Others of ``names`` are not the model's."""
        pixels = tensors.taken(data, "pixel_values", (1, 3, *self.size))
        return ProcessedItem(modality="image", data={"pixel_values": pixels}, num_embeds=self.max_rows)

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """None: the tower has one size."""
        arguments.check_names(kwargs, ())
        return {}


class Llava(ImageFamily):
    """One image token for each row."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        size, patch = image_size(checkpoint), patch_size(checkpoint)
        rows = (size[0] // patch) * (size[1] // patch) + extra_rows(checkpoint)
        token = checkpoint.token("image_token", "<image>")
        super().__init__(checkpoint, token, Square(size, rows), least_embeds=rows)


def patch_size(checkpoint: Checkpoint) -> int:
    """Pixels of the side of a patch, as the processor says it, else the tower."""
    return checkpoint.number("patch_size", checkpoint.processor, checkpoint.sub_config("vision_config"))


def extra_rows(checkpoint: Checkpoint) -> int:
    """Rows that are no patches: a class token that the tower has and the model does not leave out, as the processor says it."""
    processor, config = checkpoint.processor, checkpoint.config
    strategy = processor.get("vision_feature_select_strategy") or config.get(
        "vision_feature_select_strategy", "default"
    )
    has_class_token = (
        checkpoint.sub_config("vision_config").get("model_type", "clip_vision_model") == "clip_vision_model"
    )
    more = checkpoint.number("num_additional_image_tokens", processor, default=int(has_class_token))
    return more - int(strategy == "default")


def image_size(checkpoint: Checkpoint) -> tuple[int, int]:
    """Height and width of what the image processor gives. Raises ConfigError where they depend on the image."""
    settings = checkpoint.image_processor
    crops = settings.get("do_center_crop", bool(settings.get("crop_size")))
    for size in (settings.get("crop_size") if crops else None, settings.get("size")):
        if isinstance(size, int):
            return size, size
        if isinstance(size, dict) and "height" in size and "width" in size:
            return int(size["height"]), int(size["width"])
    raise ConfigError(f"{checkpoint.folder}: preprocessor_config.json names no size that all images get")


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


def shown(size: Size, tile: Size, grid: Size, resolutions: Sequence[Size]) -> Size:
    """Rows and columns of features that show an image of ``size``, of tiles that have a ``grid`` each."""
    best = best_resolution(size, resolutions)
    return unpadded(size, (grid[0] * (best[0] // tile[0]), grid[1] * (best[1] // tile[1])))


class NextTiles(NamedTuple):
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
        rows, columns = shown(size, self.tile, self.grid, self.resolutions)
        return rows * columns + rows + self.grid[0] * self.grid[1] + self.extra

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """None: the tower knows the same resolutions."""
        arguments.check_names(kwargs, ())
        return {}


class LlavaNext(ImageFamily):
    """One image token for each row."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        tile, patch = image_size(checkpoint), patch_size(checkpoint)
        tiles = NextTiles(tile, (tile[0] // patch, tile[1] // patch), extra_rows(checkpoint), pinpoints(checkpoint))
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


_PIXELS, _NUM_IMAGES = "pixel_values", "batch_num_images"
_SQUARE = "pixel_values_of_square"
"""The one picture ``[1, 1, 3, height, width]`` that the tower gets of an image beside others: padded to a square, then resized.
No input of the model by this name.
"""
_SHRINKS_FROM = 1.1
"""How much larger than the largest grid one is that is made smaller."""


class OneVisionTiles(NamedTuple):
    """``tile``: pixels of a tile, which has ``side`` squared features; ``max_tiles``: whose features stay of an image."""

    tile: Size
    side: int
    max_tiles: int
    resolutions: tuple[Size, ...]
    names: tuple[str, ...] = ("pixel_values", "image_sizes", "batch_num_images")

    @property
    def max_rows(self) -> int:
        """Of an image whose padding, in whole rows or columns on two sides, makes its features just few enough to stay."""
        most = 0
        for height, width in self.resolutions:
            rows, columns = self.side * (height // self.tile[0]), self.side * (width // self.tile[1])
            most = max(
                most,
                *(self._kept(shown, columns) for shown in range(rows, 0, -2)),
                *(self._kept(rows, shown) for shown in range(columns, 0, -2)),
            )
        return most

    @property
    def rows_beside_others(self) -> int:
        """Of an image in a prompt with several."""
        return self.side**2 + 1

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Of ``pixel_values`` ``[1, tiles and the whole, 3, height, width]`` and ``image_sizes`` ``[1, 2]``. ``layout``: 1 where
        ``batch_num_images`` says that the image stands beside others, so that it is one picture; else empty.
        """
        size = checked_size(data)
        beside = _NUM_IMAGES in data and tensors.numbers(data, _NUM_IMAGES, (1,)) != [1]
        count = 1 if beside else num_tiles(size, self.tile, self.resolutions)
        tensors.taken(data, _PIXELS, (1, count, 3, *self.tile))
        rows = self.rows_beside_others if beside else self.rows(size)
        return ProcessedItem(modality="image", data=dict(data), num_embeds=rows, layout=(1,) if beside else ())

    def rows(self, size: Size) -> int:
        """Of an image of that size alone."""
        return self._kept(*shown(size, self.tile, (self.side, self.side), self.resolutions))

    def _kept(self, rows: int, columns: int) -> int:
        """Of features of tiles without padding: a larger grid is made smaller. Each line ends in a newline's."""
        ratio = math.sqrt(rows * columns / (self.max_tiles * self.side**2))
        if ratio > _SHRINKS_FROM:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return rows * columns + rows + self.side**2

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """None: the tower knows the same resolutions."""
        arguments.check_names(kwargs, ())
        return {}


class LlavaOnevisionProcessor(ImageProcessor):
    """What an image is alone, and what it is beside others."""

    def image(self, image: Image, kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Both: whoever puts it into a prompt knows which is wanted."""
        item = super().image(image, kwargs)
        pictures = self.processor([[image, PIL.Image.new("RGB", (1, 1))]])[_PIXELS]
        size = len(pictures.data) // pictures.shape[0]
        square = TensorData(pictures.dtype, (1, *pictures.shape[1:]), bytes(pictures.data[:size]))
        return msgspec.structs.replace(item, data={**item.data, _SQUARE: square})


class LlavaOnevision(ImageFamily):
    """One token for each row. A newline stands behind all frames of a video, which are pooled."""

    processor = LlavaOnevisionProcessor

    def __init__(self, checkpoint: Checkpoint) -> None:
        tower, processor = checkpoint.sub_config("vision_config"), checkpoint.processor
        tile = image_size(checkpoint)
        patches = (tile[0] // checkpoint.number("patch_size", tower, default=14)) ** 2
        side = math.isqrt(checkpoint.number("num_image_tokens", processor, default=patches))
        ratio = processor.get("vision_aspect_ratio") or checkpoint.config.get("vision_aspect_ratio") or "anyres_max_9"
        self._tiles = OneVisionTiles(tile, side, int(str(ratio).removeprefix("anyres_max_")), pinpoints(checkpoint))
        super().__init__(
            checkpoint,
            checkpoint.token("image_token", "<image>"),
            self._tiles,
            videos=frame_videos(checkpoint, tile, math.ceil(side / 2) ** 2, extra=1),
            video_token=checkpoint.token("video_token", "<video>"),
        )

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """Tokens, each of them a row. Of several images each is one picture. Raises ValueError for one that its client has
        processed as if it were alone.
        """
        alone = sum(item.modality == "image" for item in items) == 1
        return [
            self._of_image(item, alone=alone) if item.modality == "image" else self.replacement(item) for item in items
        ]

    def _of_image(self, item: ProcessedItem, *, alone: bool) -> Replacement:
        if alone or item.layout:
            data = {name: tensor for name, tensor in item.data.items() if name != _SQUARE}
            return Replacement([self.token_id] * item.num_embeds, data=data)
        if _SQUARE not in item.data:
            raise ValueError(
                "an image was processed as the only one of its prompt, which has several: batch_num_images is 1"
            )
        data = {
            _PIXELS: item.data[_SQUARE],
            "image_sizes": item.data["image_sizes"],
            _NUM_IMAGES: TensorData("int64", (1,), (2).to_bytes(8, "little")),  # however many there are
        }
        return Replacement([self.token_id] * self._tiles.rows_beside_others, data=data, variant="beside others")

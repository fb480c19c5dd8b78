"""Families of LLaVA models. In LLaVA, all images have one size. LLaVA-NeXT and LLaVA-OneVision divide images into a
grid of tiles.

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
    """Format of images that are resized to one ``size`` (height, width). Each image has ``max_rows`` embeddings."""

    size: tuple[int, int]
    max_rows: int
    names: tuple[str, ...] = ("pixel_values",)

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for the tensor ``pixel_values`` ``[1, 3, height, width]``.

        The model does not use the other tensors in ``names``.
        """
        pixels = tensors.taken(data, "pixel_values", (1, 3, *self.size))
        return ProcessedItem(modality="image", data={"pixel_values": pixels}, num_embeds=self.max_rows)

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return no processor arguments, because the size of the encoder's input is fixed."""
        arguments.check_names(kwargs, ())
        return {}


class Llava(ImageFamily):
    """Family of LLaVA, whose prompts have one image token for each embedding."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        size, patch = image_size(checkpoint), patch_size(checkpoint)
        rows = (size[0] // patch) * (size[1] // patch) + extra_rows(checkpoint)
        token = checkpoint.token("image_token", "<image>")
        super().__init__(checkpoint, token, Square(size, rows), least_embeds=rows)


def patch_size(checkpoint: Checkpoint) -> int:
    """Return the side length of an image patch in pixels.

    The value comes from the configuration of the processor, or else from the configuration of the encoder.
    """
    return checkpoint.number("patch_size", checkpoint.processor, checkpoint.sub_config("vision_config"))


def extra_rows(checkpoint: Checkpoint) -> int:
    """Return the number of embeddings of an image that do not stand for patches.

    The number is 1 for the encoder's class token, or 0 if the model drops the class token.
    """
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
    """Return the height and width of processed images. Raises ConfigError if the size is not the same for all images."""
    settings = checkpoint.image_processor
    crops = settings.get("do_center_crop", bool(settings.get("crop_size")))
    for size in (settings.get("crop_size") if crops else None, settings.get("size")):
        if isinstance(size, int):
            return size, size
        if isinstance(size, dict) and "height" in size and "width" in size:
            return int(size["height"]), int(size["width"])
    raise ConfigError(f"{checkpoint.folder}: preprocessor_config.json has no fixed image size")


# LLaVA-NeXT and LLaVA-OneVision divide an image into the grid of tiles that fits best. Embeddings of the padding are
# removed.

Size = tuple[int, int]
"""Height and width of an image in pixels, or of a feature grid in features."""


def pinpoints(checkpoint: Checkpoint) -> tuple[Size, ...]:
    """Return the resolutions of all tile grids that the model allows. Raises ConfigError if the configuration lists no
    resolutions.
    """
    given = checkpoint.image_processor.get("image_grid_pinpoints") or checkpoint.config.get("image_grid_pinpoints")
    if not isinstance(given, list) or not given:
        raise ConfigError(f"{checkpoint.folder}: image_grid_pinpoints is missing")
    return tuple((int(height), int(width)) for height, width in given)


def best_resolution(size: Size, resolutions: Sequence[Size]) -> Size:
    """Return the resolution of the tile grid that keeps most pixels of an image of ``size``.

    If several resolutions keep the same number of pixels, return the resolution with the least padding.
    """
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
    """Return how many rows and columns of a feature grid belong to an image of ``size``, without the image's padding."""
    (height, width), (rows, columns) = size, grid
    if width / height > columns / rows:
        shown = int(round(height * (columns / width), 7))
        return rows - (rows - shown) // 2 * 2, columns
    shown = int(round(width * (rows / height), 7))
    return rows, columns - (columns - shown) // 2 * 2


def shown(size: Size, tile: Size, grid: Size, resolutions: Sequence[Size]) -> Size:
    """Return how many rows and columns of features belong to an image of ``size``, without the image's padding.

    Each tile has a ``grid`` of features.
    """
    best = best_resolution(size, resolutions)
    return unpadded(size, (grid[0] * (best[0] // tile[0]), grid[1] * (best[1] // tile[1])))


class NextTiles(NamedTuple):
    """Format of images that are divided into tiles, for LLaVA-NeXT.

    Attributes:
        tile: Height and width of a tile in pixels.
        grid: Number of rows and columns of a tile's features.
        extra: Number of embeddings of the complete image that do not stand for patches.
        resolutions: Resolutions of the possible tile grids.
        names: Names of the input tensors.
    """

    tile: Size
    grid: Size
    extra: int
    resolutions: tuple[Size, ...]
    names: tuple[str, ...] = ("pixel_values", "image_sizes")

    @property
    def max_rows(self) -> int:
        """Maximum number of embeddings of an image. An image without padding has this many embeddings."""
        return max(self.rows(size) for size in self.resolutions)

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for the tensors ``pixel_values`` ``[1, 1 + tiles, 3, height, width]`` and
        ``image_sizes`` ``[1, 2]``.
        """
        size = checked_size(data)
        tensors.taken(data, "pixel_values", (1, num_tiles(size, self.tile, self.resolutions), 3, *self.tile))
        return ProcessedItem(modality="image", data=dict(data), num_embeds=self.rows(size))

    def rows(self, size: Size) -> int:
        """Return the number of embeddings of an image whose size is ``size``."""
        rows, columns = shown(size, self.tile, self.grid, self.resolutions)
        return rows * columns + rows + self.grid[0] * self.grid[1] + self.extra

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return no processor arguments, because the resolutions of the encoder's input are fixed."""
        arguments.check_names(kwargs, ())
        return {}


class LlavaNext(ImageFamily):
    """Family of LLaVA-NeXT, whose prompts have one image token for each embedding."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        tile, patch = image_size(checkpoint), patch_size(checkpoint)
        tiles = NextTiles(tile, (tile[0] // patch, tile[1] // patch), extra_rows(checkpoint), pinpoints(checkpoint))
        super().__init__(checkpoint, checkpoint.token("image_token", "<image>"), tiles, least_embeds=1)


def checked_size(data: Mapping[str, TensorData]) -> Size:
    """Return the original size of an image from the tensor ``image_sizes``. Raises ValueError if the width or the
    height is below 1.
    """
    height, width = tensors.numbers(data, "image_sizes", (1, 2))
    if height < 1 or width < 1:
        raise ValueError(f"image_sizes is {height}, {width}; both must be at least 1")
    return height, width


def num_tiles(size: Size, tile: Size, resolutions: Sequence[Size]) -> int:
    """Return the number of pictures that the encoder gets for an image. The pictures are the complete image and its
    tiles.
    """
    best = best_resolution(size, resolutions)
    return 1 + -(-best[0] // tile[0]) * -(-best[1] // tile[1])


_PIXELS, _NUM_IMAGES = "pixel_values", "batch_num_images"
_SQUARE = "pixel_values_of_square"
"""Name of the tensor ``[1, 1, 3, height, width]`` with the picture that the encoder gets for each image if a prompt has
several images. The image is padded to a square, then resized.

The model itself has no input with this name.
"""
_SHRINKS_FROM = 1.1
"""Factor by which a feature grid must be larger than the largest grid that is kept, before it is shrunk."""


class OneVisionTiles(NamedTuple):
    """Format of images that are divided into tiles, for LLaVA-OneVision.

    Attributes:
        tile: Height and width of a tile in pixels.
        side: Number of rows of a tile's features, which is also the number of columns.
        max_tiles: Maximum number of tiles whose features an image may keep.
        resolutions: Resolutions of the possible tile grids.
        names: Names of the input tensors.
    """

    tile: Size
    side: int
    max_tiles: int
    resolutions: tuple[Size, ...]
    names: tuple[str, ...] = ("pixel_values", "image_sizes", "batch_num_images")

    @property
    def max_rows(self) -> int:
        """Maximum number of embeddings of an image.

        The padding consists of complete rows or columns on two sides. An image with the maximum number of embeddings
        has just enough padding that its feature grid is not shrunk.
        """
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
        """Number of embeddings of each image, if its prompt has several images."""
        return self.side**2 + 1

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for the tensors ``pixel_values`` ``[1, 1 + tiles, 3, height, width]`` and
        ``image_sizes`` ``[1, 2]``.

        If ``batch_num_images`` states that the prompt has several images, the image is one picture, and ``layout`` of
        the item is 1. Otherwise ``layout`` is empty.
        """
        size = checked_size(data)
        beside = _NUM_IMAGES in data and tensors.numbers(data, _NUM_IMAGES, (1,)) != [1]
        count = 1 if beside else num_tiles(size, self.tile, self.resolutions)
        tensors.taken(data, _PIXELS, (1, count, 3, *self.tile))
        rows = self.rows_beside_others if beside else self.rows(size)
        return ProcessedItem(modality="image", data=dict(data), num_embeds=rows, layout=(1,) if beside else ())

    def rows(self, size: Size) -> int:
        """Return the number of embeddings of an image of ``size`` that is the only image in its prompt."""
        return self._kept(*shown(size, self.tile, (self.side, self.side), self.resolutions))

    def _kept(self, rows: int, columns: int) -> int:
        """Return the number of embeddings for a feature grid from which the padding was removed.

        A grid that is too large is shrunk. Each row ends with a newline embedding.
        """
        ratio = math.sqrt(rows * columns / (self.max_tiles * self.side**2))
        if ratio > _SHRINKS_FROM:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return rows * columns + rows + self.side**2

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return no processor arguments, because the resolutions of the encoder's input are fixed."""
        arguments.check_names(kwargs, ())
        return {}


class LlavaOnevisionProcessor(ImageProcessor):
    """Processor that prepares each image for two cases: the image is the only image in its prompt, or one of several
    images.
    """

    def image(self, image: Image, kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Return both forms of an image. The number of images in the prompt decides which form the encoder gets."""
        item = super().image(image, kwargs)
        pictures = self.processor([[image, PIL.Image.new("RGB", (1, 1))]])[_PIXELS]
        size = len(pictures.data) // pictures.shape[0]
        square = TensorData(pictures.dtype, (1, *pictures.shape[1:]), bytes(pictures.data[:size]))
        return msgspec.structs.replace(item, data={**item.data, _SQUARE: square})


class LlavaOnevision(ImageFamily):
    """Family of LLaVA-OneVision, whose prompts have one token for each embedding.

    The features of video frames are pooled. After the last frame of a video, there is one newline embedding.
    """

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
        """Return the replacement of each media item in the prompt, with one token for each embedding.

        If the prompt has several images, the encoder gets one picture for each image.

        Raises ValueError if a client has processed one of several images as the only image of the prompt.
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
                "an image was processed as the only image of its prompt (batch_num_images is 1), but the prompt has "
                "several images; set batch_num_images to their number"
            )
        data = {
            _PIXELS: item.data[_SQUARE],
            "image_sizes": item.data["image_sizes"],
            # any number of images above 1 has the same effect
            _NUM_IMAGES: TensorData("int64", (1,), (2).to_bytes(8, "little")),
        }
        return Replacement([self.token_id] * self._tiles.rows_beside_others, data=data, variant="beside others")

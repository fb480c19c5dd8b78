"""LLaVA-OneVision: an image whole and in tiles where it is the prompt's only one, else made a square.

https://huggingface.co/docs/transformers/model_doc/llava_onevision
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import PIL.Image
from PIL.Image import Image

from penstock_common.types.media import Modality, TensorData
from penstock_frontend.processing.media.families import base as arguments
from penstock_frontend.processing.media.families import tensors
from penstock_frontend.processing.media.families.base import FamilyProcessor, ProcessedItem, Replacement
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.frames import frame_videos
from penstock_frontend.processing.media.families.llava import image_size
from penstock_frontend.processing.media.families.llava_next import (
    Size,
    best_resolution,
    checked_size,
    num_tiles,
    pinpoints,
    unpadded,
)
from penstock_frontend.processing.media.families.single_images import ImageAndVideoProcessor, ImageFamily

_PIXELS, _NUM_IMAGES = "pixel_values", "batch_num_images"
_SQUARE = "pixel_values_of_square"
"""The one picture ``[1, 1, 3, height, width]`` that the tower gets of an image beside others: padded to a square, then resized.
No input of the model by this name.
"""
_SHRINKS_FROM = 1.1
"""How much larger than the largest grid one is that is made smaller."""


class Tiles(NamedTuple):
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
        best = best_resolution(size, self.resolutions)
        scale = (best[0] // self.tile[0], best[1] // self.tile[1])
        return self._kept(*unpadded(size, (self.side * scale[0], self.side * scale[1])))

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


class LlavaOnevision(ImageFamily):
    """One token for each row. A newline stands behind all frames of a video, which are pooled."""

    modalities: frozenset[Modality] = frozenset({"image", "video"})

    def __init__(self, checkpoint: Checkpoint) -> None:
        tower, processor = checkpoint.sub_config("vision_config"), checkpoint.processor
        tile = image_size(checkpoint)
        patches = (tile[0] // checkpoint.number("patch_size", tower, default=14)) ** 2
        side = math.isqrt(checkpoint.number("num_image_tokens", processor, default=patches))
        ratio = processor.get("vision_aspect_ratio") or checkpoint.config.get("vision_aspect_ratio") or "anyres_max_9"
        self._tiles = Tiles(tile, side, int(str(ratio).removeprefix("anyres_max_")), pinpoints(checkpoint))
        self._videos = frame_videos(checkpoint, tile, math.ceil(side / 2) ** 2, extra=1)
        self._video = checkpoint.token("video_token", "<video>")
        image = checkpoint.token("image_token", "<image>")
        super().__init__(checkpoint, image, self._tiles, media_tokens=(self._video,))
        self._video_id = checkpoint.token_id(self._video)

    def placeholder(self, modality: Modality) -> str:
        """The token of a row."""
        return self._video if modality == "video" else super().placeholder(modality)

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """Tokens, each of them a row. Of several images each is one picture. Raises ValueError for one that its client has
        processed as if it were alone.
        """
        alone = sum(item.modality == "image" for item in items) == 1
        return [self._replacement(item, alone=alone) for item in items]

    def _replacement(self, item: ProcessedItem, *, alone: bool) -> Replacement:
        if item.modality == "video":
            return Replacement([self._video_id] * item.num_embeds)
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

    def described(self, modality: Modality, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Of the tensors that the processors give."""
        return self._videos.item(data) if modality == "video" else super().described(modality, data)

    def max_tokens(self, modality: Modality) -> int:
        """Of the largest image, or a video with most frames."""
        return self._videos.max_rows if modality == "video" else super().max_tokens(modality)

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        """A ``LlavaOnevisionProcessor``."""
        return partial(LlavaOnevisionProcessor, self._folder, self._tiles, self._videos)


class LlavaOnevisionProcessor(ImageAndVideoProcessor):
    """What an image is alone, and what it is beside others."""

    def image(self, image: Image, kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Both: whoever puts it into a prompt knows which is wanted."""
        item = super().image(image, kwargs)
        pictures = self.processor([[image, PIL.Image.new("RGB", (1, 1))]])[_PIXELS]
        size = len(pictures.data) // pictures.shape[0]
        square = TensorData(pictures.dtype, (1, *pictures.shape[1:]), bytes(pictures.data[:size]))
        return msgspec.structs.replace(item, data={**item.data, _SQUARE: square})

"""LLaVA-OneVision: an image whole and in tiles where it is the prompt's only one, else whole.

https://huggingface.co/docs/transformers/model_doc/llava_onevision
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from penstock_common.types.media import DTYPE_BYTES, Modality, TensorData
from penstock_frontend.processing.media.families import arguments, tensors
from penstock_frontend.processing.media.families.anyres import Size, best_resolution, pinpoints, unpadded
from penstock_frontend.processing.media.families.base import FamilyProcessor
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.frames import frame_videos
from penstock_frontend.processing.media.families.llava import image_size
from penstock_frontend.processing.media.families.llava_next import checked_size, num_tiles
from penstock_frontend.processing.media.families.single_images import ImageAndVideoProcessor, ImageFamily
from penstock_frontend.processing.media.item import ProcessedItem, Replacement

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
        """Of ``pixel_values`` ``[1, tiles and the whole, 3, height, width]`` and ``image_sizes`` ``[1, 2]``."""
        size = checked_size(data)
        tensors.taken(data, "pixel_values", (1, num_tiles(size, self.tile, self.resolutions), 3, *self.tile))
        return ProcessedItem(modality="image", data=dict(data), num_embeds=self.rows(size))

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
        """Tokens, each of them a row. Of several images each is the whole picture alone."""
        alone = sum(item.modality == "image" for item in items) == 1
        return [self._replacement(item, alone=alone) for item in items]

    def _replacement(self, item: ProcessedItem, *, alone: bool) -> Replacement:
        if item.modality == "video":
            return Replacement([self._video_id] * item.num_embeds)
        if alone:
            return Replacement([self.token_id] * item.num_embeds)
        return Replacement([self.token_id] * self._tiles.rows_beside_others, data=_whole(item.data))

    def described(self, modality: Modality, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Of the tensors that the processors give."""
        return self._videos.item(data) if modality == "video" else super().described(modality, data)

    def max_tokens(self, modality: Modality) -> int:
        """Of the largest image, or a video with most frames."""
        return self._videos.max_rows if modality == "video" else self._tiles.max_rows

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        """An ``ImageAndVideoProcessor``."""
        return partial(ImageAndVideoProcessor, self._folder, self._tiles, self._videos)


def _whole(data: Mapping[str, TensorData]) -> dict[str, TensorData]:
    """Of an image's pictures the first, and that there are more images, however many."""
    pixels = data["pixel_values"]
    shape = (1, 1, *pixels.shape[2:])
    size = math.prod(shape) * DTYPE_BYTES[pixels.dtype]
    return {
        **data,
        "pixel_values": TensorData(pixels.dtype, shape, bytes(pixels.data[:size])),
        "batch_num_images": TensorData("int64", (1,), (2).to_bytes(8, "little")),
    }

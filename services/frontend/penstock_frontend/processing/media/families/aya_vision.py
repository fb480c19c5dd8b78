"""Aya Vision: tiles of an image, each behind its number, then the image whole.

https://huggingface.co/docs/transformers/model_doc/aya_vision
"""

import functools
from collections.abc import Sequence

from penstock_common.types.media import Modality
from penstock_frontend.processing.media.families.base import ProcessedItem, Replacement
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.internvl import canvas
from penstock_frontend.processing.media.families.single_images import ImageFamily, grown


class AyaVision(ImageFamily):
    """A begin, named tiles, an end. The placeholder is another token than those that are replaced by rows."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        processor = checkpoint.processor
        patch = checkpoint.number("patch_size", processor, default=28) * checkpoint.number(
            "downsample_factor", processor, default=1
        )
        rows = (checkpoint.number("img_size", processor, default=364) // patch) ** 2
        self._canvas = canvas(checkpoint, rows)
        self._patch = checkpoint.token("img_patch_token", "<|IMG_PATCH|>")
        self._begin = checkpoint.token("start_of_img_token", "<|START_OF_IMG|>")
        self._end = checkpoint.token("end_of_img_token", "<|END_OF_IMG|>")
        self._tile = checkpoint.token("tile_token", "TILE")
        self._whole = checkpoint.token("tile_global_token", "TILE_GLOBAL")
        super().__init__(
            checkpoint,
            checkpoint.token("image_token", "<image>"),
            self._canvas,
            media_tokens=(self._patch, self._begin, self._end),
        )
        self._patch_id = checkpoint.token_id(self._patch)
        self._encode = checkpoint.encode
        self._laid_out = functools.lru_cache(maxsize=64)(self._lay_out)

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """By their tiles."""
        return [self._laid_out(*item.layout) for item in items]

    def _lay_out(self, count: int) -> Replacement:
        tiles = "".join(f"{self._tile}_{index}{self._patch}" for index in range(1, count))
        text = f"{self._begin}{tiles}{self._whole}{self._patch}{self._end}"
        return grown(self._encode(text), self._patch_id, self._canvas.rows_of_tile)

    def max_tokens(self, modality: Modality) -> int:
        """Of an image with most tiles."""
        del modality
        largest = self._laid_out(self._canvas.max_pictures)
        last = largest.embed_runs[-1]
        return last.start + last.count - largest.embed_runs[0].start

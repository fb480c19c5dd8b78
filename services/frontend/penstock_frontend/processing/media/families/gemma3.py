"""Gemma 3: every image is as many rows, between tokens that begin and end it and blank lines. Its rows see each other.

https://huggingface.co/docs/transformers/model_doc/gemma3
"""

from collections.abc import Sequence

from penstock_common.errors import ConfigError
from penstock_common.types.media import EmbedRun
from penstock_frontend.processing.media.families.base import ProcessedItem, Replacement
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.llava import Square, image_size
from penstock_frontend.processing.media.families.single_images import ImageFamily

_APART = "\n\n"


class Gemma3(ImageFamily):
    """A begin, image tokens, an end. Crops of an image (pan and scan) are not served: each would be an image of its own."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        if checkpoint.image_processor.get("do_pan_and_scan"):
            raise ConfigError(f"{checkpoint.folder}: do_pan_and_scan of Gemma 3's image processor is not served")
        begin, token, end = (
            checkpoint.token(name, default)
            for name, default in (
                ("boi_token", "<start_of_image>"),
                ("image_token", "<image_soft_token>"),
                ("eoi_token", "<end_of_image>"),
            )
        )
        self._rows = checkpoint.number(
            "image_seq_length",
            checkpoint.processor,
            {"image_seq_length": checkpoint.config.get("mm_tokens_per_image")},
            default=256,
        )
        images = Square(image_size(checkpoint), self._rows, names=("pixel_values", "num_crops"))
        super().__init__(checkpoint, begin, images, media_tokens=(token, end), least_embeds=self._rows)
        self._token_ids = [self.token_id, *[checkpoint.token_id(token)] * self._rows, checkpoint.token_id(end)]

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """The same for all."""
        runs = (EmbedRun(1, self._rows),)
        return [Replacement(self._token_ids, runs, before=_APART, after=_APART) for _ in items]

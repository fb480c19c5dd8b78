"""InternVL: tiles of an image one after the other, between tokens that begin and end it.

https://huggingface.co/docs/transformers/model_doc/internvl
"""

from collections.abc import Sequence

from penstock_common.types.media import EmbedRun, Modality
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.single_images import ImageFamily
from penstock_frontend.processing.media.families.tiled import canvas
from penstock_frontend.processing.media.item import ProcessedItem, Replacement


class InternVL(ImageFamily):
    """A begin, one token for each row, an end."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        rows = checkpoint.number("image_seq_length", checkpoint.processor, checkpoint.config, default=256)
        self._canvas = canvas(checkpoint, rows)
        begin, end = checkpoint.token("start_image_token", "<img>"), checkpoint.token("end_image_token", "</img>")
        token = checkpoint.token("context_image_token", "<IMG_CONTEXT>")
        super().__init__(checkpoint, token, self._canvas, media_tokens=(begin, end))
        self._begin, self._end = checkpoint.token_id(begin), checkpoint.token_id(end)

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """As many image tokens as rows."""
        return [
            Replacement([self._begin, *[self.token_id] * item.num_embeds, self._end], (EmbedRun(1, item.num_embeds),))
            for item in items
        ]

    def max_tokens(self, modality: Modality) -> int:
        """Of an image with most tiles. What begins and ends it are tokens as any other."""
        del modality
        return self._canvas.max_rows

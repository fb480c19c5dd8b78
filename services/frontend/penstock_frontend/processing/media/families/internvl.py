"""InternVL: tiles of an image one after the other, between tokens that begin and end it. Frames of a video are numbered.

https://huggingface.co/docs/transformers/model_doc/internvl
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from penstock_common.types.media import EmbedRun, Modality, TensorData
from penstock_frontend.processing.media.families.base import FamilyProcessor
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.frames import frame_videos
from penstock_frontend.processing.media.families.growing import grown
from penstock_frontend.processing.media.families.single_images import ImageAndVideoProcessor, ImageFamily
from penstock_frontend.processing.media.families.tiled import canvas
from penstock_frontend.processing.media.item import ProcessedItem, Replacement


class InternVL(ImageFamily):
    """A begin, one token for each row, an end; a line of these for each frame."""

    modalities: frozenset[Modality] = frozenset({"image", "video"})

    def __init__(self, checkpoint: Checkpoint) -> None:
        rows = checkpoint.number("image_seq_length", checkpoint.processor, checkpoint.config, default=256)
        self._canvas = canvas(checkpoint, rows)
        self._videos = frame_videos(checkpoint, self._canvas.tile, rows)
        self._begin = checkpoint.token("start_image_token", "<img>")
        self._end = checkpoint.token("end_image_token", "</img>")
        self._token = checkpoint.token("context_image_token", "<IMG_CONTEXT>")
        self._video = checkpoint.token("video_token", "<video>")
        tokens = (self._begin, self._end, self._video)
        super().__init__(checkpoint, self._token, self._canvas, media_tokens=tokens, least_embeds=1)
        self._begin_id, self._end_id = checkpoint.token_id(self._begin), checkpoint.token_id(self._end)
        checkpoint.token_id(self._video)
        self._encode = checkpoint.encode

    def placeholder(self, modality: Modality) -> str:
        """Of images the token of a row."""
        return self._video if modality == "video" else super().placeholder(modality)

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """As many image tokens as rows."""
        return [self._of_frames(*item.layout) if item.modality == "video" else self._of_image(item) for item in items]

    def _of_image(self, item: ProcessedItem) -> Replacement:
        token_ids = [self._begin_id, *[self.token_id] * item.num_embeds, self._end_id]
        return Replacement(token_ids, (EmbedRun(1, item.num_embeds),))

    def _of_frames(self, count: int) -> Replacement:
        frame = f"{self._begin}{self._token}{self._end}"
        text = f"{frame}" + "".join(f"\nFrame{index}: {frame}" for index in range(2, count + 1))
        return grown(self._encode(text), self.token_id, self._videos.rows_of_frame, before="Frame1: ")

    def described(self, modality: Modality, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Of the tensors that the processors give."""
        return self._videos.item(data) if modality == "video" else super().described(modality, data)

    def max_tokens(self, modality: Modality) -> int:
        """Of an image with most tiles, or a video with most frames."""
        if modality == "image":
            return super().max_tokens(modality)
        largest = self._of_frames(self._videos.max_frames).embed_runs
        return largest[-1].start + largest[-1].count - largest[0].start

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        """An ``ImageAndVideoProcessor``."""
        return partial(ImageAndVideoProcessor, self._folder, self._canvas, self._videos)

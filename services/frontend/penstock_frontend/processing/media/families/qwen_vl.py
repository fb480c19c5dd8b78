"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images and videos.

https://huggingface.co/docs/transformers/model_doc/qwen2_vl, https://huggingface.co/docs/transformers/model_doc/qwen3_vl
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from penstock_common.types.media import Modality, TensorData
from penstock_frontend.processing.media.families.base import FamilyProcessor
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.growing import grown
from penstock_frontend.processing.media.families.qwen_images import image_grids
from penstock_frontend.processing.media.families.qwen_video import video_grids
from penstock_frontend.processing.media.families.single_images import ImageAndVideoProcessor, ImageFamily
from penstock_frontend.processing.media.item import ProcessedItem, Replacement


class QwenVL(ImageFamily):
    """One token for each row. Qwen3-VL's videos have the time of each step before it, between tokens that begin and end it."""

    modalities: frozenset[Modality] = frozenset({"image", "video"})

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._grids = image_grids(checkpoint, checkpoint.image_processor)
        self._videos = video_grids(checkpoint)
        self._video = checkpoint.token("video_token", "<|video_pad|>")
        self._begin = checkpoint.token("vision_start_token", "<|vision_start|>")
        self._end = checkpoint.token("vision_end_token", "<|vision_end|>")
        super().__init__(
            checkpoint, checkpoint.token("image_token", "<|image_pad|>"), self._grids, media_tokens=(self._video,)
        )
        self._video_id = checkpoint.token_id(self._video)
        self._encode = checkpoint.encode

    def placeholder(self, modality: Modality) -> str:
        """The token of a row."""
        return self._video if modality == "video" else super().placeholder(modality)

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        return [
            self._timed(*item.layout)
            if item.modality == "video" and self._videos.tells_times
            else Replacement([self._video_id if item.modality == "video" else self.token_id] * item.num_embeds)
            for item in items
        ]

    def _timed(self, _time: int, height: int, width: int, *tenths: int) -> Replacement:
        times = [f"<{each // 10}.{each % 10} seconds>" for each in tenths]
        steps = [f"{self._begin}{self._video}{self._end}{time}" for time in (*times[1:], "")]
        rows = height * width // self._videos.grids.merge_size**2
        return grown(self._encode("".join(steps)), self._video_id, rows, before=times[0])

    def described(self, modality: Modality, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Of the tensors that the processors give. The times of Qwen3-VL's videos are not among them."""
        return self._videos.described(data) if modality == "video" else super().described(modality, data)

    def max_tokens(self, modality: Modality) -> int:
        """Of the largest image, or video: its times have at most as many tokens as its steps have rows."""
        if modality == "image":
            return super().max_tokens(modality)
        return self._videos.max_rows * (2 if self._videos.tells_times else 1)

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        """An ``ImageAndVideoProcessor``."""
        return partial(ImageAndVideoProcessor, self._folder, self._grids, self._videos)

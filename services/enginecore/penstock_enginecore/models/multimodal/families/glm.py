"""GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR: images of any size and video, as grids of patches."""

from typing import ClassVar

from penstock_enginecore.models.multimodal.families.base import Intake
from penstock_enginecore.models.multimodal.families.qwen_vl import MAX_VIDEO_EMBEDS, Images, Qwen35, TimedVideo

_MAX_IMAGE_PIXELS = 28 * 28 * 15_000
_MAX_VIDEO_PIXELS = 28 * 28 * 2 * 30_000
"""Limits of transformers' processors, if the checkpoint's processors do not set them."""


class _Images(Images):
    """Images whose pixels count once per frame of a time step, because the processor treats an image as video."""

    most_pixels = _MAX_IMAGE_PIXELS

    @property
    def _max_pixels(self) -> int:
        return super()._max_pixels // int(self.config.vision_config.temporal_patch_size)


class _Video(TimedVideo):
    """Video whose limit of pixels applies to all frames together."""

    most_pixels = _MAX_VIDEO_PIXELS

    @property
    def max_embeds(self) -> int:
        """Number of embeddings of the largest video.

        If the number of frames is odd, the processor may count one time step less: 2 of 3 steps for 5 frames.
        """
        most = 3 * self._max_pixels // (2 * self._temporal * self._cell**2)
        return max(min(most, self.checkpoint.max_tokens, MAX_VIDEO_EMBEDS), 1)


class Glm4V(Qwen35):
    """GLM-4.1V and its successors. Text tokens between frames give the times of the frames."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (_Images, _Video)

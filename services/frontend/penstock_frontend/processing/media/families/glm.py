"""Families of GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR. Images and videos keep their aspect ratio in these models.

https://huggingface.co/docs/transformers/model_doc/glm4v, .../glm46v, .../glm_ocr
"""

from collections.abc import Sequence

from PIL.Image import Resampling

from penstock_common.types.media import Modality
from penstock_frontend.processing.media.families.base import ProcessedItem, Replacement
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.frames import Sampling
from penstock_frontend.processing.media.families.qwen_vl import MAX_ROWS, Grids, VideoGrids, image_grids
from penstock_frontend.processing.media.families.single_images import ImageFamily, grown

_LEAST_PIXELS = 112 * 112
_IMAGE_PIXELS = (_LEAST_PIXELS, 28 * 28 * 15_000)
_VIDEO_PIXELS = (_LEAST_PIXELS, 28 * 28 * 2 * 30_000)
"""Limits of transformers' processors, if the checkpoint's processors do not set them."""
_MAX_FRAMES = 640
"""Maximum number of frames of a video, if the configuration has no value."""


class _ImageGrids(Grids):
    """Format of images whose pixels count once per frame of a time step, because the processor treats an image as
    video.
    """

    @property
    def max_rows(self) -> int:
        return max(self.max_pixels // (self.temporal_patch_size * self.factor**2), 1)


class _Videos(VideoGrids):
    """Format of videos whose prompts have the time of each step in whole seconds. The time of a step is the time of its
    first frame.
    """

    @property
    def max_rows(self) -> int:
        """Maximum number of embeddings of a video. The limit of pixels applies to all frames together.

        If the number of frames is odd, the processor may count one time step less: 2 of 3 steps for 5 frames.
        """
        most = 3 * self.grids.max_pixels // (2 * self.grids.temporal_patch_size * self.grids.factor**2)
        return min(max(most, 1), MAX_ROWS)

    def _times(self, timestamps: Sequence[float]) -> tuple[int, ...]:
        """Return the times of the time steps, in the unit of the prompt's texts."""
        return tuple(self._time(seconds) for seconds in timestamps[:: self.grids.temporal_patch_size])

    def _time(self, seconds: float) -> int:
        return int(seconds)

    def text(self, time: int) -> str:
        """Return the text of a time that ``_times`` returned."""
        return str(time)


class _TenthsVideos(_Videos):
    """Format of videos whose prompts have the time of each step in tenths of a second."""

    def _time(self, seconds: float) -> int:
        return int(f"{seconds:.1f}".replace(".", ""))

    def text(self, time: int) -> str:
        return f"{time // 10}.{time % 10} seconds"


def _videos(checkpoint: Checkpoint) -> _Videos:
    """Return the video format from the configuration of the video processor. Raises ConfigError if a value in the
    configuration is not valid.
    """
    settings = checkpoint.video_processor or checkpoint.image_processor
    grids = image_grids(checkpoint, settings, default_pixels=_VIDEO_PIXELS)
    make = _TenthsVideos if _tells_tenths(checkpoint) else _Videos
    return make(
        grids,
        Sampling(1, checkpoint.number("max_frames", settings, default=_MAX_FRAMES)),
        resample=checkpoint.number("resample", settings, default=int(Resampling.BICUBIC)),
        of_all=True,
        cap=0,
        tells_seconds=False,
        tells_times=True,
    )


def _tells_tenths(checkpoint: Checkpoint) -> bool:
    """Return whether prompts have times in tenths of a second, which depends on the processor, not on the model."""
    if checkpoint.processor_class:
        return "46" in checkpoint.processor_class
    return checkpoint.model_type in ("glm46v", "glm_ocr")


class Glm4V(ImageFamily):
    """Family of GLM-4.1V and its successors.

    In prompts, a video is a sequence of images, each followed by its time.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._grids = _videos(checkpoint)
        image = checkpoint.token("image_token", "<|image|>")
        self._frame = f"<|begin_of_image|>{image}<|end_of_image|>"
        super().__init__(
            checkpoint,
            image,
            _ImageGrids(*image_grids(checkpoint, checkpoint.image_processor, default_pixels=_IMAGE_PIXELS)),
            videos=self._grids,
            video_token=checkpoint.token("video_token", "<|video|>"),
        )

    def replacement(self, item: ProcessedItem) -> Replacement:
        if item.modality == "image":
            return super().replacement(item)
        _, height, width, *times = item.layout
        *texts, last = (self._grids.text(time) for time in times)
        frames = "".join(f"{self._frame}{text}" for text in (*texts, ""))
        rows = height * width // self._grids.grids.merge_size**2
        return grown(self.encode(frames), self.token_id, rows, after=last)

    def max_tokens(self, modality: Modality) -> int:
        """Return the number of tokens that the largest image or video has.

        In the replacement of a video, the texts of times have at most as many tokens as the video has embeddings.
        """
        return super().max_tokens(modality) * (2 if modality == "video" else 1)

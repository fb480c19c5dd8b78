"""Selection of video frames, and processing of videos whose frames are resized to one size."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL.Image import Image, Resampling

from penstock_common.types.media import TensorData
from penstock_frontend.processing.media.families import base, tensors
from penstock_frontend.processing.media.families.base import ProcessedItem
from penstock_frontend.processing.media.families.checkpoint import Checkpoint

# The class below selects some of the frames of a video that a client has sent.

_DEFAULT_SECONDS = 0.5
"""Interval between frames in seconds that is assumed if a video has only one frame."""
_LONGEST = 1_000_000
"""Maximum duration of a video in seconds."""


class Sampling(NamedTuple):
    """Limits for the selection of video frames."""

    min_frames: int
    max_frames: int

    def indices(self, timestamps: Sequence[float], kwargs: Mapping[str, Any]) -> list[int]:
        """Return the indices of the selected frames.

        By default, all frames are selected. If ``num_frames`` or ``fps`` is set, frames at even intervals are selected.

        Raises ValueError for arguments or times that are not valid.
        """
        given = len(timestamps)
        if not timestamps or timestamps[-1] > _LONGEST:
            raise ValueError(
                f"the video has {given} frames, and the last timestamp is {timestamps[-1:]} s; a video must have "
                "at least one frame, "
                f"and timestamps must be at most {_LONGEST} s"
            )
        count = base.whole_number(kwargs, "num_frames", most=self.max_frames)
        if (fps := kwargs.get("fps")) is not None:
            if count is not None:
                raise ValueError(
                    "processor_kwargs.fps and processor_kwargs.num_frames are both set; use only one of them"
                )
            if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps <= 1000:
                raise ValueError(f"processor_kwargs.fps is {str(fps)[:32]}; it must be above 0 and at most 1000")
            seconds = timestamps[-1] - timestamps[0] + interval(timestamps)
            count = max(int(seconds * fps), self.min_frames)
        count = min(given if count is None else count, given, self.max_frames)
        return [int(index) for index in np.linspace(0, given - 1, count).round()]


def interval(timestamps: Sequence[float]) -> float:
    """Return the average time between two frames, in seconds."""
    if len(timestamps) < 2 or timestamps[-1] <= timestamps[0]:
        return _DEFAULT_SECONDS
    return (timestamps[-1] - timestamps[0]) / (len(timestamps) - 1)


_PIXELS = "pixel_values_videos"
_MAX_FRAMES = 32
"""Maximum number of frames of a video, if the configuration has no value."""


class FrameVideos(NamedTuple):
    """Format of videos whose frames are processed one by one.

    Attributes:
        size: Height and width of the encoder's input.
        rows_of_frame: Number of embeddings per frame.
        extra: Number of embeddings of a video in addition to the embeddings of its frames.
        max_frames: Maximum number of frames.
        resample: Pillow's resampling filter.
    """

    size: tuple[int, int]
    rows_of_frame: int
    extra: int
    max_frames: int
    resample: int

    @property
    def max_rows(self) -> int:
        """Maximum number of embeddings of a video."""
        return self.max_frames * self.rows_of_frame + self.extra

    def video(self, frames: Sequence[Image], timestamps: Sequence[float], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process the frames of a video, which may have any size. Accepts the arguments ``fps`` and ``num_frames``.
        Raises ValueError if an argument is not valid.
        """
        base.check_names(kwargs, ("fps", "num_frames"))
        indices = Sampling(1, self.max_frames).indices(timestamps, kwargs)
        height, width = self.size
        seen = [frames[index].resize((width, height), Resampling(self.resample)) for index in indices]
        pixels = np.stack([np.asarray(frame, dtype=np.uint8).transpose(2, 0, 1) for frame in seen])
        return self.item(tensors.from_arrays({_PIXELS: pixels[None]}))

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for the tensor ``pixel_values_videos`` ``[1, frames, 3, height, width]``.

        ``layout`` of the item is the number of frames.

        Raises ValueError if the tensor is missing, or has another shape or too many frames.
        """
        tensors.check_names(data, (_PIXELS,))
        count = tensors.taken(data, _PIXELS, (1, None, 3, *self.size)).shape[1]
        if not 1 <= count <= self.max_frames:
            raise ValueError(f"{_PIXELS} has {count} frames; a video may have from 1 to {self.max_frames}")
        rows = count * self.rows_of_frame + self.extra
        return ProcessedItem(modality="video", data=dict(data), num_embeds=rows, layout=(count,))


def frame_videos(checkpoint: Checkpoint, size: tuple[int, int], rows_of_frame: int, *, extra: int = 0) -> FrameVideos:
    """Return the video format from the configuration of the video processor.

    ``size`` is the size of image tiles. Frames get this size too, because the encoder accepts no other size.
    """
    settings = checkpoint.video_processor
    return FrameVideos(
        size,
        rows_of_frame,
        extra,
        max_frames=checkpoint.number("num_frames", settings, default=_MAX_FRAMES),
        resample=checkpoint.number("resample", settings, default=int(Resampling.BICUBIC)),
    )

"""Families of Qwen2-VL, Qwen2.5-VL and Qwen3-VL. Images and videos keep their aspect ratio in these models."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL.Image import Image, Resampling

from penstock_common.errors import ConfigError
from penstock_common.types.media import Modality, TensorData
from penstock_frontend.processing.media.families import base as arguments
from penstock_frontend.processing.media.families import tensors
from penstock_frontend.processing.media.families.base import ProcessedItem, Replacement
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.frames import Sampling, interval
from penstock_frontend.processing.media.families.single_images import ImageFamily, grown

# The code below is for images of the Qwen-VL families. Images keep their aspect ratio. Images are resized only if their
# number of pixels is outside the limits.

CHANNELS = 3
SHORTEST, LONGEST = "shortest_edge", "longest_edge"
"""Keys of the argument ``size``. Despite the names of the keys, their values are the numbers of pixels of the smallest
and of the largest image.
"""


class Grids(NamedTuple):
    """Format of images that are divided into patches.

    Attributes:
        patch_size: Side length of a patch in pixels.
        merge_size: Number of patches along the side of the square of patches that forms one embedding.
        temporal_patch_size: Number of video frames that one patch covers.
        min_pixels: Minimum number of pixels of an image.
        max_pixels: Maximum number of pixels of an image.
        names: Names of the input tensors.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    names: tuple[str, ...] = ("pixel_values", "image_grid_thw")

    @property
    def factor(self) -> int:
        """Side length of the square that one embedding covers, in pixels."""
        return self.patch_size * self.merge_size

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Shape of the pixels of a patch."""
        return (CHANNELS * self.temporal_patch_size * self.patch_size**2,)

    @property
    def max_rows(self) -> int:
        """Maximum number of embeddings of an image."""
        return self.max_pixels // self.factor**2

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for the tensors ``pixel_values`` ``[patches, elements of a patch]`` and
        ``image_grid_thw`` ``[1, 3]``.

        ``layout`` of the item has the size of the grid of patches.
        """
        time, height, width = tensors.numbers(data, "image_grid_thw", (1, 3))
        if time != 1:
            raise ValueError(f"image_grid_thw is {time}, {height}, {width}; the first number must be 1 for an image")
        return self.gridded("image", "pixel_values", data, (time, height, width))

    def gridded(
        self, modality: Modality, pixels: str, data: Mapping[str, TensorData], grid: tuple[int, int, int]
    ) -> ProcessedItem:
        """Return the media item for patches that form a grid of this size."""
        time, height, width = grid
        if min(grid) < 1 or height % self.merge_size or width % self.merge_size:
            raise ValueError(
                f"{height} x {width} patches cannot be divided into squares of {self.merge_size} x {self.merge_size}"
            )
        tensors.taken(data, pixels, (time * height * width, *self.patch_shape))
        rows = time * height * width // self.merge_size**2
        return ProcessedItem(modality=modality, data=dict(data), num_embeds=rows, layout=grid)

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the processor arguments ``min_pixels`` and ``max_pixels``, or ``size`` with ``shortest_edge`` and
        ``longest_edge``.

        None of these values may be larger than ``max_pixels`` of the checkpoint.
        """
        arguments.check_names(kwargs, ("min_pixels", "max_pixels", "size"))
        size = arguments.size(kwargs, {SHORTEST: self.max_pixels, LONGEST: self.max_pixels}) or {}
        least = arguments.whole_number(kwargs, "min_pixels", most=self.max_pixels) or size.get(SHORTEST)
        most = arguments.whole_number(kwargs, "max_pixels", most=self.max_pixels) or size.get(LONGEST, self.max_pixels)
        if most < self.factor**2:
            raise ValueError(f"max_pixels is {most}; it must be at least {self.factor**2}")
        if least is not None and least > most:
            raise ValueError(f"min_pixels is {least}; it must be at most max_pixels, which is {most}")
        return {"size": {SHORTEST: min(self.min_pixels, most) if least is None else least, LONGEST: most}}


def image_grids(
    checkpoint: Checkpoint, settings: Mapping[str, Any], default_pixels: tuple[int, int] = (56 * 56, 28 * 28 * 1280)
) -> Grids:
    """Return the image format from the configuration of a processor. The defaults are those of the processor's class.

    Raises ConfigError if a value in the configuration is not valid.

    ``default_pixels`` are the default minimum and the default maximum of the number of pixels.
    """
    tower = checkpoint.sub_config("vision_config")
    size = settings.get("size")
    sizes = size if isinstance(size, dict) else {}
    bounds = {
        "min_pixels": settings.get("min_pixels", sizes.get(SHORTEST, sizes.get("min_pixels"))),
        "max_pixels": settings.get("max_pixels", sizes.get(LONGEST, sizes.get("max_pixels"))),
    }
    grids = Grids(
        patch_size=checkpoint.number("patch_size", settings, tower, default=14),
        merge_size=checkpoint.number(
            "merge_size", settings, {"merge_size": tower.get("spatial_merge_size")}, default=2
        ),
        temporal_patch_size=checkpoint.number("temporal_patch_size", settings, tower, default=2),
        min_pixels=checkpoint.number("min_pixels", bounds, default=default_pixels[0]),
        max_pixels=checkpoint.number("max_pixels", bounds, default=default_pixels[1]),
    )
    if grids.max_rows < 1:
        raise ConfigError(
            f"{checkpoint.folder}: max_pixels is {grids.max_pixels}, which is less than the pixels of one embedding of the "
            "vision encoder"
        )
    return grids


# The code below is for videos of the Qwen-VL families. All frames of a video have one size. ``temporal_patch_size``
# frames form one time step.

MAX_ROWS = 16_384
"""Maximum number of embeddings of a video, even if the processor's configuration allows a higher number."""
_MOST_ELONGATED = 200
_TIMED = frozenset({"qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"})
"""Model types whose prompts contain the times of video frames as text."""
_PIXELS, _GRID, _SECONDS = "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"


class VideoGrids(NamedTuple):
    """Format of videos that are divided into patches.

    Attributes:
        grids: Format of frames. The format's limits on pixels apply to each frame, or to all frames together if
            ``of_all`` is True.
        sampling: Limits for the selection of frames.
        resample: Pillow's resampling filter.
        of_all: Whether the limits on pixels apply to all frames together.
        cap: Additional limit on the number of embeddings, or 0 for no limit. If ``of_all`` is True, it applies to each
            frame, otherwise to all frames together.
        tells_seconds: Whether the seconds between two time steps are an input of the model.
        tells_times: Whether the prompt contains the time of each time step as text, in tenths of a second.
    """

    grids: Grids
    sampling: Sampling
    resample: int
    of_all: bool
    cap: int
    tells_seconds: bool
    tells_times: bool

    @property
    def names(self) -> tuple[str, ...]:
        return (_PIXELS, _GRID, _SECONDS) if self.tells_seconds else (_PIXELS, _GRID)

    @property
    def max_rows(self) -> int:
        """Maximum number of embeddings of a video."""
        steps = -(-self.sampling.max_frames // self.grids.temporal_patch_size)
        return min(steps * max(self.grids.max_rows, 1), MAX_ROWS)

    def video(self, frames: Sequence[Image], timestamps: Sequence[float], kwargs: Mapping[str, Any]) -> ProcessedItem:
        """Process the frames of a video, which have one size. Accepts the arguments of images, ``fps`` and
        ``num_frames``. Raises ValueError if an argument is not valid or the video needs too many tokens.
        """
        arguments.check_names(kwargs, ("min_pixels", "max_pixels", "size", "fps", "num_frames"))
        of_images = {name: value for name, value in kwargs.items() if name not in ("fps", "num_frames")}
        bounds = self.grids.arguments(of_images)["size"]
        indices = self.sampling.indices(timestamps, kwargs)
        kept = [timestamps[index] for index in indices]
        width, height = frames[indices[0]].size
        size = self._size(len(indices), height, width, bounds[SHORTEST], bounds[LONGEST])
        steps = -(-len(indices) // self.grids.temporal_patch_size)
        grid = (steps, size[0] // self.grids.patch_size, size[1] // self.grids.patch_size)
        self._check(math.prod(grid) // self.grids.merge_size**2)
        data: dict[str, npt.NDArray[Any]] = {
            _PIXELS: self._patches([self._resized(frames[index], size) for index in indices], grid),
            _GRID: np.array([grid], dtype=np.int64),
        }
        if self.tells_seconds:
            seconds = self.grids.temporal_patch_size * interval(kept)
            data[_SECONDS] = np.array([seconds], dtype=np.float32)
        return self._item(tensors.from_arrays(data), grid, self._times(kept))

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for the tensors of a video. The tensors do not contain the times of the frames.

        Raises ValueError if the model needs the times of frames.
        """
        if self.tells_times:
            raise ValueError(
                f"{_PIXELS} does not contain the times of frames, which this model's prompts need; send the frames instead"
            )
        tensors.check_names(data, self.names)
        time, height, width = tensors.numbers(data, _GRID, (1, 3))
        if _SECONDS in data:
            tensors.taken(data, _SECONDS, (1,))
        item = self._item(data, (time, height, width), ())
        self._check(item.num_embeds)
        return item

    def _item(
        self, data: Mapping[str, TensorData], grid: tuple[int, int, int], times: tuple[int, ...]
    ) -> ProcessedItem:
        item = self.grids.gridded("video", _PIXELS, data, grid)
        return ProcessedItem(
            modality="video", data=item.data, num_embeds=item.num_embeds, layout=(*item.layout, *times)
        )

    def _check(self, rows: int) -> None:
        if rows > self.max_rows:
            raise ValueError(
                f"the video has {rows} embeddings; this model's limit for a video is {self.max_rows}; send fewer frames, or a "
                "smaller max_pixels"
            )

    def _size(self, count: int, height: int, width: int, least: int, most: int) -> tuple[int, int]:
        """Return the size to which the frames are resized. The computation is the same as in ``smart_resize`` of
        transformers.
        """
        factor, temporal = self.grids.factor, self.grids.temporal_patch_size
        if self.of_all and (height < factor or width < factor):
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) / min(height, width) > _MOST_ELONGATED:
            raise ValueError(
                f"the video's frames have {width} x {height} pixels; one side may be at most {_MOST_ELONGATED} "
                "times the other side"
            )
        frames, bars = (
            (max(count, temporal), round(max(count, temporal) / temporal) * temporal) if self.of_all else (1, 1)
        )
        most = self._capped(count, least, most)
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        if bars * rows * columns > most:
            shrink = math.sqrt(frames * height * width / most)
            rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
        elif bars * rows * columns < least:
            grow = math.sqrt(least / (frames * height * width))
            rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
        return rows, columns

    def _capped(self, count: int, least: int, most: int) -> int:
        if not self.cap:
            return most
        floor, pixels = int(least * 1.05), self.cap * self.grids.factor**2
        if self.of_all:
            return max(min(pixels, most // count), floor) * count
        return max(min(most, int(pixels * 0.9) * self.grids.temporal_patch_size // count), floor)

    def _resized(self, frame: Image, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
        """Return a resized frame as an array ``[channels, height, width]``."""
        resized = frame.resize((size[1], size[0]), Resampling(self.resample))
        return np.asarray(resized, dtype=np.uint8).transpose(2, 0, 1)

    def _patches(self, frames: Sequence[npt.NDArray[np.uint8]], grid: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
        """Return the patches of a video as an array ``[patches, elements of a patch]``.

        If the last time step has too few frames, repeat the last frame.
        """
        (time, height, width), merge, side = grid, self.grids.merge_size, self.grids.patch_size
        temporal = self.grids.temporal_patch_size
        video = np.stack([*frames, *[frames[-1]] * (time * temporal - len(frames))])
        channels = video.shape[1]
        split = video.reshape(time, temporal, channels, height // merge, merge, side, width // merge, merge, side)
        return split.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(time * height * width, channels * temporal * side**2)

    def _times(self, timestamps: Sequence[float]) -> tuple[int, ...]:
        """Return the time of each time step in tenths of a second.

        The time of a step is halfway between the times of its first and its last frame.
        """
        if not self.tells_times:
            return ()
        depth = self.grids.temporal_patch_size
        filled = [*timestamps, *[timestamps[-1]] * (-len(timestamps) % depth)]
        steps = ((filled[i] + filled[i + depth - 1]) / 2 for i in range(0, len(filled), depth))
        return tuple(int(f"{seconds:.1f}".replace(".", "")) for seconds in steps)


def video_grids(checkpoint: Checkpoint) -> VideoGrids:
    """Return the video format from the configuration of the video processor. The defaults are those of its class.
    Raises ConfigError if a value in the configuration is not valid.
    """
    settings = checkpoint.video_processor or checkpoint.image_processor
    of_all = checkpoint.model_type in _TIMED
    side = 32 if of_all else 28
    grids = image_grids(checkpoint, settings, default_pixels=(128 * side**2, 768 * side**2))
    sampling = Sampling(
        checkpoint.number("min_frames", settings, default=4), checkpoint.number("max_frames", settings, default=768)
    )
    cap = checkpoint.number("max_video_tokens", settings, default=768 if of_all else 128_000)
    return VideoGrids(
        grids,
        sampling,
        resample=checkpoint.number("resample", settings, default=int(Resampling.BICUBIC)),
        of_all=of_all,
        cap=cap if settings.get("cap_pixels_per_frame") else 0,
        tells_seconds=checkpoint.model_type == "qwen2_5_vl",
        tells_times=of_all,
    )


class QwenVL(ImageFamily):
    """Family of the Qwen-VL models, whose prompts have one token for each embedding.

    In prompts of Qwen3-VL, the time of each time step comes first. The embeddings of the step follow between a begin
    and an end token.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._grids = video_grids(checkpoint)
        self._begin = checkpoint.token("vision_start_token", "<|vision_start|>")
        self._video = checkpoint.token("video_token", "<|video_pad|>")
        self._end = checkpoint.token("vision_end_token", "<|vision_end|>")
        super().__init__(
            checkpoint,
            checkpoint.token("image_token", "<|image_pad|>"),
            image_grids(checkpoint, checkpoint.image_processor),
            videos=self._grids,
            video_token=self._video,
        )

    def replacement(self, item: ProcessedItem) -> Replacement:
        if item.modality == "image" or not self._grids.tells_times:
            return super().replacement(item)
        _, height, width, *tenths = item.layout
        times = [f"<{each // 10}.{each % 10} seconds>" for each in tenths]
        steps = [f"{self._begin}{self._video}{self._end}{time}" for time in (*times[1:], "")]
        rows = height * width // self._grids.grids.merge_size**2
        return grown(self.encode("".join(steps)), self._token_ids["video"], rows, before=times[0])

    def max_tokens(self, modality: Modality) -> int:
        """Return the number of tokens that the largest image or video has.

        In the replacement of a video, the texts of times have at most as many tokens as the video has embeddings.
        """
        timed = modality == "video" and self._grids.tells_times
        return super().max_tokens(modality) * (2 if timed else 1)

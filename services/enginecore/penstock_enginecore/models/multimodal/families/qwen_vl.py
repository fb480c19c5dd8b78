"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: images of any size and video, as grids of patches with time, height and width
positions.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from penstock_common.types.media import EmbedRun, Modality, MultiModalFeature
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.models.multimodal.base import (
    FLOATS,
    INTEGERS,
    PIXELS,
    ItemError,
    RopeIndex,
    RopePositions,
    Spec,
    to_torch,
)
from penstock_enginecore.models.multimodal.families.base import Family, Intake, Tensors

_SECONDS = "second_per_grid_ts"
_MAX_PIXELS = 28 * 28 * 1280
_MAX_FRAMES = 768
"""Maximum number of frames of a video, if the checkpoint's processors do not set it."""
MAX_VIDEO_EMBEDS = 16_384
_SECONDS_SPEC = Spec((*FLOATS, "float64"), (1,), wanted=False)
_GRID = Spec(INTEGERS, (1, 3))


class Images(Intake):
    """Images in which a square of patches becomes one embedding."""

    pixels_name, grid_name = "pixel_values", "image_grid_thw"
    most_pixels = _MAX_PIXELS
    """Maximum number of pixels, if the checkpoint's processor does not set it."""

    @property
    def specs(self) -> Mapping[str, Spec]:
        return {self.pixels_name: Spec(PIXELS, (None, *self.patch_shape)), self.grid_name: _GRID}

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Shape of the pixels of a patch."""
        tower = self.config.vision_config
        return (tower.in_channels * tower.temporal_patch_size * tower.patch_size**2,)

    @property
    def max_embeds(self) -> int:
        return max(min(self._max_pixels // self._cell**2, self.checkpoint.max_tokens), 1)

    def count(self, tensors: Tensors) -> int:
        time, height, width = tensors[self.grid_name][0].tolist()
        merge, patches = self._merge, len(tensors[self.pixels_name])
        if min(time, height, width) < 1 or height % merge or width % merge or time * height * width != patches:
            raise ItemError(
                f"{self.grid_name} is {[time, height, width]}; it must describe the {patches} patches of {self.pixels_name}, in "
                f"multiples of {merge}"
            )
        return int(patches // merge**2)

    def encode(self, tensors: Tensors) -> torch.Tensor:
        patches = tensors[self.pixels_name]
        pixels = self.pixels(patches.view(len(patches), self.config.vision_config.in_channels, -1), 1).flatten(1)
        found = self._features(pixels, tensors[self.grid_name].long())
        deep = [layer[0] for layer in getattr(found, "deepstack_features", None) or ()]
        return torch.cat([found.pooler_output[0], *deep], dim=-1)

    def largest_tensors(self) -> Tensors:
        return self._strip(self.max_embeds, 1)

    def _features(self, pixels: torch.Tensor, grid: torch.Tensor) -> Any:
        return self.towers.get_image_features(pixels, grid)

    def _strip(self, embeds: int, frames: int) -> Tensors:
        """Return the tensors of an item with ``frames`` frames and ``embeds`` embeddings in total. Each frame has a
        height of one embedding.
        """
        merge = self._merge
        grid = torch.tensor([[frames, merge, embeds // frames * merge]])
        return {
            self.pixels_name: torch.zeros(int(grid.prod()), *self.patch_shape, dtype=torch.uint8),
            self.grid_name: grid,
        }

    @property
    def _merge(self) -> int:
        return int(self.config.vision_config.spatial_merge_size)

    @property
    def _cell(self) -> int:
        """Side of the square that becomes one embedding, in pixels."""
        return int(self.config.vision_config.patch_size) * self._merge

    @property
    def _max_pixels(self) -> int:
        settings = self.processor_settings
        size = settings.get("size") or {}
        return int(settings.get("max_pixels") or size.get("max_pixels") or size.get("longest_edge") or self.most_pixels)


class Video(Images):
    """Video in which a square of patches of two frames becomes one embedding."""

    modality: Modality = "video"
    pixels_name, grid_name = "pixel_values_videos", "video_grid_thw"

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Requirements on the tensors of an item. The tensor with the seconds per time step affects only positions."""
        return {**super().specs, _SECONDS: _SECONDS_SPEC}

    @property
    def max_embeds(self) -> int:
        frames = max(int(self.processor_settings.get("max_frames") or _MAX_FRAMES) // self._temporal, 1)
        most = frames * max(self._max_pixels // self._cell**2, 1)
        return max(min(most, self.checkpoint.max_tokens, MAX_VIDEO_EMBEDS), 1)

    @property
    def _temporal(self) -> int:
        return int(self.config.vision_config.temporal_patch_size)

    def _features(self, pixels: torch.Tensor, grid: torch.Tensor) -> Any:
        return self.towers.get_video_features(pixels, grid)


class TimedVideo(Video):
    """Video in which text tokens with the time come before each pair of frames."""

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the largest item. The tokens with the times are at most as many as the embeddings."""
        return min(2 * self.max_embeds, self.checkpoint.max_tokens)


class _Grid(NamedTuple):
    """Size of a grid of embeddings in time, height and width. ``interval`` is the distance in positions between two
    steps in time.
    """

    time: int
    height: int
    width: int
    interval: float | torch.Tensor = 1


class Qwen2VL(Family):
    """Qwen2-VL. One step in time is a distance of one position."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (Images, Video)

    @property
    def rope_index(self) -> RopeIndex:
        return self._rope_positions

    def _rope_positions(self, token_ids: Sequence[int], features: Sequence[MultiModalFeature]) -> RopePositions:
        """Return rotary positions like ``get_rope_index`` of transformers' model, from the grids of ``features``."""
        parts: list[IntArray] = []
        at = position = 0
        for start, count, grid in self._grids(features):
            parts.append(_text(start - at, position))
            position += start - at
            if (made := grid.time * grid.height * grid.width) != count:
                raise ValueError(f"a grid has {made} embeddings, but the prompt has {count} positions for them")
            parts.append(_vision(grid, position))
            position += max(grid.height, grid.width)
            at = start + count
        parts.append(_text(len(token_ids) - at, position))
        positions = np.concatenate(parts, axis=1)
        return RopePositions(
            positions, position - at
        )  # tokens after the prompt count on from here; frames may have higher time positions

    def _grids(self, features: Sequence[MultiModalFeature]) -> Iterator[tuple[int, int, _Grid]]:
        """Yield, for each grid: the index of its first token in the prompt, its number of embeddings, and the grid."""
        for feature in features:
            grid = self._grid(feature)
            runs = feature.embed_runs or (EmbedRun(0, feature.length),)
            if len(runs) == grid.time > 1:  # the embeddings of each step in time are a separate run
                steps = [grid._replace(time=1)] * len(runs)
            elif len(runs) == 1:
                steps = [grid]
            else:
                raise ValueError(f"there are {len(runs)} runs of embeddings for {grid.time} steps in time")
            for run, step in zip(runs, steps, strict=True):
                yield feature.offset + run.start, run.count, step

    def _grid(self, feature: MultiModalFeature) -> _Grid:
        name = Video.grid_name if feature.modality == "video" else Images.grid_name
        time, height, width = _read(feature, name, _GRID)[0].tolist()
        if min(time, height, width) < 1:
            raise ValueError(f"{name} is {[time, height, width]}; each number must be at least 1")
        merge = self.config.vision_config.spatial_merge_size
        return _Grid(time, height // merge, width // merge, self._interval(feature))

    def _interval(self, _feature: MultiModalFeature) -> float | torch.Tensor:
        return 1


class Qwen25VL(Qwen2VL):
    """Qwen2.5-VL. The checkpoint sets the number of positions per second of video."""

    def _interval(self, feature: MultiModalFeature) -> float | torch.Tensor:
        if feature.modality != "video":
            return 1
        seconds = _read(feature, _SECONDS, _SECONDS_SPEC)[0] if _SECONDS in feature.data else 1
        interval: float | torch.Tensor = self.config.vision_config.tokens_per_second * seconds
        return interval


class Qwen35(Qwen2VL):
    """Qwen3.5. Text tokens between frames give the times of the frames."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (Images, TimedVideo)


class Qwen3VL(Qwen35):
    """Qwen3-VL. The text model's first layers get separate embeddings (deepstack)."""

    def __init__(self, towers: Any, checkpoint: Any) -> None:
        super().__init__(towers, checkpoint)
        self.num_deepstack = len(self.config.vision_config.deepstack_visual_indexes)


def _read(feature: MultiModalFeature, name: str, spec: Spec) -> torch.Tensor:
    """Return a tensor of the item from which rotary positions are computed. Raises ValueError if it is missing or
    invalid.
    """
    if (tensor := feature.data.get(name)) is None:
        raise ValueError(f"{name} is missing")
    try:
        spec.check(name, tensor)
    except ItemError as e:
        raise ValueError(str(e)) from None
    read = to_torch(tensor)
    if not bool(read.isfinite().all()):
        raise ValueError(f"{name} has numbers that are not finite")
    return read


def _text(count: int, position: int) -> IntArray:
    return np.broadcast_to(np.arange(position, position + count, dtype=np.int64), (3, count))


def _vision(grid: _Grid, position: int) -> IntArray:
    # Round the product in the same way as transformers.
    time = (torch.arange(grid.time) * grid.interval).long().numpy()
    sides = np.meshgrid(time, np.arange(grid.height), np.arange(grid.width), indexing="ij")
    return np.stack(sides).reshape(3, -1).astype(np.int64) + position

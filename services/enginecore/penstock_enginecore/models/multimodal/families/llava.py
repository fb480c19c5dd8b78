"""LLaVA: images of one size. LLaVA-NeXT and LLaVA-OneVision: images that are divided into a grid of tiles, which
matches the image's shape.
"""

from collections.abc import Mapping
from functools import cached_property
from math import ceil, sqrt
from typing import Any, ClassVar

import torch
from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape, image_size_to_num_patches

from penstock_common.types.media import Modality
from penstock_enginecore.models.multimodal.base import INTEGERS, PIXELS, ItemError, Spec
from penstock_enginecore.models.multimodal.families.base import (
    Intake,
    SquareFamily,
    Tensors,
    chosen_states,
    positions_of_square,
)

_PIXELS_OF_ONE_SIZE = "pixel_values"


class _ImagesOfOneSize(Intake):
    """Images in which every patch is an embedding."""

    @property
    def specs(self) -> Mapping[str, Spec]:
        side = self.config.vision_config.image_size
        return {_PIXELS_OF_ONE_SIZE: Spec(PIXELS, (1, 3, side, side))}

    @property
    def max_embeds(self) -> int:
        return positions_of_square(self.config)

    def count(self, _tensors: Tensors) -> int:
        return self.max_embeds

    def encode(self, tensors: Tensors) -> torch.Tensor:
        pixels = self.pixels(tensors[_PIXELS_OF_ONE_SIZE], 1)
        found = self.towers.get_image_features(pixel_values=pixels, **chosen_states(self.config))
        rows: torch.Tensor = found.pooler_output[0]
        return rows

    def largest_tensors(self) -> Tensors:
        side = self.config.vision_config.image_size
        return {_PIXELS_OF_ONE_SIZE: torch.zeros(1, 3, side, side, dtype=torch.uint8)}


class Llava(SquareFamily):
    """LLaVA 1.5 and models of the same architecture."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (_ImagesOfOneSize,)


# LLaVA-NeXT and LLaVA-OneVision: a small version of the whole image, followed by a grid of tiles that matches the
# image's shape.

_PIXELS, _SIZES, _NUM_IMAGES, _VIDEO = "pixel_values", "image_sizes", "batch_num_images", "pixel_values_videos"
_SQUEEZED_FROM = 1.1
"""OneVision shrinks an image if the square root of its number of patches exceeds this factor times the square root of
the limit.
"""
_MAX_FRAMES = 32
"""Maximum number of frames of a video, if the checkpoint's processor does not set this number."""


class _Images(Intake):
    """Image as embeddings of the whole image and of its tiles without padding. A newline embedding ends each row of
    patches.
    """

    @property
    def side(self) -> int:
        """Side of a tile in pixels."""
        return int(self.config.vision_config.image_size)

    @property
    def patches(self) -> int:
        """Number of patches along a side of a tile."""
        return self.side // int(self.config.vision_config.patch_size)

    @property
    def specs(self) -> Mapping[str, Spec]:
        return {_PIXELS: Spec(PIXELS, (1, None, 3, self.side, self.side)), _SIZES: Spec(INTEGERS, (1, 2))}

    @property
    def max_embeds(self) -> int:
        return self._largest[0]

    def count(self, tensors: Tensors) -> int:
        height, width = tensors[_SIZES][0].tolist()
        if height <= 0 or width <= 0:
            raise ItemError(f"{_SIZES} is {height}x{width}; both must be above 0")
        tiles, found = self.num_tiles((height, width)), tensors[_PIXELS].shape[1]
        if found != tiles:
            raise ItemError(f"{_PIXELS} has {found} tiles; an image of {height}x{width} has {tiles}")
        return self.num_embeds((height, width))

    def encode(self, tensors: Tensors) -> torch.Tensor:
        found = self.towers.get_image_features(
            pixel_values=self.pixels(tensors[_PIXELS], 2),
            image_sizes=tensors[_SIZES].cpu(),
            **chosen_states(self.config),
            **self._options(tensors),
        )
        rows: torch.Tensor = found.pooler_output[0]
        return rows

    def largest_tensors(self) -> Tensors:
        size = self._largest[1]
        return {
            _PIXELS: torch.zeros(1, self.num_tiles(size), 3, self.side, self.side, dtype=torch.uint8),
            _SIZES: torch.tensor([size]),
        }

    def num_tiles(self, size: tuple[int, int]) -> int:
        """Return the number of tiles of an image, including the whole image."""
        made: Any = image_size_to_num_patches
        return int(made(size, self.config.image_grid_pinpoints, self.side))

    def num_embeds(self, size: tuple[int, int]) -> int:
        """Return the number of embeddings of an image."""
        grid: Any = get_anyres_image_grid_shape
        rows, columns = grid(size, self.config.image_grid_pinpoints, self.side)
        return self._in_grid(*self._squeezed(*_unpadded(rows * self.patches, columns * self.patches, size)))

    def _in_grid(self, height: int, width: int) -> int:
        """Return the number of embeddings: those of ``height`` times ``width`` patches in tiles, plus those of the
        whole image.
        """
        return positions_of_square(self.config) + height * (width + 1)

    def _squeezed(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width in patches after the image is shrunk."""
        return height, width

    def _options(self, _tensors: Tensors) -> dict[str, Any]:
        return {}

    @cached_property
    def _largest(self) -> tuple[int, tuple[int, int]]:
        """Number of embeddings, and height and width in pixels, of the largest image that fits into a prompt.

        This image fills a grid of tiles completely in one direction. No other image has more embeddings.
        """
        found: list[tuple[int, tuple[int, int]]] = []
        for grid_height, grid_width in self.config.image_grid_pinpoints:
            rows, columns = (side // self.side * self.patches for side in (grid_height, grid_width))
            filled = {(rows, width) for width in range(1, columns + 1)} | {
                (height, columns) for height in range(1, rows)
            }
            found += [(self._in_grid(*self._squeezed(*each)), each) for each in filled]
        fitting = [each for each in found if each[0] <= self.checkpoint.max_tokens]
        embeds, (height, width) = max(fitting) if fitting else min(found)
        patch = self.side // self.patches
        return embeds, (height * patch, width * patch)


class _OneVisionImages(_Images):
    """Images whose hidden states are shrunk after the encoder if the image is large. If a prompt has several images,
    each image is one tile.
    """

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Requirements on the tensors of an item. ``batch_num_images`` is the number of images in the prompt."""
        return {**super().specs, _NUM_IMAGES: Spec(INTEGERS, (1,), wanted=False)}

    def count(self, tensors: Tensors) -> int:
        if not _is_one_of_several(tensors):
            return super().count(tensors)
        if (found := tensors[_PIXELS].shape[1]) != 1:
            raise ItemError(f"{_PIXELS} has {found} tiles; if a prompt has several images, each image must have 1 tile")
        return positions_of_square(self.config) + 1

    def _options(self, tensors: Tensors) -> dict[str, Any]:
        # The item is encoded alone. transformers expects the number of images here, but only checks whether the number
        # is 1.
        several = _is_one_of_several(tensors)
        return {
            "vision_aspect_ratio": self.config.vision_aspect_ratio,
            "batch_num_images": torch.tensor([2 if several else 1]),
        }

    def _squeezed(self, height: int, width: int) -> tuple[int, int]:
        most = int(self.config.vision_aspect_ratio.removeprefix("anyres_max_"))
        ratio = sqrt(height * width / (most * self.patches**2))
        return (int(height // ratio), int(width // ratio)) if ratio > _SQUEEZED_FROM else (height, width)


class _OneVisionVideo(Intake):
    """Video with frames of one size. The embeddings of each frame are pooled, and a newline embedding follows the last
    frame.
    """

    modality: Modality = "video"

    @property
    def specs(self) -> Mapping[str, Spec]:
        side = self.config.vision_config.image_size
        return {_VIDEO: Spec(PIXELS, (1, None, 3, side, side))}

    @property
    def max_embeds(self) -> int:
        return self._max_frames * self._per_frame + 1

    def count(self, tensors: Tensors) -> int:
        return int(tensors[_VIDEO].shape[1]) * self._per_frame + 1

    def encode(self, tensors: Tensors) -> torch.Tensor:
        found = self.towers.get_video_features(self.pixels(tensors[_VIDEO], 2), **chosen_states(self.config))
        rows: torch.Tensor = found.pooler_output[0]
        return rows

    def largest_tensors(self) -> Tensors:
        side = self.config.vision_config.image_size
        return {_VIDEO: torch.zeros(1, self._max_frames, 3, side, side, dtype=torch.uint8)}

    @property
    def _per_frame(self) -> int:
        tower = self.config.vision_config
        return int(ceil(tower.image_size // tower.patch_size / 2) ** 2)

    @property
    def _max_frames(self) -> int:
        most = self.processor_settings.get("num_frames") or _MAX_FRAMES
        return max(min(most, (self.checkpoint.max_tokens - 1) // self._per_frame), 1)


class LlavaNext(SquareFamily):
    """LLaVA 1.6."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (_Images,)


class LlavaOneVision(SquareFamily):
    """LLaVA-OneVision: one image or several in a prompt, and video."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (_OneVisionImages, _OneVisionVideo)


def _is_one_of_several(tensors: Tensors) -> bool:
    return _NUM_IMAGES in tensors and int(tensors[_NUM_IMAGES][0]) != 1


def _unpadded(height: int, width: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width, in patches, of the part of ``height`` times ``width`` patches that an image of
    ``size`` fills, like ``unpad_image`` of transformers.
    """
    own_height, own_width = size
    if own_width / own_height > width / height:
        filled = int(round(own_height * (width / own_width), 7))
        return height - (height - filled) // 2 * 2, width
    filled = int(round(own_width * (height / own_height), 7))
    return height, width - (width - filled) // 2 * 2

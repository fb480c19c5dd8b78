"""Pixtral's vision encoder, for images of any size: in LLaVA, and in Mistral 3, which merges its patches."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from penstock_enginecore.models.multimodal.base import INTEGERS, PIXELS, ItemError, Spec
from penstock_enginecore.models.multimodal.families.base import Family, Intake, Tensors

_PIXELS, _SIZES = "pixel_values", "image_sizes"
_LONGEST_EDGE = 1024
"""Longest side of an image in pixels, if the checkpoint's processor does not set it."""


class _Images(Intake):
    """Images in which each patch is an embedding. A token ends each row of patches."""

    @property
    def cell(self) -> int:
        """Side of the square that becomes one embedding, in pixels."""
        return int(self.config.vision_config.patch_size)

    @property
    def specs(self) -> Mapping[str, Spec]:
        return {_PIXELS: Spec(PIXELS, (1, 3, None, None)), _SIZES: Spec(INTEGERS, (1, 2))}

    @property
    def max_embeds(self) -> int:
        rows, columns = self._largest()
        return rows * columns

    @property
    def max_tokens(self) -> int:
        rows, columns = self._largest()
        return rows * (columns + 1)

    def count(self, tensors: Tensors) -> int:
        height, width = tensors[_SIZES][0].tolist()
        if (height, width) != tuple(tensors[_PIXELS].shape[2:]):
            raise ItemError(f"{_SIZES} is {height}x{width}, but {_PIXELS} has shape {list(tensors[_PIXELS].shape)}")
        longest = int(self.config.vision_config.image_size)
        if height % self.cell or width % self.cell or max(height, width) > longest:
            raise ItemError(f"{_SIZES} is {height}x{width}; it must be multiples of {self.cell} up to {longest}")
        return int(height // self.cell * (width // self.cell))

    def encode(self, tensors: Tensors) -> torch.Tensor:
        found = self.towers.get_image_features(
            pixel_values=self.pixels(tensors[_PIXELS], 1),
            image_sizes=tensors[_SIZES].cpu(),
            vision_feature_layer=self.config.vision_feature_layer,
            **self._options(),
        )
        rows: torch.Tensor = found.pooler_output[0]
        return rows

    def largest_tensors(self) -> Tensors:
        height, width = (cells * self.cell for cells in self._largest())
        return {
            _PIXELS: torch.zeros(1, 3, height, width, dtype=torch.uint8),
            _SIZES: torch.tensor([[height, width]]),
        }

    def _options(self) -> dict[str, Any]:
        return {"vision_feature_select_strategy": self.config.vision_feature_select_strategy}

    def _largest(self) -> tuple[int, int]:
        """Return the numbers of rows and columns of embeddings in the largest image."""
        size = self.processor_settings.get("size") or {}
        longest = size if isinstance(size, int) else size.get("longest_edge") or size.get("height") or _LONGEST_EDGE
        cells = max(min(longest, self.config.vision_config.image_size) // self.cell, 1)
        columns = max(min(cells, self.checkpoint.max_tokens - 1), 1)
        return max(min(cells, self.checkpoint.max_tokens // (columns + 1)), 1), columns


class _MergedImages(_Images):
    """Images in which a square of patches becomes one embedding."""

    @property
    def cell(self) -> int:
        return int(self.config.vision_config.patch_size) * int(self.config.spatial_merge_size)

    def _options(self) -> dict[str, Any]:
        return {}


class LlavaPixtral(Family):
    """Pixtral 12B."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (_Images,)


class Mistral3(Family):
    """Mistral Small 3.1 and later."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (_MergedImages,)

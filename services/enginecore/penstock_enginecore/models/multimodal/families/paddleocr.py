"""PaddleOCR-VL: images of any size as grids of patches, which are merged after the encoder."""

from typing import ClassVar

import torch

from penstock_enginecore.models.multimodal.families.base import Intake, Tensors
from penstock_enginecore.models.multimodal.families.qwen_vl import Images, Qwen2VL


class _Images(Images):
    """Images whose patches are small images, in rows from left to right."""

    most_pixels = 1536 * 1536

    @property
    def patch_shape(self) -> tuple[int, ...]:
        tower = self.config.vision_config
        return (tower.num_channels, tower.patch_size, tower.patch_size)

    def encode(self, tensors: Tensors) -> torch.Tensor:
        pixels = self.pixels(tensors[self.pixels_name], 1)
        rows: torch.Tensor = self._features(pixels, tensors[self.grid_name].long()).pooler_output[0]
        return rows


class PaddleOCRVL(Qwen2VL):
    """PaddleOCR-VL."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (_Images,)

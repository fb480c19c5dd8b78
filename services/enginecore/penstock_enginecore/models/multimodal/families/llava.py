"""LLaVA with CLIP's or SigLIP's tower: images of one size."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from penstock_enginecore.models.multimodal.base import PIXELS, Spec
from penstock_enginecore.models.multimodal.families.base import (
    Intake,
    SquareFamily,
    Tensors,
    chosen_states,
    positions_of_square,
)

_PIXELS = "pixel_values"


class _Images(Intake):
    """All patches of an image are embeddings."""

    @property
    def specs(self) -> Mapping[str, Spec]:
        side = self.config.vision_config.image_size
        return {_PIXELS: Spec(PIXELS, (1, 3, side, side))}

    @property
    def max_embeds(self) -> int:
        return positions_of_square(self.config)

    def count(self, _tensors: Tensors) -> int:
        return self.max_embeds

    def encode(self, tensors: Tensors) -> torch.Tensor:
        pixels = self.pixels(tensors[_PIXELS], 1)
        found = self.towers.get_image_features(pixel_values=pixels, **chosen_states(self.config))
        rows: torch.Tensor = found.pooler_output[0]
        return rows

    def largest_tensors(self) -> Tensors:
        side = self.config.vision_config.image_size
        return {_PIXELS: torch.zeros(1, 3, side, side, dtype=torch.uint8)}


class Llava(SquareFamily):
    """LLaVA 1.5 and what is made like it."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (_Images,)

"""Llama 4: images in tiles of one size, with the whole image as the last tile."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from penstock_common.types.media import Modality
from penstock_enginecore.models.multimodal.base import INTEGERS, PIXELS, Spec
from penstock_enginecore.models.multimodal.families.base import Family, Intake, Tensors
from penstock_enginecore.models.multimodal.processors import Normalization

_PIXELS = "pixel_values"
_MAX_TILES = 16
"""Maximum number of tiles, without the whole image, if the checkpoint's processor does not set it."""
_BESIDE = 3
"""Number of tokens around the embeddings of the whole image: begin, image and end."""


class _Images(Intake):
    """Image of one tile, or of several tiles and the whole image. Each tile has one token behind its embeddings."""

    modality: Modality = "image"

    @property
    def specs(self) -> Mapping[str, Spec]:
        return {
            _PIXELS: Spec(PIXELS, (None, 3, self.side, self.side)),
            "aspect_ratios": Spec(INTEGERS, (1, 2), wanted=False),
        }

    @property
    def side(self) -> int:
        """Side of a tile in pixels."""
        return int(self.config.vision_config.image_size)

    @property
    def per_tile(self) -> int:
        """Number of embeddings of a tile."""
        tower = self.config.vision_config
        patches = self.side // int(tower.patch_size)
        return patches**2 // round(1 / float(tower.pixel_shuffle_ratio) ** 2)

    @property
    def max_tiles(self) -> int:
        """Number of tiles of the largest item that fits into a prompt, with the whole image."""
        most = int(self.processor_settings.get("max_patches") or _MAX_TILES)
        return max(min(most + int(most > 1), self.checkpoint.max_tokens // self.per_tile), 1)

    @property
    def max_embeds(self) -> int:
        return self.max_tiles * self.per_tile

    @property
    def max_tokens(self) -> int:
        return self.max_embeds + self.max_tiles + _BESIDE

    def count(self, tensors: Tensors) -> int:
        return self.per_tile * len(tensors[_PIXELS])

    def encode(self, tensors: Tensors) -> torch.Tensor:
        found = self.towers.get_image_features(self.pixels(tensors[_PIXELS], 1)).last_hidden_state
        rows: torch.Tensor = self.towers.multi_modal_projector(found.flatten(0, 1))
        return rows

    def largest_tensors(self) -> Tensors:
        return {_PIXELS: torch.zeros(self.max_tiles, 3, self.side, self.side, dtype=torch.uint8)}

    def _normalization(self) -> Normalization | None:
        """Return a normalization that rounds each operation to bfloat16, as the model's processor does."""
        settings: dict[str, Any] = {**self.processor_settings}
        if not (settings.get("do_rescale", True) and settings.get("do_normalize", True)):
            return super()._normalization()
        mean, std = (
            torch.tensor(settings.get(name) or [0.5] * 3, dtype=torch.bfloat16)[:, None]
            for name in ("image_mean", "image_std")
        )
        levels = torch.arange(256).bfloat16() * settings.get("rescale_factor", 1 / 255)
        return Normalization(((levels - mean) / std).float()).to(self.checkpoint.device)


class Llama4(Family):
    """Llama 4 Scout and Maverick."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (_Images,)

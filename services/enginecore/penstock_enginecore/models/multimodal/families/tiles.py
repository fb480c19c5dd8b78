"""Images in tiles of one size, with the same number of embeddings per tile: Gemma 3, InternVL, Aya Vision, Idefics 3,
SmolVLM.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from penstock_common.types.media import Modality
from penstock_enginecore.models.multimodal.base import INTEGERS, MASKS, PIXELS, Spec
from penstock_enginecore.models.multimodal.families.base import Family, Intake, SquareFamily, Tensors, chosen_states

_PIXELS, _VIDEO, _MASK = "pixel_values", "pixel_values_videos", "pixel_attention_mask"
_MAX_PATCHES = 12
_MAX_FRAMES = 64
"""Maximum number of frames of a video, if the checkpoint's processors do not set it."""


class _Tiles(Intake):
    """Item whose tiles are the first dimension of ``pixels_name``."""

    pixels_name = _PIXELS
    between = 1
    """Maximum number of tokens around the embeddings of each tile. The whole item may have the same number of tokens in
    addition.
    """

    @property
    @abstractmethod
    def per_tile(self) -> int:
        """Number of embeddings of a tile."""

    @property
    @abstractmethod
    def most_tiles(self) -> int:
        """Number of tiles of the largest item that the checkpoint's processor makes."""

    @property
    def side(self) -> int:
        """Side of a tile in pixels."""
        size = self.config.vision_config.image_size
        return int(size if isinstance(size, int) else size[0])

    @property
    def max_tiles(self) -> int:
        """Number of tiles of the largest item that fits into a prompt."""
        return max(min(self.most_tiles, self.checkpoint.max_tokens // self.per_tile), 1)

    @property
    def max_embeds(self) -> int:
        return self.max_tiles * self.per_tile

    @property
    def max_tokens(self) -> int:
        return self.max_embeds + (self.max_tiles + 1) * self.between

    def count(self, tensors: Tensors) -> int:
        return self.per_tile * len(self._flat(tensors[self.pixels_name]))

    def encode(self, tensors: Tensors) -> torch.Tensor:
        found = self.towers.get_image_features(self.pixels(self._flat(tensors[self.pixels_name]), 1), **self._options())
        rows: torch.Tensor = found.pooler_output.flatten(0, 1)
        return rows

    def largest_tensors(self) -> Tensors:
        return {self.pixels_name: torch.zeros(self.max_tiles, 3, self.side, self.side, dtype=torch.uint8)}

    def _flat(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the pixels as ``[tiles, 3, side, side]``."""
        return pixels

    def _options(self) -> dict[str, Any]:
        return {}


class _CroppedTiles(_Tiles):
    """Image that is divided into as many tiles as its shape needs. If there is more than one tile, the whole image is
    an additional tile.
    """

    @property
    def specs(self) -> Mapping[str, Spec]:
        return {
            _PIXELS: Spec(PIXELS, (None, 3, self.side, self.side)),
            "num_patches": Spec(INTEGERS, (1,), wanted=False),
        }

    @property
    def most_tiles(self) -> int:
        """Number of tiles of the largest item. The processor of these models always divides images into tiles, whatever
        the image processor's settings say.
        """
        most = int(self.processor_settings.get("max_patches") or _MAX_PATCHES)
        return most + 1 if most > 1 else 1

    def _options(self) -> dict[str, Any]:
        return chosen_states(self.config)


class _Gemma3Images(_Tiles):
    """Image as one tile, whose embeddings attend to each other."""

    @property
    def attends_both_ways(self) -> bool:
        return True

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Requirements on the tensors of an item. An item is one image without crops, because each crop would be a
        separate item.
        """
        return {_PIXELS: Spec(PIXELS, (1, 3, self.side, self.side)), "num_crops": Spec(INTEGERS, (1,), wanted=False)}

    @property
    def per_tile(self) -> int:
        return int(self.config.mm_tokens_per_image)

    @property
    def most_tiles(self) -> int:
        return 1


class _InternVLImages(_CroppedTiles):
    @property
    def per_tile(self) -> int:
        tower = self.config.vision_config
        side = self.side // (tower.patch_size if isinstance(tower.patch_size, int) else tower.patch_size[0])
        return int(side * self.config.downsample_ratio) ** 2


class _InternVLVideo(_InternVLImages):
    """Video in which each frame is a tile."""

    modality: Modality = "video"
    pixels_name = _VIDEO
    between = 12

    @property
    def specs(self) -> Mapping[str, Spec]:
        return {_VIDEO: Spec(PIXELS, (1, None, 3, self.side, self.side))}

    @property
    def most_tiles(self) -> int:
        return int(self.processor_settings.get("num_frames") or _MAX_FRAMES)

    def largest_tensors(self) -> Tensors:
        return {_VIDEO: super().largest_tensors()[_VIDEO][None]}

    def _flat(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels[0]


class _AyaImages(_CroppedTiles):
    between = 2

    @property
    def per_tile(self) -> int:
        tower = self.config.vision_config
        return int(self.side // tower.patch_size // self.config.downsample_factor) ** 2


class _IdeficsImages(_Tiles):
    """Image that is divided into a grid of tiles, plus the whole image as an additional tile."""

    between = 8

    @property
    def specs(self) -> Mapping[str, Spec]:
        return {
            _PIXELS: Spec(PIXELS, (1, None, 3, self.side, self.side)),
            _MASK: Spec(MASKS, (1, None, self.side, self.side), wanted=False),
            "rows": Spec(INTEGERS, (1, 1), wanted=False),
            "cols": Spec(INTEGERS, (1, 1), wanted=False),
        }

    @property
    def per_tile(self) -> int:
        side = self.side // self.config.vision_config.patch_size
        return int(side**2 // self.config.scale_factor**2)

    @property
    def most_tiles(self) -> int:
        settings = self.processor_settings
        longest = (settings.get("size") or {}).get("longest_edge", 4 * self.side)
        tiles = -(-longest // self.side)
        return int(tiles**2 + 1) if settings.get("do_image_splitting", True) and tiles > 1 else 1

    def encode(self, tensors: Tensors) -> torch.Tensor:
        """Encode an item. After the normalization, masked pixels are set to the value of padding."""
        pixels, mask = self.pixels(tensors[_PIXELS], 2), tensors.get(_MASK)
        if mask is not None:
            mask = mask.bool()
            pixels = pixels.masked_fill(~mask[:, :, None], 0)
        found = self.towers.get_image_features(pixels, pixel_attention_mask=mask)
        rows: torch.Tensor = found.pooler_output[0]
        return rows

    def largest_tensors(self) -> Tensors:
        # transformers would treat a tile that is all zeros after the normalization as padding.
        return {_PIXELS: super().largest_tensors()[_PIXELS][None] + 1}

    def _flat(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels[0]


class _SmolVLMVideo(_IdeficsImages):
    """Video in which each frame is a tile."""

    modality: Modality = "video"
    between = 12

    @property
    def most_tiles(self) -> int:
        return int((self.processor_settings.get("video_sampling") or {}).get("max_frames") or _MAX_FRAMES)


class Gemma3(Family):
    """Gemma 3 with 4B parameters or more."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (_Gemma3Images,)


class InternVL(Family):
    """InternVL 3 in transformers' format."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (_InternVLImages, _InternVLVideo)


class AyaVision(SquareFamily):
    """Aya Vision."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (_AyaImages,)


class Idefics3(Family):
    """Idefics 3, and SmolVLM models of the same type."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (_IdeficsImages,)


class SmolVLM(Family):
    """SmolVLM 2."""

    intakes: ClassVar[tuple[type[Intake], ...]] = (_IdeficsImages, _SmolVLMVideo)

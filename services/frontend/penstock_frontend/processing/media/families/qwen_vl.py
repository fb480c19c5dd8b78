"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images keep their shape within a number of pixels.

https://huggingface.co/docs/transformers/model_doc/qwen2_vl
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock_common.errors import ConfigError
from penstock_common.types.media import Modality, TensorData
from penstock_frontend.processing.media.families import arguments, tensors
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.single_images import ImageFamily
from penstock_frontend.processing.media.item import ProcessedItem, Replacement

_CHANNELS = 3
_SHORTEST, _LONGEST = "shortest_edge", "longest_edge"
"""Of a size: pixels of the smallest and of the largest image, in spite of their names."""


class Grids(NamedTuple):
    """``patch_size``: pixels of the side of a patch; ``merge_size`` squared patches are a row; ``temporal_patch_size``: frames
    of a patch. ``min_pixels``, ``max_pixels``: of an image.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    names: tuple[str, ...] = ("pixel_values", "image_grid_thw")

    @property
    def factor(self) -> int:
        """Pixels of the side of what a row stands for."""
        return self.patch_size * self.merge_size

    @property
    def max_rows(self) -> int:
        """Of an image with as many pixels as there may be."""
        return self.max_pixels // self.factor**2

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Of ``pixel_values`` ``[patches, numbers of a patch]`` and ``image_grid_thw`` ``[1, 3]``. ``layout``: the grid."""
        time, height, width = tensors.numbers(data, "image_grid_thw", (1, 3))
        if time != 1:
            raise ValueError(f"image_grid_thw is {time}, {height}, {width}; an image is one in time")
        return self.gridded("image", "pixel_values", data, (time, height, width))

    def gridded(
        self, modality: Modality, pixels: str, data: Mapping[str, TensorData], grid: tuple[int, int, int]
    ) -> ProcessedItem:
        """Of patches in a grid."""
        time, height, width = grid
        if min(grid) < 1 or height % self.merge_size or width % self.merge_size:
            raise ValueError(f"{height} x {width} patches are no grid of {self.merge_size} x {self.merge_size}")
        numbers = _CHANNELS * self.temporal_patch_size * self.patch_size**2
        tensors.taken(data, pixels, (time * height * width, numbers))
        rows = time * height * width // self.merge_size**2
        return ProcessedItem(modality=modality, data=dict(data), num_embeds=rows, layout=grid)

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """``min_pixels`` and ``max_pixels``, or a ``size`` with the same as ``shortest_edge`` and ``longest_edge``: up to the
        checkpoint's own ``max_pixels``.
        """
        arguments.check_names(kwargs, ("min_pixels", "max_pixels", "size"))
        size = arguments.size(kwargs, {_SHORTEST: self.max_pixels, _LONGEST: self.max_pixels}) or {}
        least = arguments.whole_number(kwargs, "min_pixels", most=self.max_pixels) or size.get(_SHORTEST)
        most = arguments.whole_number(kwargs, "max_pixels", most=self.max_pixels) or size.get(_LONGEST, self.max_pixels)
        if most < self.factor**2:
            raise ValueError(f"max_pixels is {most}; an image has at least {self.factor**2}")
        if least is not None and least > most:
            raise ValueError(f"min_pixels is {least}; max_pixels is {most}")
        return {"size": {_SHORTEST: min(self.min_pixels, most) if least is None else least, _LONGEST: most}}


class QwenVL(ImageFamily):
    """One image token for each row."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._grids = image_grids(checkpoint)
        super().__init__(checkpoint, checkpoint.token("image_token", "<|image_pad|>"), self._grids)

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """Image tokens, each of them a row."""
        return [Replacement([self.token_id] * item.num_embeds) for item in items]

    def max_tokens(self, modality: Modality) -> int:
        """Of the largest image."""
        del modality
        return self._grids.max_rows


def image_grids(checkpoint: Checkpoint) -> Grids:
    """Of the image processor's configuration, with the defaults of its class. Raises ConfigError."""
    settings, tower = checkpoint.image_processor, checkpoint.sub_config("vision_config")
    size = settings.get("size")
    sizes = size if isinstance(size, dict) else {}
    bounds = {
        "min_pixels": settings.get("min_pixels", sizes.get(_SHORTEST, sizes.get("min_pixels"))),
        "max_pixels": settings.get("max_pixels", sizes.get(_LONGEST, sizes.get("max_pixels"))),
    }
    grids = Grids(
        patch_size=checkpoint.number("patch_size", settings, tower, default=14),
        merge_size=checkpoint.number(
            "merge_size", settings, {"merge_size": tower.get("spatial_merge_size")}, default=2
        ),
        temporal_patch_size=checkpoint.number("temporal_patch_size", settings, tower, default=2),
        min_pixels=checkpoint.number("min_pixels", bounds, default=56 * 56),
        max_pixels=checkpoint.number("max_pixels", bounds, default=28 * 28 * 1280),
    )
    if grids.max_rows < 1:
        raise ConfigError(
            f"{checkpoint.folder}: max_pixels is {grids.max_pixels}, less than a row of the tower stands for"
        )
    return grids

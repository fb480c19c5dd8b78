"""Images of the Qwen-VL families keep their shape within a number of pixels."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock_common.errors import ConfigError
from penstock_common.types.media import Modality, TensorData
from penstock_frontend.processing.media.families import arguments, tensors
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.item import ProcessedItem

_CHANNELS = 3
SHORTEST, LONGEST = "shortest_edge", "longest_edge"
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
        size = arguments.size(kwargs, {SHORTEST: self.max_pixels, LONGEST: self.max_pixels}) or {}
        least = arguments.whole_number(kwargs, "min_pixels", most=self.max_pixels) or size.get(SHORTEST)
        most = arguments.whole_number(kwargs, "max_pixels", most=self.max_pixels) or size.get(LONGEST, self.max_pixels)
        if most < self.factor**2:
            raise ValueError(f"max_pixels is {most}; an image has at least {self.factor**2}")
        if least is not None and least > most:
            raise ValueError(f"min_pixels is {least}; max_pixels is {most}")
        return {"size": {SHORTEST: min(self.min_pixels, most) if least is None else least, LONGEST: most}}


def image_grids(
    checkpoint: Checkpoint, settings: Mapping[str, Any], default_pixels: tuple[int, int] = (56 * 56, 28 * 28 * 1280)
) -> Grids:
    """Of a processor's configuration, with the defaults of its class: ``default_pixels`` at least and at most. Raises
    ConfigError.
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
            f"{checkpoint.folder}: max_pixels is {grids.max_pixels}, less than a row of the tower stands for"
        )
    return grids

"""Images as the tiles of a canvas and a thumbnail (InternVL, Aya Vision): what the image processor of GOT-OCR2 makes of them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock_common.types.media import TensorData
from penstock_frontend.processing.media.families import arguments, tensors
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.llava import image_size
from penstock_frontend.processing.media.item import ProcessedItem


class Canvas(NamedTuple):
    """``tile``: height and width of a tile in pixels, which is ``rows_of_tile`` rows; tiles of a canvas are from ``min_tiles`` to
    ``max_tiles``.
    """

    tile: tuple[int, int]
    rows_of_tile: int
    min_tiles: int
    max_tiles: int
    names: tuple[str, ...] = ("pixel_values", "num_patches")

    @property
    def max_pictures(self) -> int:
        """Tiles, and the thumbnail beside several."""
        return self.max_tiles + 1 if self.max_tiles > 1 else 1

    @property
    def max_rows(self) -> int:
        """Of an image with most tiles."""
        return self.max_pictures * self.rows_of_tile

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Of ``pixel_values`` ``[tiles, 3, height, width]``; ``num_patches`` is not the model's. ``layout``: how many tiles."""
        pixels = tensors.taken(data, "pixel_values", (None, 3, *self.tile))
        count = pixels.shape[0]
        if "num_patches" in data and tensors.numbers(data, "num_patches", (1,)) != [count]:
            raise ValueError(f"num_patches is not {count}, the tiles of pixel_values")
        if count < 1:
            raise ValueError("pixel_values has no tiles")
        return ProcessedItem(
            modality="image", data={"pixel_values": pixels}, num_embeds=count * self.rows_of_tile, layout=(count,)
        )

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """``crop_to_patches``, ``min_patches`` and ``max_patches``, the latter two up to the checkpoint's own most."""
        arguments.check_names(kwargs, ("crop_to_patches", "min_patches", "max_patches"))
        crops = arguments.flag(kwargs, "crop_to_patches")
        most = arguments.whole_number(kwargs, "max_patches", most=self.max_tiles) or self.max_tiles
        least = arguments.whole_number(kwargs, "min_patches", most=most) or min(self.min_tiles, most)
        return {"crop_to_patches": True if crops is None else crops, "min_patches": least, "max_patches": most}


def canvas(checkpoint: Checkpoint, rows_of_tile: int) -> Canvas:
    """Of the image processor's configuration, with the defaults of its class. Raises ConfigError."""
    settings = checkpoint.image_processor
    return Canvas(
        image_size(checkpoint),
        rows_of_tile,
        checkpoint.number("min_patches", settings, default=1),
        checkpoint.number("max_patches", settings, default=12),
    )

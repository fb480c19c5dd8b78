"""Idefics3 and SmolVLM: tiles of an image, each behind the name of its place, then the image whole.

https://huggingface.co/docs/transformers/model_doc/idefics3
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock_common.types.media import Modality, TensorData
from penstock_frontend.processing.media.families import base as arguments
from penstock_frontend.processing.media.families import tensors
from penstock_frontend.processing.media.families.base import ProcessedItem, Replacement
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.single_images import ImageFamily, grown

_FAKE, _WHOLE = "<fake_token_around_image>", "<global-img>"
_LARGEST = 4096
"""Pixels of the longest edge, whatever is asked for."""


class Tiles(NamedTuple):
    """``tile``: pixels of the side of a tile, which is ``rows_of_tile`` rows; ``longest_edge``: of an image, in pixels;
    ``splits``: whether large images are split unless a request says something else.
    """

    tile: int
    rows_of_tile: int
    longest_edge: int
    splits: bool
    names: tuple[str, ...] = ("pixel_values", "pixel_attention_mask", "rows", "cols")

    @property
    def max_side(self) -> int:
        """Tiles along the longest edge."""
        return -(-min(self.longest_edge, _LARGEST) // self.tile)

    @property
    def max_rows(self) -> int:
        """Of a square, in tiles and whole."""
        return (self.max_side**2 + 1) * self.rows_of_tile

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Of ``pixel_values`` ``[1, tiles, 3, height, width]``, its mask, and ``rows`` and ``cols`` ``[1, 1]``, which say how the
        tiles lie; 0 for an image that is one tile. ``layout``: both.
        """
        (rows,), (columns,) = (tensors.numbers(data, name, (1, 1)) for name in ("rows", "cols"))
        if (rows == 0) != (columns == 0) or min(rows, columns) < 0:
            raise ValueError(f"rows and cols are {rows} and {columns}; they are a grid, or both 0")
        count = rows * columns + 1
        tensors.taken(data, "pixel_values", (1, count, 3, self.tile, self.tile))
        if "pixel_attention_mask" in data:
            tensors.taken(data, "pixel_attention_mask", (1, count, self.tile, self.tile))
        kept = {name: tensor for name, tensor in data.items() if name not in ("rows", "cols")}
        return ProcessedItem(modality="image", data=kept, num_embeds=count * self.rows_of_tile, layout=(rows, columns))

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """``do_image_splitting``, and ``size`` with a ``longest_edge`` up to the checkpoint's own."""
        arguments.check_names(kwargs, ("do_image_splitting", "size"))
        size = arguments.size(kwargs, {"longest_edge": self.longest_edge}) or {"longest_edge": self.longest_edge}
        splits = arguments.flag(kwargs, "do_image_splitting")
        return {
            "size": size,
            "do_image_splitting": self.splits if splits is None else splits,
            "return_row_col_info": True,
        }


class Idefics3(ImageFamily):
    """A line for each row of tiles, and one for the whole image."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        settings, tower = checkpoint.image_processor, checkpoint.sub_config("vision_config")
        self._token = checkpoint.token("image_token", "<image>")
        self._fake = checkpoint.token("fake_image_token", _FAKE)
        self._whole = checkpoint.token("global_image_token", _WHOLE)
        edge, tile = settings.get("size") or {}, settings.get("max_image_size") or {}
        self._tiles = Tiles(
            tile=checkpoint.number("longest_edge", tile, default=364),
            rows_of_tile=checkpoint.number("image_seq_len", checkpoint.processor, default=_rows(checkpoint, tower)),
            longest_edge=checkpoint.number("longest_edge", edge, default=4 * 364),
            splits=bool(settings.get("do_image_splitting", True)),
        )
        super().__init__(checkpoint, self._token, self._tiles, media_tokens=(self._fake,))
        self._encode = checkpoint.encode
        self._laid_out = functools.lru_cache(maxsize=256)(self._lay_out)

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """By their tiles."""
        return [self._laid_out(*item.layout) for item in items]

    def _lay_out(self, rows: int, columns: int) -> Replacement:
        lines = "".join(
            "".join(f"{self._fake}<row_{row}_col_{column}>{self._token}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        apart = "\n" if lines else ""
        text = f"{lines}{apart}{self._fake}{self._whole}{self._token}{self._fake}"
        return grown(self._encode(text), self.token_id, self._tiles.rows_of_tile)

    def max_tokens(self, modality: Modality) -> int:
        """Of a square."""
        del modality
        side = self._tiles.max_side
        largest = self._laid_out(side, side)
        last = largest.embed_runs[-1]
        return last.start + last.count - largest.embed_runs[0].start


def _rows(checkpoint: Checkpoint, tower: Mapping[str, Any]) -> int:
    """Rows of a tile, as the model makes them of its patches."""
    side = checkpoint.number("image_size", tower, default=364) // checkpoint.number("patch_size", tower, default=14)
    return side**2 // checkpoint.number("scale_factor", checkpoint.config, default=2) ** 2

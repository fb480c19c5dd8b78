"""Families whose image tiles have one size and a fixed number of embeddings: Gemma 3, InternVL, Aya Vision, Idefics 3,
SmolVLM.

https://huggingface.co/docs/transformers/model_doc/gemma3, .../internvl, .../aya_vision, .../idefics3
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock_common.errors import ConfigError
from penstock_common.types.media import EmbedRun, Modality, TensorData
from penstock_frontend.processing.media.families import base as arguments
from penstock_frontend.processing.media.families import tensors
from penstock_frontend.processing.media.families.base import ProcessedItem, Replacement
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.frames import frame_videos
from penstock_frontend.processing.media.families.llava import Square, image_size
from penstock_frontend.processing.media.families.single_images import ImageFamily, grown

_APART = "\n\n"


class Gemma3(ImageFamily):
    """Family of Gemma 3, whose images have a begin token, image tokens, and an end token. Crops of images (pan and
    scan) are not supported.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        if checkpoint.image_processor.get("do_pan_and_scan"):
            raise ConfigError(f"{checkpoint.folder}: do_pan_and_scan of Gemma 3's image processor is not supported")
        begin, token, end = (
            checkpoint.token(name, default)
            for name, default in (
                ("boi_token", "<start_of_image>"),
                ("image_token", "<image_soft_token>"),
                ("eoi_token", "<end_of_image>"),
            )
        )
        self._rows = checkpoint.number(
            "image_seq_length",
            checkpoint.processor,
            {"image_seq_length": checkpoint.config.get("mm_tokens_per_image")},
            default=256,
        )
        images = Square(image_size(checkpoint), self._rows, names=("pixel_values", "num_crops"))
        super().__init__(checkpoint, begin, images, media_tokens=(token, end), least_embeds=self._rows)
        self._around = [self.token_id, *[checkpoint.token_id(token)] * self._rows, checkpoint.token_id(end)]

    def replacement(self, item: ProcessedItem) -> Replacement:
        """Return the replacement of an image, which is the same for all images."""
        return Replacement(self._around, (EmbedRun(1, item.num_embeds),), before=_APART, after=_APART)


# In InternVL and Aya Vision, the model gets an image as the tiles of a canvas, and as a thumbnail. The image processor
# of GOT-OCR2 makes these pictures.


class Canvas(NamedTuple):
    """Format of images that are divided into tiles, for InternVL and Aya Vision.

    Attributes:
        tile: Height and width of a tile in pixels.
        rows_of_tile: Number of embeddings per tile.
        min_tiles: Minimum number of tiles of a canvas.
        max_tiles: Maximum number of tiles of a canvas.
        names: Names of the input tensors.
    """

    tile: tuple[int, int]
    rows_of_tile: int
    min_tiles: int
    max_tiles: int
    names: tuple[str, ...] = ("pixel_values", "num_patches")

    @property
    def max_pictures(self) -> int:
        """Maximum number of pictures of an image. The pictures are the tiles, and a thumbnail if there are several
        tiles.
        """
        return self.max_tiles + 1 if self.max_tiles > 1 else 1

    @property
    def max_rows(self) -> int:
        """Maximum number of embeddings of an image."""
        return self.max_pictures * self.rows_of_tile

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for the tensor ``pixel_values`` ``[tiles, 3, height, width]``.

        ``layout`` of the item is the number of tiles.

        The model does not use the tensor ``num_patches``.
        """
        pixels = tensors.taken(data, "pixel_values", (None, 3, *self.tile))
        count = pixels.shape[0]
        if "num_patches" in data and tensors.numbers(data, "num_patches", (1,)) != [count]:
            raise ValueError(f"num_patches must be {count}, which is the number of tiles in pixel_values")
        if count < 1:
            raise ValueError("pixel_values has no tiles")
        return ProcessedItem(
            modality="image", data={"pixel_values": pixels}, num_embeds=count * self.rows_of_tile, layout=(count,)
        )

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the processor arguments ``crop_to_patches``, ``min_patches`` and ``max_patches``.

        Neither ``min_patches`` nor ``max_patches`` may be larger than ``max_patches`` of the checkpoint.
        """
        arguments.check_names(kwargs, ("crop_to_patches", "min_patches", "max_patches"))
        crops = arguments.flag(kwargs, "crop_to_patches")
        most = arguments.whole_number(kwargs, "max_patches", most=self.max_tiles) or self.max_tiles
        least = arguments.whole_number(kwargs, "min_patches", most=most) or min(self.min_tiles, most)
        return {"crop_to_patches": True if crops is None else crops, "min_patches": least, "max_patches": most}


def canvas(checkpoint: Checkpoint, rows_of_tile: int) -> Canvas:
    """Return the image format from the configuration of the image processor. The defaults are those of its class.
    Raises ConfigError if a value in the configuration is not valid.
    """
    settings = checkpoint.image_processor
    return Canvas(
        image_size(checkpoint),
        rows_of_tile,
        checkpoint.number("min_patches", settings, default=1),
        checkpoint.number("max_patches", settings, default=12),
    )


class InternVL(ImageFamily):
    """Family of InternVL, whose images have a begin token, one token for each embedding, and an end token.

    Each frame of a video is a line of text with such tokens.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        rows = checkpoint.number("image_seq_length", checkpoint.processor, checkpoint.config, default=256)
        images = canvas(checkpoint, rows)
        self._frames = frame_videos(checkpoint, images.tile, rows)
        self._begin = checkpoint.token("start_image_token", "<img>")
        self._end = checkpoint.token("end_image_token", "</img>")
        self._token = checkpoint.token("context_image_token", "<IMG_CONTEXT>")
        super().__init__(
            checkpoint,
            self._token,
            images,
            media_tokens=(self._begin, self._end),
            least_embeds=1,
            videos=self._frames,
            video_token=checkpoint.token("video_token", "<video>"),
        )
        self._begin_id, self._end_id = checkpoint.token_id(self._begin), checkpoint.token_id(self._end)

    def replacement(self, item: ProcessedItem) -> Replacement:
        """Return the replacement of a media item, with one image token for each embedding."""
        if item.modality == "video":
            return self._of_frames(*item.layout)
        token_ids = [self._begin_id, *[self.token_id] * item.num_embeds, self._end_id]
        return Replacement(token_ids, (EmbedRun(1, item.num_embeds),))

    def _of_frames(self, count: int) -> Replacement:
        frame = f"{self._begin}{self._token}{self._end}"
        text = f"{frame}" + "".join(f"\nFrame{index}: {frame}" for index in range(2, count + 1))
        return grown(self.encode(text), self.token_id, self._frames.rows_of_frame, before="Frame1: ")

    def max_tokens(self, modality: Modality) -> int:
        """Return the number of tokens that the largest image or video has."""
        return super().max_tokens(modality) if modality == "image" else self._of_frames(self._frames.max_frames).span


class AyaVision(ImageFamily):
    """Family of Aya Vision, whose images have a begin token, tiles with names, and an end token.

    The placeholder is another token than the token that stands for an embedding.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        processor = checkpoint.processor
        patch = checkpoint.number("patch_size", processor, default=28) * checkpoint.number(
            "downsample_factor", processor, default=1
        )
        rows = (checkpoint.number("img_size", processor, default=364) // patch) ** 2
        self._canvas = canvas(checkpoint, rows)
        self._patch = checkpoint.token("img_patch_token", "<|IMG_PATCH|>")
        self._begin = checkpoint.token("start_of_img_token", "<|START_OF_IMG|>")
        self._end = checkpoint.token("end_of_img_token", "<|END_OF_IMG|>")
        self._tile = checkpoint.token("tile_token", "TILE")
        self._whole = checkpoint.token("tile_global_token", "TILE_GLOBAL")
        super().__init__(
            checkpoint,
            checkpoint.token("image_token", "<image>"),
            self._canvas,
            media_tokens=(self._patch, self._begin, self._end),
        )
        self._patch_id = checkpoint.token_id(self._patch)
        self._laid_out = functools.lru_cache(maxsize=64)(self._lay_out)

    def replacement(self, item: ProcessedItem) -> Replacement:
        """Return the replacement of an image, with tokens for each of its tiles."""
        return self._laid_out(*item.layout)

    def _lay_out(self, count: int) -> Replacement:
        tiles = "".join(f"{self._tile}_{index}{self._patch}" for index in range(1, count))
        text = f"{self._begin}{tiles}{self._whole}{self._patch}{self._end}"
        return grown(self.encode(text), self._patch_id, self._canvas.rows_of_tile)

    def max_tokens(self, modality: Modality) -> int:
        """Return the number of tokens of an image with the maximum number of tiles."""
        del modality
        return self._laid_out(self._canvas.max_pictures).span


_FAKE, _WHOLE = "<fake_token_around_image>", "<global-img>"
_LARGEST = 4096
"""Maximum length of an image's longer edge in pixels, even if the processor arguments allow a longer edge."""


class GridTiles(NamedTuple):
    """Format of images that are split into a grid of tiles, for Idefics 3 and SmolVLM.

    Attributes:
        tile: Side length of a tile in pixels.
        rows_of_tile: Number of embeddings per tile.
        longest_edge: Maximum length of an image's longer edge in pixels.
        splits: Whether large images are split into tiles by default.
        names: Names of the input tensors.
    """

    tile: int
    rows_of_tile: int
    longest_edge: int
    splits: bool
    names: tuple[str, ...] = ("pixel_values", "pixel_attention_mask", "rows", "cols")

    @property
    def max_side(self) -> int:
        """Number of tiles along the longest possible edge of an image."""
        return -(-min(self.longest_edge, _LARGEST) // self.tile)

    @property
    def max_rows(self) -> int:
        """Maximum number of embeddings of an image. A square image that is split into tiles has this many embeddings."""
        return (self.max_side**2 + 1) * self.rows_of_tile

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for the tensors ``pixel_values`` ``[1, tiles, 3, height, width]``, the pixel mask,
        ``rows`` and ``cols`` ``[1, 1]``.

        ``rows`` and ``cols`` are 0 for an image with a single tile. ``layout`` of the item is the number of rows and
        the number of columns.
        """
        (rows,), (columns,) = (tensors.numbers(data, name, (1, 1)) for name in ("rows", "cols"))
        if (rows == 0) != (columns == 0) or min(rows, columns) < 0:
            raise ValueError(f"rows and cols are {rows} and {columns}; both must be at least 1, or both must be 0")
        count = rows * columns + 1
        tensors.taken(data, "pixel_values", (1, count, 3, self.tile, self.tile))
        if "pixel_attention_mask" in data:
            tensors.taken(data, "pixel_attention_mask", (1, count, self.tile, self.tile))
        kept = {name: tensor for name, tensor in data.items() if name not in ("rows", "cols")}
        return ProcessedItem(modality="image", data=kept, num_embeds=count * self.rows_of_tile, layout=(rows, columns))

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the processor arguments ``do_image_splitting`` and ``size``. ``longest_edge`` of ``size`` is at most
        the value in the checkpoint.
        """
        arguments.check_names(kwargs, ("do_image_splitting", "size"))
        size = arguments.size(kwargs, {"longest_edge": self.longest_edge}) or {"longest_edge": self.longest_edge}
        splits = arguments.flag(kwargs, "do_image_splitting")
        return {
            "size": size,
            "do_image_splitting": self.splits if splits is None else splits,
            "return_row_col_info": True,
        }


class Idefics3(ImageFamily):
    """Family of Idefics 3, whose prompts have one line of text for each row of tiles, and one line for the complete
    image.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        settings, tower = checkpoint.image_processor, checkpoint.sub_config("vision_config")
        self._token = checkpoint.token("image_token", "<image>")
        self._fake = checkpoint.token("fake_image_token", _FAKE)
        self._whole = checkpoint.token("global_image_token", _WHOLE)
        edge, tile = settings.get("size") or {}, settings.get("max_image_size") or {}
        self._tiles = GridTiles(
            tile=checkpoint.number("longest_edge", tile, default=364),
            rows_of_tile=checkpoint.number(
                "image_seq_len", checkpoint.processor, default=_rows_of_tile(checkpoint, tower)
            ),
            longest_edge=checkpoint.number("longest_edge", edge, default=4 * 364),
            splits=bool(settings.get("do_image_splitting", True)),
        )
        super().__init__(checkpoint, self._token, self._tiles, media_tokens=(self._fake,))
        self._laid_out = functools.lru_cache(maxsize=256)(self._lay_out)

    def replacement(self, item: ProcessedItem) -> Replacement:
        """Return the replacement of an image, with tokens for each of its tiles."""
        return self._laid_out(*item.layout)

    def _lay_out(self, rows: int, columns: int) -> Replacement:
        lines = "".join(
            "".join(f"{self._fake}<row_{row}_col_{column}>{self._token}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        apart = "\n" if lines else ""
        text = f"{lines}{apart}{self._fake}{self._whole}{self._token}{self._fake}"
        return grown(self.encode(text), self.token_id, self._tiles.rows_of_tile)

    def max_tokens(self, modality: Modality) -> int:
        """Return the number of tokens that the largest square image has."""
        del modality
        return self._laid_out(self._tiles.max_side, self._tiles.max_side).span


def _rows_of_tile(checkpoint: Checkpoint, tower: Mapping[str, Any]) -> int:
    """Return the number of embeddings of a tile, computed from the number of patches of a tile."""
    side = checkpoint.number("image_size", tower, default=364) // checkpoint.number("patch_size", tower, default=14)
    return side**2 // checkpoint.number("scale_factor", checkpoint.config, default=2) ** 2

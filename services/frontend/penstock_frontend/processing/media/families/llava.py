"""LLaVA with a CLIP or SigLIP tower: an image of one size is a fixed number of rows.

https://huggingface.co/docs/transformers/model_doc/llava
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from PIL.Image import Image

from penstock_common.errors import ConfigError
from penstock_common.types.media import Modality, TensorData
from penstock_frontend.processing.media.families import arguments, tensors
from penstock_frontend.processing.media.families.base import FamilyProcessor
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.processors import MediaProcessor, PilImages
from penstock_frontend.processing.media.item import ProcessedItem, Replacement


class Grid(NamedTuple):
    """How many rows the tower makes of pixels. ``extra``: of them that are no patches."""

    patch_size: int
    extra: int

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Of ``pixel_values`` ``[1, 3, height, width]``."""
        height, width = tensors.taken(data, "pixel_values", (1, 3, None, None)).shape[2:]
        return ProcessedItem(modality="image", data=dict(data), num_embeds=self.rows(height, width))

    def rows(self, height: int, width: int) -> int:
        """Of an image of so many pixels."""
        return (height // self.patch_size) * (width // self.patch_size) + self.extra


class Llava:
    """One image token for each row."""

    modalities: frozenset[Modality] = frozenset({"image"})
    sampling_rate = 0

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.identity = checkpoint.identity
        self._folder = checkpoint.folder
        self._token = checkpoint.token("image_token", "<image>")
        self._token_id = checkpoint.token_id(self._token)
        self.media_tokens = (self._token,)
        self._grid = Grid(
            checkpoint.number("patch_size", checkpoint.processor, checkpoint.sub_config("vision_config")),
            extra_rows(checkpoint),
        )
        self._size = image_size(checkpoint)

    def placeholder(self, modality: Modality) -> str:
        """The image token."""
        del modality
        return self._token

    def replacements(self, items: Sequence[ProcessedItem]) -> list[Replacement]:
        """Image tokens, each of them a row."""
        return [Replacement([self._token_id] * item.num_embeds) for item in items]

    def described(self, modality: Modality, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Of ``pixel_values``."""
        del modality
        tensors.check_names(data, ("pixel_values",))
        tensors.taken(data, "pixel_values", (1, 3, *self._size))
        return self._grid.item(data)

    def max_tokens(self, modality: Modality) -> int:
        """Of every image: they have one size."""
        del modality
        return self._grid.rows(*self._size)

    def make_processor(self) -> Callable[[], FamilyProcessor]:
        """A ``LlavaProcessor``."""
        return partial(LlavaProcessor, self._folder, self._grid)


class LlavaProcessor(MediaProcessor):
    """Resizes, and crops to what the tower sees."""

    def __init__(self, folder: Path, grid: Grid) -> None:
        self._images = PilImages(folder)
        self._grid = grid

    def image(self, image: Image, kwargs: Mapping[str, Any]) -> ProcessedItem:
        """One picture. Takes no arguments: the tower has one size."""
        arguments.check_names(kwargs, ())
        return self._grid.item(self._images([image]))


def extra_rows(checkpoint: Checkpoint) -> int:
    """Rows that are no patches: a class token that the tower has and the model does not leave out, as the processor says it."""
    processor, config = checkpoint.processor, checkpoint.config
    strategy = processor.get("vision_feature_select_strategy") or config.get(
        "vision_feature_select_strategy", "default"
    )
    has_class_token = (
        checkpoint.sub_config("vision_config").get("model_type", "clip_vision_model") == "clip_vision_model"
    )
    more = checkpoint.number("num_additional_image_tokens", processor, default=int(has_class_token))
    return more - int(strategy == "default")


def image_size(checkpoint: Checkpoint) -> tuple[int, int]:
    """Height and width of what the image processor gives. Raises ConfigError where they depend on the image."""
    settings = checkpoint.image_processor
    crops = settings.get("do_center_crop", bool(settings.get("crop_size")))
    for size in (settings.get("crop_size") if crops else None, settings.get("size")):
        if isinstance(size, int):
            return size, size
        if isinstance(size, dict) and "height" in size and "width" in size:
            return int(size["height"]), int(size["width"])
    raise ConfigError(f"{checkpoint.folder}: preprocessor_config.json names no size that all images get")

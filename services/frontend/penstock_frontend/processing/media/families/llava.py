"""LLaVA with a CLIP or SigLIP tower: every image is as many rows.

https://huggingface.co/docs/transformers/model_doc/llava
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock_common.errors import ConfigError
from penstock_common.types.media import TensorData
from penstock_frontend.processing.media.families import base as arguments
from penstock_frontend.processing.media.families import tensors
from penstock_frontend.processing.media.families.base import ProcessedItem
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.single_images import ImageFamily


class Square(NamedTuple):
    """Images of one ``size`` (height, width), each of ``max_rows``."""

    size: tuple[int, int]
    max_rows: int
    names: tuple[str, ...] = ("pixel_values",)

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Of ``pixel_values`` ``[1, 3, height, width]``. Others of ``names`` are not the model's."""
        pixels = tensors.taken(data, "pixel_values", (1, 3, *self.size))
        return ProcessedItem(modality="image", data={"pixel_values": pixels}, num_embeds=self.max_rows)

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """None: the tower has one size."""
        arguments.check_names(kwargs, ())
        return {}


class Llava(ImageFamily):
    """One image token for each row."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        size, patch = image_size(checkpoint), patch_size(checkpoint)
        rows = (size[0] // patch) * (size[1] // patch) + extra_rows(checkpoint)
        token = checkpoint.token("image_token", "<image>")
        super().__init__(checkpoint, token, Square(size, rows), least_embeds=rows)


def patch_size(checkpoint: Checkpoint) -> int:
    """Pixels of the side of a patch, as the processor says it, else the tower."""
    return checkpoint.number("patch_size", checkpoint.processor, checkpoint.sub_config("vision_config"))


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

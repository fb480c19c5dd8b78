"""Families of models with Pixtral as the vision encoder: some LLaVA models, and Mistral 3.

Images keep their aspect ratio. In the prompt, a special token ends each row of patches.

https://huggingface.co/docs/transformers/model_doc/pixtral
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock_common.errors import ConfigError
from penstock_common.types.media import EmbedRun, Modality, TensorData
from penstock_frontend.processing.media.families import base as arguments
from penstock_frontend.processing.media.families import tensors
from penstock_frontend.processing.media.families.base import ProcessedItem, Replacement
from penstock_frontend.processing.media.families.checkpoint import Checkpoint
from penstock_frontend.processing.media.families.single_images import ImageFamily


class Patches(NamedTuple):
    """Format of images that are divided into patches.

    Attributes:
        patch_size: Side length of the square that one embedding covers, in pixels.
        longest_edge: Maximum length of an image's longer edge in pixels.
        names: Names of the input tensors.
    """

    patch_size: int
    longest_edge: int
    names: tuple[str, ...] = ("pixel_values", "image_sizes")

    @property
    def max_side(self) -> int:
        """Number of embeddings along the longest possible edge of an image."""
        return (self.longest_edge - 1) // self.patch_size + 1

    @property
    def max_rows(self) -> int:
        """Maximum number of embeddings of an image. A square image has this many embeddings."""
        return self.max_side**2

    def item(self, data: Mapping[str, TensorData]) -> ProcessedItem:
        """Return the media item for the tensors ``pixel_values`` ``[1, 3, height, width]`` and ``image_sizes`` ``[1,
        2]``.

        ``layout`` of the item is the number of rows and the number of columns of patches.
        """
        height, width = tensors.numbers(data, "image_sizes", (1, 2))
        tensors.taken(data, "pixel_values", (1, 3, height, width))
        rows, columns = height // self.patch_size, width // self.patch_size
        if rows * self.patch_size != height or columns * self.patch_size != width or not rows * columns:
            raise ValueError(f"image_sizes is {height}, {width}; both must be multiples of {self.patch_size}")
        return ProcessedItem(modality="image", data=dict(data), num_embeds=rows * columns, layout=(rows, columns))

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the processor argument ``size``, whose ``longest_edge`` is at most the value in the checkpoint."""
        arguments.check_names(kwargs, ("size",))
        size = arguments.size(kwargs, {"longest_edge": self.longest_edge}) or {"longest_edge": self.longest_edge}
        return {"size": size, "patch_size": self.patch_size}


class Pixtral(ImageFamily):
    """Family whose prompts have one row of image tokens for each row of patches of an image.

    A break token follows each row except the last row. An end token follows the last row.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        tokens = [
            checkpoint.token(name, default)
            for name, default in (
                ("image_token", "[IMG]"),
                ("image_break_token", "[IMG_BREAK]"),
                ("image_end_token", "[IMG_END]"),
            )
        ]
        patch = checkpoint.number("patch_size", checkpoint.processor, checkpoint.sub_config("vision_config"))
        merge = checkpoint.number("spatial_merge_size", checkpoint.processor, checkpoint.config, default=1)
        self._patches = Patches(patch * merge, longest_edge(checkpoint))
        super().__init__(checkpoint, tokens[0], self._patches, media_tokens=tuple(tokens[1:]))
        self._break, self._end = (checkpoint.token_id(token) for token in tokens[1:])

    def replacement(self, item: ProcessedItem) -> Replacement:
        """Return the replacement of an image, which has a row of tokens for each row of patches."""
        rows, columns = item.layout
        token_ids = ([self.token_id] * columns + [self._break]) * rows
        token_ids[-1] = self._end
        return Replacement(token_ids, tuple(EmbedRun(row * (columns + 1), columns) for row in range(rows)))

    def max_tokens(self, modality: Modality) -> int:
        """Return the number of tokens that the largest square image has."""
        del modality
        return (self._patches.max_side + 1) * self._patches.max_side


def longest_edge(checkpoint: Checkpoint) -> int:
    """Return the maximum length of an image's longer edge in pixels. Raises ConfigError if the configuration's size is
    not valid.
    """
    size = checkpoint.image_processor.get("size", {"longest_edge": 1024})
    edges = [size] if isinstance(size, int) else list(size.values()) if isinstance(size, dict) else []
    if not edges or not all(isinstance(edge, int) for edge in edges):
        raise ConfigError(f"{checkpoint.folder}: the image processor's size is {size!r}; it must have a longest edge")
    return max(edges)

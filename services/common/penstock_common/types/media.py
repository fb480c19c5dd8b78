"""Images, audio and video of a prompt in the form that engines receive: preprocessed, and identified by content."""

from typing import Literal

import msgspec

from penstock_common.types.octets import Octets

Modality = Literal["image", "audio", "video"]
MODALITIES: tuple[Modality, ...] = ("image", "audio", "video")

TensorDtype = Literal["float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64", "bool"]
LARGEST_NUMBER = 65504
"""Maximum absolute value of a number in media tensors: the maximum of float16.

Numbers in preprocessed media have absolute values around 1. Far larger numbers would make a model's logits infinite.
"""
DTYPE_BYTES: dict[TensorDtype, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}

EMBEDS = "embeds"
"""Name of the tensor that contains embeddings instead of inputs of the encoder."""


class TensorData(msgspec.Struct, frozen=True, weakref=True):
    """Dense row-major tensor. ``data`` contains its elements in little-endian order."""

    dtype: TensorDtype
    shape: tuple[int, ...]
    data: Octets


class EmbedRun(msgspec.Struct, frozen=True):
    """Run of ``count`` positions with embeddings, beginning at ``start``."""

    start: int
    count: int


class MultiModalFeature(msgspec.Struct, frozen=True, kw_only=True):
    """Media item of a prompt.

    Attributes:
        identifier: Hash of the cache salt and of all values that change the embeddings, as 64 hexadecimal digits.
        offset: First position of the item in the prompt.
        length: Number of positions.
        embed_runs: Positions with embeddings, relative to ``offset``. The other positions are tokens. Empty if
            all positions have embeddings.
        data: Inputs of the model, under the names of its processor in transformers. Frontends may send an empty
            ``data`` if the engine has the item cached. Within an engine's core, ``data`` is complete.
    """

    modality: Modality
    identifier: str
    offset: int
    length: int
    embed_runs: tuple[EmbedRun, ...] = ()
    data: dict[str, TensorData] = {}

    @property
    def end(self) -> int:
        """Position after the last position of the item."""
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        """Number of embeddings that the item has in the prompt."""
        return sum(run.count for run in self.embed_runs) if self.embed_runs else self.length

    @property
    def num_bytes(self) -> int:
        """Size of the item's data in bytes."""
        return sum(len(tensor.data) for tensor in self.data.values())


class MediaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for one modality: maximum number of items per request, and of prompt positions per item."""

    modality: Modality
    max_items: int
    max_tokens: int

"""Images, sound and video of a prompt, as engines get them: processed, and named by their content."""

from typing import Literal

import msgspec

from penstock_common.types.octets import Octets

Modality = Literal["image", "audio", "video"]
MODALITIES: tuple[Modality, ...] = ("image", "audio", "video")

TensorDtype = Literal["float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64", "bool"]
LARGEST_NUMBER = 65504
"""Greatest magnitude of a number in the tensors of media, float16's. Processed media are around 1; far larger numbers make a
model's logits infinite.
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
"""What a tensor is called that holds what the model's tower would give."""


class TensorData(msgspec.Struct, frozen=True, weakref=True):
    """A dense row-major tensor; ``data``: its elements, little-endian."""

    dtype: TensorDtype
    shape: tuple[int, ...]
    data: Octets


class EmbedRun(msgspec.Struct, frozen=True):
    """``count`` positions that have embeddings, from ``start`` on."""

    start: int
    count: int


class MultiModalFeature(msgspec.Struct, frozen=True, kw_only=True):
    """An item of a prompt: ``length`` positions from ``offset`` on, of which those of ``embed_runs`` (relative to ``offset``;
    empty: all) have embeddings and the others are tokens.

    ``identifier``: 64 hexadecimal digits that stand for all that the embeddings depend on, and for the cache salt. ``data``: the
    model's own inputs under the names of its processor in transformers. Between a frontend and an engine it may be empty where
    the engine keeps the item; within an engine's core it is whole.
    """

    modality: Modality
    identifier: str
    offset: int
    length: int
    embed_runs: tuple[EmbedRun, ...] = ()
    data: dict[str, TensorData] = {}

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        """Embeddings that stand in the prompt for it."""
        return sum(run.count for run in self.embed_runs) if self.embed_runs else self.length

    @property
    def num_bytes(self) -> int:
        """Of its data."""
        return sum(len(tensor.data) for tensor in self.data.values())


class MediaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine or a frontend takes of one modality: items in a request, and prompt positions of an item, at most."""

    modality: Modality
    max_items: int
    max_tokens: int

"""What a worker asks of a model's towers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from penstock_common.types.media import Modality, MultiModalFeature, TensorData
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.core.model_info import MediaInfo


@dataclass(frozen=True, slots=True)
class EncoderItem:
    """An item to encode. ``data``: as the model's processor in transformers gives it for this item alone, but that uint8 pixels
    are still to be rescaled and normalized. ``num_embeds``: rows that must come of it.
    """

    identifier: str
    modality: Modality
    num_embeds: int
    data: Mapping[str, TensorData]


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """``rows`` ``[num_embeds, width]`` on the device, or the ``failure`` that took their place."""

    identifier: str
    rows: torch.Tensor | None
    failure: str = ""


class RopePositions(NamedTuple):
    """``positions`` int64 ``[3, tokens]`` of a prompt; token t behind it stands at ``t + delta`` in all three."""

    positions: IntArray
    delta: int


RopeIndex = Callable[[Sequence[int], Sequence[MultiModalFeature]], RopePositions]
"""Positions of a prompt's token ids, whose features have their small tensors (grids) at least."""


class MediaEncoder(Protocol):
    """The towers of a model on its device, computed in slices between forward passes. One thread calls, with gradients off.

    Rows do not depend on slices, nor on what else is encoded: equal items give equal bits.
    """

    media: Sequence[MediaInfo]
    width: int
    """Numbers in a row: the model's hidden size, times one more than the layers that deepstack feeds."""
    num_deepstack: int
    """Layers that get rows of their own, which stand behind the embedding in each row; 0 for most models."""
    rope_positions: RopeIndex | None
    """Of a prompt, where rotary embeddings have sections; None where a token has one position."""
    modules: Sequence[torch.nn.Module]
    """All that has weights, in an order of the model's: what moves when the engine sleeps."""

    def start(self, item: EncoderItem) -> None:
        """Put an item behind those that are to be encoded."""

    def drop(self, identifier: str) -> None:
        """Forget an item that is to be encoded, also one whose slices have begun. One that is not there is passed over."""

    def advance(self, budget: int) -> list[EncodedItem]:
        """Compute at least one block of the first item, and more while the next block costs no more than what is left of
        ``budget`` (embeddings times blocks), in the order of the items. Returns those that are done. Raises nothing that one
        item caused.
        """

    @property
    def has_work(self) -> bool:
        """Whether an item is to be encoded."""

    def largest(self, modality: Modality) -> EncoderItem:
        """An item as large as the model takes, for profiling memory."""

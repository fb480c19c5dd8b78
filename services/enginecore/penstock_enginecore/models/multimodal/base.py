"""What a worker asks of a model's towers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
import torch

from penstock_common.types.media import (
    DTYPE_BYTES,
    LARGEST_NUMBER,
    Modality,
    MultiModalFeature,
    TensorData,
    TensorDtype,
)
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


# The tensors of an item: those that a family takes, checked, as torch has them.

FLOATS: tuple[TensorDtype, ...] = ("float32", "float16", "bfloat16")
PIXELS: tuple[TensorDtype, ...] = ("uint8", *FLOATS)
INTEGERS: tuple[TensorDtype, ...] = ("int64", "int32")
MASKS: tuple[TensorDtype, ...] = (*INTEGERS, "bool", "uint8", "int8")


class ItemError(Exception):
    """An item cannot be encoded. The message is for whoever sent it."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What a tensor must be. ``shape``: None for dimensions of any size but 0. ``wanted``: it may not be left out."""

    dtypes: tuple[TensorDtype, ...]
    shape: tuple[int | None, ...]
    wanted: bool = True

    def check(self, name: str, tensor: TensorData) -> None:
        """Raise ItemError for a tensor that is not so."""
        if tensor.dtype not in self.dtypes:
            raise ItemError(f"{name} is {tensor.dtype}; it must be {' or '.join(self.dtypes)}")
        fits = len(tensor.shape) == len(self.shape) and all(
            size > 0 if want is None else size == want for size, want in zip(tensor.shape, self.shape, strict=True)
        )
        if not fits:
            raise ItemError(f"{name} has the shape {_named(tensor.shape)}; it must be {_named(self.shape)}")
        if len(tensor.data) != (wanted := prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]):
            raise ItemError(f"{name} has {len(tensor.data)} bytes; its shape and dtype make {wanted}")


def read_tensors(data: Mapping[str, TensorData], specs: Mapping[str, Spec]) -> dict[str, torch.Tensor]:
    """``data`` on the host, in memory of its own. Raises ItemError unless it is what ``specs`` say."""
    if unknown := sorted(data.keys() - specs.keys()):
        raise ItemError(f"a tensor is called {unknown[0]!r}; this model takes {', '.join(specs)}")
    read: dict[str, torch.Tensor] = {}
    for name, spec in specs.items():
        if name not in data:
            if spec.wanted:
                raise ItemError(f"{name} is missing; this model takes {', '.join(_wanted(specs))}")
            continue
        spec.check(name, data[name])
        read[name] = to_torch(data[name])
        if read[name].is_floating_point() and not bool((read[name].abs() <= LARGEST_NUMBER).all()):
            raise ItemError(f"{name} has numbers that are not finite, or beyond {LARGEST_NUMBER}")
    return read


def to_torch(tensor: TensorData) -> torch.Tensor:
    """A copy on the host."""
    return torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, tensor.dtype)).reshape(tensor.shape)


def to_data(tensor: torch.Tensor) -> TensorData:
    """The opposite of ``to_torch``."""
    dtype: TensorDtype = str(tensor.dtype).removeprefix("torch.")  # type: ignore[assignment]
    raw = tensor.detach().cpu().contiguous().view(torch.uint8) if tensor.dim() else tensor.detach().cpu()[None]
    return TensorData(dtype=dtype, shape=tuple(tensor.shape), data=np.asarray(raw).tobytes())


def _wanted(specs: Mapping[str, Spec]) -> Iterator[str]:
    return (name for name, spec in specs.items() if spec.wanted)


def _named(shape: tuple[int | None, ...]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"

"""Interface of a model's media encoders, which a worker calls."""

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
    """Media item to encode.

    Attributes:
        identifier: Id of the item.
        modality: Kind of the item.
        num_embeds: Number of embeddings that the encoder must produce for the item.
        data: Output of the model's transformers processor for this item. If pixels are uint8, they are not rescaled or
            normalized yet.
    """

    identifier: str
    modality: Modality
    num_embeds: int
    data: Mapping[str, TensorData]


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """Result for an item: ``rows`` ``[num_embeds, width]`` with the embeddings on the device, or the ``failure`` if
    encoding failed.
    """

    identifier: str
    rows: torch.Tensor | None
    failure: str = ""


class RopePositions(NamedTuple):
    """Rotary positions of a prompt, int64 ``[3, tokens]``. A token t after the prompt has position ``t + delta`` in all
    three sections.
    """

    positions: IntArray
    delta: int


RopeIndex = Callable[[Sequence[int], Sequence[MultiModalFeature]], RopePositions]
"""Function that returns the rotary positions of a prompt. Its arguments are the prompt's token ids and the features of
its media, with at least their small tensors (grids).
"""


class MediaEncoder(Protocol):
    """Media encoders of a model on its device, computed in slices between forward passes.

    All calls come from one thread, with gradients off. Embeddings do not depend on the slices or on other items, so
    equal items get bit-identical embeddings.
    """

    media: Sequence[MediaInfo]
    width: int
    """Number of elements in an output row: the model's hidden size, times one plus the number of deepstack layers."""
    num_deepstack: int
    """Number of layers that get separate embeddings, which follow the main embedding in each row. 0 for most models."""
    windowed_spans: bool
    """Whether embeddings attend to later embeddings only in layers with a sliding window."""
    rope_positions: RopeIndex | None
    """Function that returns rotary positions of a prompt with sections, or None if each token has a single position."""
    modules: Sequence[torch.nn.Module]
    """All modules that have weights, in the model's order. The memory of these modules moves when the engine sleeps.
    """

    def start(self, item: EncoderItem) -> None:
        """Add an item to the end of the queue."""

    def drop(self, identifier: str) -> None:
        """Remove an item, even if it has been computed in part. Unknown items are ignored."""

    def advance(self, budget: int) -> list[EncodedItem]:
        """Compute the items of the queue in order, and return the items that are complete. An error of a single item is
        not raised. At least one block of the first item is computed. More blocks are computed while the cost of the
        next block is at most the remaining ``budget``. The unit of the budget is one embedding in one block.
        """

    @property
    def has_work(self) -> bool:
        """Whether the queue of items is not empty."""

    def largest(self, modality: Modality) -> EncoderItem:
        """Return an item of the largest size that the model accepts, for memory profiling."""


# Tensors of an item: checks, and conversion to torch.

FLOATS: tuple[TensorDtype, ...] = ("float32", "float16", "bfloat16")
PIXELS: tuple[TensorDtype, ...] = ("uint8", *FLOATS)
INTEGERS: tuple[TensorDtype, ...] = ("int64", "int32")
MASKS: tuple[TensorDtype, ...] = (*INTEGERS, "bool", "uint8", "int8")


class ItemError(Exception):
    """Error raised if an item cannot be encoded. The message is shown to the client."""


@dataclass(frozen=True, slots=True)
class Spec:
    """Requirements on an item's tensor.

    Attributes:
        dtypes: Accepted dtypes.
        shape: Required size of each dimension, or None for any size except 0.
        wanted: Whether the tensor is required.
    """

    dtypes: tuple[TensorDtype, ...]
    shape: tuple[int | None, ...]
    wanted: bool = True

    def check(self, name: str, tensor: TensorData) -> None:
        """Raise ItemError if the tensor does not meet the requirements."""
        if tensor.dtype not in self.dtypes:
            raise ItemError(f"{name} is {tensor.dtype}; it must be {' or '.join(self.dtypes)}")
        fits = len(tensor.shape) == len(self.shape) and all(
            size > 0 if want is None else size == want for size, want in zip(tensor.shape, self.shape, strict=True)
        )
        if not fits:
            raise ItemError(f"{name} has the shape {_named(tensor.shape)}; it must be {_named(self.shape)}")
        if len(tensor.data) != (wanted := prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]):
            raise ItemError(f"{name} has {len(tensor.data)} bytes; its shape and dtype need {wanted}")


def read_tensors(data: Mapping[str, TensorData], specs: Mapping[str, Spec]) -> dict[str, torch.Tensor]:
    """Return the tensors in ``data`` as new tensors on the host. Raises ItemError unless they match ``specs``."""
    if unknown := sorted(data.keys() - specs.keys()):
        raise ItemError(f"unknown tensor {unknown[0]!r}; this model accepts {', '.join(specs)}")
    read: dict[str, torch.Tensor] = {}
    for name, spec in specs.items():
        if name not in data:
            if spec.wanted:
                raise ItemError(f"{name} is missing; this model needs {', '.join(_wanted(specs))}")
            continue
        spec.check(name, data[name])
        read[name] = to_torch(data[name])
        if read[name].is_floating_point() and not bool((read[name].abs() <= LARGEST_NUMBER).all()):
            raise ItemError(f"{name} has numbers that are not finite, or beyond {LARGEST_NUMBER}")
    return read


def to_torch(tensor: TensorData) -> torch.Tensor:
    """Return a copy of a tensor's data as a torch tensor on the host."""
    return torch.frombuffer(bytearray(tensor.data), dtype=getattr(torch, tensor.dtype)).reshape(tensor.shape)


def to_data(tensor: torch.Tensor) -> TensorData:
    """Convert a torch tensor to ``TensorData``, the inverse of ``to_torch``."""
    dtype: TensorDtype = str(tensor.dtype).removeprefix("torch.")  # type: ignore[assignment]
    raw = tensor.detach().cpu().contiguous().view(torch.uint8) if tensor.dim() else tensor.detach().cpu()[None]
    return TensorData(dtype=dtype, shape=tuple(tensor.shape), data=np.asarray(raw).tobytes())


def _wanted(specs: Mapping[str, Spec]) -> Iterator[str]:
    return (name for name, spec in specs.items() if spec.wanted)


def _named(shape: tuple[int | None, ...]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"

"""The tensors of an item: those that a family takes, checked, as torch has them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from penstock_common.types.media import DTYPE_BYTES, LARGEST_NUMBER, TensorData, TensorDtype

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

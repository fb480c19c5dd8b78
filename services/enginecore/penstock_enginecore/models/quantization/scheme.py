"""What every way of quantizing weights is described by."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

Shape = tuple[int, ...]

FLOATS = frozenset({"F16", "BF16", "F32"})
"""Types of scales, as safetensors calls them."""
INT32 = frozenset({"I32"})

_PIECE_NUMBERS = 2**24
"""Numbers of a weight that are computed in float32 at a time."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tensors that stand for a weight. ``suffix`` of its name; ``dtypes`` by their names in safetensors."""

    suffix: str
    dtypes: frozenset[str]
    required: bool = True


class Scheme(Protocol):
    """How the weights of a checkpoint are quantized: which tensors stand for one, and which numbers they mean.

    A weight is quantized if its first part is there, by name and type: what a checkpoint leaves as it was, is plain in its files.
    Tensors of one weight go by the suffixes of their names.
    """

    @property
    def name(self) -> str:
        """For operators."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """What a weight is stored as, the quantized numbers first."""

    @property
    def dense(self) -> str:
        """Suffix of the name that the weight has where it is not quantized."""

    def dense_shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Of the weight whose parts have ``shapes``. ValueError where these do not fit each other."""

    def dequantize(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The weight in ``dtype``: what it means exactly, rounded once. ValueError for numbers that mean nothing."""


def pieces(rows: int, width: int, multiple: int = 1) -> Iterator[slice]:
    """Of ``rows`` of ``width`` numbers, as many at a time as shall be computed at once; all but the last a ``multiple``."""
    step = max(1, _PIECE_NUMBERS // max(1, width * multiple)) * multiple
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def expect(name: str, shape: Shape, *allowed: Shape) -> None:
    """ValueError unless the part ``name`` has one of the ``allowed`` shapes."""
    if shape not in allowed:
        served = " or ".join(str(list(one)) for one in dict.fromkeys(allowed))
        raise ValueError(f"{name} is {list(shape)}; it must be {served}")


def matrix(name: str, shape: Shape) -> tuple[int, int]:
    """Rows and columns of the part ``name``. ValueError where it has others than these."""
    if len(shape) != 2:
        raise ValueError(f"{name} is {list(shape)}; it must have rows and columns")
    return shape[0], shape[1]

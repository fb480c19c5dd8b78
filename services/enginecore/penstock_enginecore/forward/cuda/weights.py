"""Weights that stay quantized, as kernels read them: matrices, or those of experts, with the experts along a first dimension."""

from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["float8", "int4", "mxfp4"]
"""What tiles are chosen by."""


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """``numbers`` e4m3 ``[out_features, in_features]``, of which those of a row and a block of ``width`` columns are multiplied
    by one of ``scales`` float32 ``[blocks, out_features]``.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    width: int
    kind: Kind = "float8"

    @property
    def in_features(self) -> int:
        """Numbers of a row."""
        return self.numbers.shape[-1]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Numbers, scales."""
        return self.numbers, self.scales

    def to(self, device: torch.device) -> "Float8Weight":
        """The same on ``device``."""
        return Float8Weight(self.numbers.to(device), self.scales.to(device), self.width)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Levels of 4 bits, two in a byte of ``numbers`` uint8 ``[out_features, in_features / 2]``: of each ``2 * half`` columns
    those of the first half in the lower bits. In a row and a block of ``width`` columns the level less one of ``zeros`` uint8,
    times one of ``scales``, both ``[blocks, out_features]``, is the weight.
    """

    numbers: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    width: int
    half: int
    kind: Kind = "int4"

    @property
    def in_features(self) -> int:
        """Numbers of a row."""
        return self.numbers.shape[-1] * 2

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Numbers, zeros, scales."""
        return self.numbers, self.zeros, self.scales

    def to(self, device: torch.device) -> "Int4Weight":
        """The same on ``device``."""
        numbers, zeros, scales = (tensor.to(device) for tensor in self.tensors)
        return Int4Weight(numbers, zeros, scales, self.width, self.half)


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """4-bit floats (e2m1), two in a byte of ``numbers`` uint8 ``[experts, out_features, in_features / 2]`` as the levels of
    ``Int4Weight`` are; in a row and a block of 32 columns times 2 to the power of one of ``exponents`` uint8 ``[experts,
    in_features / 32, out_features]``, less 127.
    """

    numbers: torch.Tensor
    exponents: torch.Tensor
    half: int
    kind: Kind = "mxfp4"

    @property
    def in_features(self) -> int:
        """Numbers of a row."""
        return self.numbers.shape[-1] * 2

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Numbers, exponents."""
        return self.numbers, self.exponents

    def to(self, device: torch.device) -> "Mxfp4Weight":
        """The same on ``device``."""
        return Mxfp4Weight(self.numbers.to(device), self.exponents.to(device), self.half)


QuantizedWeight = Float8Weight | Int4Weight
"""Of a linear layer."""
StackedWeight = Float8Weight | Int4Weight | Mxfp4Weight
"""Of experts."""

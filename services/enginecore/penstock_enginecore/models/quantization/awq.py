"""AWQ's checkpoints, in the packing of its GEMM kernels."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from penstock_enginecore.models.quantization.integers import GroupedIntegers, groups_of, num_groups, unpack
from penstock_enginecore.models.quantization.scheme import FLOATS, INT32, Part, Shape, expect, matrix

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of eight neighbours is, in levels from the lowest bits up."""
_PER_WORD = 8


@dataclass(frozen=True, slots=True)
class Awq:
    """4-bit levels ``[in_features, out_features / 8]``, zeros and scales by groups of ``group_size`` input features (-1: one)."""

    group_size: int

    @property
    def name(self) -> str:
        """With the size of groups."""
        return f"AWQ, 4 bits, groups of {self.group_size}" if self.group_size > 0 else "AWQ, 4 bits, by row"

    @property
    def parts(self) -> tuple[Part, ...]:
        """Levels, zeros, scales."""
        return Part(".qweight", INT32), Part(".qzeros", INT32), Part(".scales", FLOATS)

    @property
    def dense(self) -> str:
        """The weight of a linear layer."""
        return ".weight"

    def dense_shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """``[out_features, in_features]``."""
        in_features, words = matrix(".qweight", shapes[".qweight"])
        groups = num_groups(in_features, self.group_size)
        expect(".qzeros", shapes[".qzeros"], (groups, words))
        expect(".scales", shapes[".scales"], (groups, words * _PER_WORD))
        return words * _PER_WORD, in_features

    def dequantize(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """By way of ``integers``."""
        return self.integers(tensors).dequantize(dtype)

    def integers(self, tensors: Mapping[str, torch.Tensor]) -> GroupedIntegers:
        """The weight unpacked."""
        levels = unpack(tensors[".qweight"], 4, _PLACES).t().contiguous()
        zeros = unpack(tensors[".qzeros"], 4, _PLACES).t().to(torch.int16)
        groups = groups_of(levels.shape[1], self.group_size, levels.device)
        return GroupedIntegers(levels, zeros, tensors[".scales"].t(), groups)

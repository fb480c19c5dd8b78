"""Integers of compressed-tensors' format ``pack-quantized``."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from penstock_enginecore.models.quantization.gptq import checked_groups
from penstock_enginecore.models.quantization.integers import WORD, GroupedIntegers, groups_of, num_groups, unpack
from penstock_enginecore.models.quantization.scheme import FLOATS, INT32, Part, Shape, expect, matrix

_PACKED, _SCALE, _SHAPE, _ZERO, _GROUP = "_packed", "_scale", "_shape", "_zero_point", "_g_idx"


@dataclass(frozen=True, slots=True)
class Packed:
    """Levels of ``bits`` ``[out_features, in_features * bits / 32]`` and scales by groups of ``group_size`` input features (-1:
    one). Levels and zeros are stored with half of their range added; ``symmetric`` ones have no zeros. ``act_order``: columns
    of a group do not follow one another.
    """

    bits: int
    group_size: int
    symmetric: bool
    act_order: bool = False

    @property
    def name(self) -> str:
        """With the size of groups."""
        groups = f"groups of {self.group_size}" if self.group_size > 0 else "by row"
        return f"compressed-tensors, {self.bits} bits, {groups}"

    @property
    def parts(self) -> tuple[Part, ...]:
        """Levels, scales, the weight's shape, zeros, groups."""
        return (
            Part(_PACKED, INT32),
            Part(_SCALE, FLOATS),
            Part(_SHAPE, INT32 | {"I64"}, required=False),
            Part(_ZERO, INT32, required=not self.symmetric),
            Part(_GROUP, INT32 | {"I64"}, required=False),
        )

    @property
    def dense(self) -> str:
        """The weight's own name."""
        return ""

    def dense_shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """``[out_features, in_features]``. ValueError where the last word of a row is not full."""
        per_word = WORD // self.bits
        out_features, words = matrix(_PACKED, shapes[_PACKED])
        in_features = words * per_word
        groups = num_groups(in_features, self.group_size)
        expect(_SCALE, shapes[_SCALE], (out_features, groups), *(((out_features,),) if groups == 1 else ()))
        if not self.symmetric:
            expect(_ZERO, shapes[_ZERO], (-(-out_features // per_word), groups))
        if _GROUP in shapes:
            expect(_GROUP, shapes[_GROUP], (in_features,))
        return out_features, in_features

    def dequantize(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """By way of ``integers``."""
        return self.integers(tensors).dequantize(dtype)

    def integers(self, tensors: Mapping[str, torch.Tensor]) -> GroupedIntegers:
        """The weight unpacked."""
        levels = unpack(tensors[_PACKED], self.bits)
        if _SHAPE in tensors and tensors[_SHAPE].tolist() != list(levels.shape):
            raise ValueError(f"{_SHAPE} says {tensors[_SHAPE].tolist()}; {_PACKED} holds {list(levels.shape)}")
        scales = tensors[_SCALE].reshape(len(levels), -1)
        zeros = torch.full(scales.shape, 2 ** (self.bits - 1), dtype=torch.int16, device=levels.device)
        if not self.symmetric:
            zeros = unpack(tensors[_ZERO].t(), self.bits)[:, : len(levels)].t().to(torch.int16)
        groups = groups_of(levels.shape[1], self.group_size, levels.device)
        if _GROUP in tensors and bool((tensors[_GROUP] >= 0).all()):  # -1 in all of them stands for groups in order
            groups = checked_groups(_GROUP, tensors[_GROUP], scales.shape[1])
        return GroupedIntegers(levels, zeros, scales, groups)

"""GPTQ's checkpoints, as AutoGPTQ and GPTQModel write them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from penstock_enginecore.models.quantization.integers import WORD, GroupedIntegers, groups_of, num_groups, unpack
from penstock_enginecore.models.quantization.scheme import FLOATS, INT32, Part, Shape, expect, matrix


@dataclass(frozen=True, slots=True)
class Gptq:
    """Levels of ``bits`` ``[in_features * bits / 32, out_features]``, zeros and scales by groups of ``group_size`` input features
    (-1: one). ``.g_idx`` has the group of each input feature, which are in no order where features were quantized by the size of
    their activations, as ``act_order`` says. ``zero_offset``: what is added to the zeros as they are stored, 1 in the first
    version of the format.
    """

    bits: int
    group_size: int
    zero_offset: int
    act_order: bool = False

    @property
    def name(self) -> str:
        """With the size of groups."""
        groups = f"groups of {self.group_size}" if self.group_size > 0 else "by row"
        return f"GPTQ, {self.bits} bits, {groups}"

    @property
    def parts(self) -> tuple[Part, ...]:
        """Levels, zeros, scales, groups."""
        return (
            Part(".qweight", INT32),
            Part(".qzeros", INT32),
            Part(".scales", FLOATS),
            Part(".g_idx", INT32 | {"I64"}, required=False),
        )

    @property
    def dense(self) -> str:
        """The weight of a linear layer."""
        return ".weight"

    def dense_shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """``[out_features, in_features]``."""
        per_word = WORD // self.bits
        words, out_features = matrix(".qweight", shapes[".qweight"])
        in_features = words * per_word
        groups = num_groups(in_features, self.group_size)
        expect(".qzeros", shapes[".qzeros"], (groups, out_features // per_word))
        expect(".scales", shapes[".scales"], (groups, out_features))
        if ".g_idx" in shapes:
            expect(".g_idx", shapes[".g_idx"], (in_features,))
        return out_features, in_features

    def dequantize(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """By way of ``integers``."""
        return self.integers(tensors).dequantize(dtype)

    def integers(self, tensors: Mapping[str, torch.Tensor]) -> GroupedIntegers:
        """The weight unpacked."""
        levels = unpack(tensors[".qweight"].t(), self.bits)
        zeros = unpack(tensors[".qzeros"], self.bits).t().to(torch.int16) + self.zero_offset
        zeros.bitwise_and_(2**self.bits - 1)  # a zero of 0, less the offset, was stored as the highest level
        return GroupedIntegers(levels, zeros, tensors[".scales"].t(), self._groups(tensors, levels))

    def _groups(self, tensors: Mapping[str, torch.Tensor], levels: torch.Tensor) -> torch.Tensor:
        if ".g_idx" not in tensors:
            return groups_of(levels.shape[1], self.group_size, levels.device)
        return checked_groups(".g_idx", tensors[".g_idx"], len(tensors[".scales"]))


def checked_groups(name: str, groups: torch.Tensor, count: int) -> torch.Tensor:
    """The part ``name``, the group of each column, as int64. ValueError where one is not of ``count`` groups."""
    if groups.min() < 0 or groups.max() >= count:
        raise ValueError(f"{name} has groups from {int(groups.min())} to {int(groups.max())}; there are {count}")
    return groups.long()

"""Weights as small integers with a scale and a zero per group of columns: AWQ, GPTQ and compressed-tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from penstock_enginecore.models.quantization.layers import FLOATS, INT32, Part, Shape, expect, matrix, pieces

# Representation of the weights of all three formats after unpacking.

WORD = 32
"""Number of bits of the integers (words) into which levels are packed."""


@dataclass(frozen=True, slots=True)
class GroupedIntegers:
    """Weight ``[out_features, in_features]`` whose elements are ``(level - zero) * scale``. A level is the stored
    integer of an element.

    Attributes:
        levels: uint8 ``[out_features, in_features]``.
        zeros: int16 ``[out_features, groups]``.
        scales: ``[out_features, groups]``.
        groups: int64 ``[in_features]``, the index of each column's group.
    """

    levels: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    groups: torch.Tensor

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in ``dtype``, computed in float32."""
        out = torch.empty(self.levels.shape, dtype=dtype, device=self.levels.device)
        for piece in pieces(*self.levels.shape):
            numbers = self.levels[piece].float()
            numbers -= self.zeros[piece].float().index_select(1, self.groups)
            numbers *= self.scales[piece].float().index_select(1, self.groups)
            out[piece] = numbers.to(dtype)
        return out


def unpack(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the levels of ``words`` int32 ``[..., n]`` as uint8 ``[..., n * (32 / bits)]``, lowest bits first.

    ``order`` has, for each of the ``32 / bits`` output levels of a word, the index of this level in the word.
    """
    places = range(WORD // bits) if order is None else order
    mask = 2**bits - 1
    levels = torch.empty(*words.shape, WORD // bits, dtype=torch.uint8, device=words.device)
    for i, place in enumerate(places):
        levels[..., i] = words.bitwise_right_shift(place * bits).bitwise_and_(mask)
    return levels.flatten(-2)


def groups_of(in_features: int, group_size: int, device: torch.device) -> torch.Tensor:
    """Return the index of each column's group, for groups of consecutive columns. A ``group_size`` of -1 means one
    group.
    """
    columns = torch.arange(in_features, device=device)
    return columns.zero_() if group_size < 0 else columns // group_size


def num_groups(in_features: int, group_size: int) -> int:
    """Return the number of groups of consecutive columns."""
    return 1 if group_size < 0 else -(-in_features // group_size)


# AWQ checkpoints, packed as AWQ's GEMM kernels expect.

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Index of each of eight neighbouring levels in a word. Index 0 has the lowest bits."""
_PER_WORD = 8


@dataclass(frozen=True, slots=True)
class Awq:
    """AWQ weight: 4-bit levels ``[in_features, out_features / 8]``, with zeros and scales per ``group_size`` input
    features (-1: one group).
    """

    group_size: int

    @property
    def name(self) -> str:
        """Name of the quantization scheme, including the group size."""
        return f"AWQ, 4 bits, groups of {self.group_size}" if self.group_size > 0 else "AWQ, 4 bits, by row"

    @property
    def parts(self) -> tuple[Part, ...]:
        """Tensors of a weight: levels, zeros and scales."""
        return Part(".qweight", INT32), Part(".qzeros", INT32), Part(".scales", FLOATS)

    @property
    def dense(self) -> str:
        """Suffix that the name of a linear layer's weight has without quantization."""
        return ".weight"

    def dense_shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Return the shape of the weight, ``[out_features, in_features]``."""
        in_features, words = matrix(".qweight", shapes[".qweight"])
        groups = num_groups(in_features, self.group_size)
        expect(".qzeros", shapes[".qzeros"], (groups, words))
        expect(".scales", shapes[".scales"], (groups, words * _PER_WORD))
        return words * _PER_WORD, in_features

    def dequantize(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized weight in ``dtype``."""
        return self.integers(tensors).dequantize(dtype)

    def integers(self, tensors: Mapping[str, torch.Tensor]) -> GroupedIntegers:
        """Return the weight as unpacked integers with scales and zeros."""
        levels = unpack(tensors[".qweight"], 4, _PLACES).t().contiguous()
        zeros = unpack(tensors[".qzeros"], 4, _PLACES).t().to(torch.int16)
        groups = groups_of(levels.shape[1], self.group_size, levels.device)
        return GroupedIntegers(levels, zeros, tensors[".scales"].t(), groups)


# GPTQ checkpoints, as written by AutoGPTQ and GPTQModel.


@dataclass(frozen=True, slots=True)
class Gptq:
    """GPTQ weight: levels ``[in_features * bits / 32, out_features]``, with zeros and scales per group of input
    features.

    ``.g_idx`` has the group of each input feature.

    Attributes:
        bits: Number of bits of a level.
        group_size: Number of input features in a group, or -1 for one group.
        zero_offset: Number that is added to stored zeros: 1 in the first version of the format, 0 in the second.
        act_order: Whether features were quantized in order of their activations, so groups are not consecutive.
    """

    bits: int
    group_size: int
    zero_offset: int
    act_order: bool = False

    @property
    def name(self) -> str:
        """Name of the quantization scheme, including the group size."""
        groups = f"groups of {self.group_size}" if self.group_size > 0 else "by row"
        return f"GPTQ, {self.bits} bits, {groups}"

    @property
    def parts(self) -> tuple[Part, ...]:
        """Tensors of a weight: levels, zeros, scales and groups."""
        return (
            Part(".qweight", INT32),
            Part(".qzeros", INT32),
            Part(".scales", FLOATS),
            Part(".g_idx", INT32 | {"I64"}, required=False),
        )

    @property
    def dense(self) -> str:
        """Suffix that the name of a linear layer's weight has without quantization."""
        return ".weight"

    def dense_shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Return the shape of the weight, ``[out_features, in_features]``."""
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
        """Return the dequantized weight in ``dtype``."""
        return self.integers(tensors).dequantize(dtype)

    def integers(self, tensors: Mapping[str, torch.Tensor]) -> GroupedIntegers:
        """Return the weight as unpacked integers with scales and zeros."""
        levels = unpack(tensors[".qweight"].t(), self.bits)
        zeros = unpack(tensors[".qzeros"], self.bits).t().to(torch.int16) + self.zero_offset
        zeros.bitwise_and_(2**self.bits - 1)  # if zero minus offset is below 0, the file has the highest level instead
        return GroupedIntegers(levels, zeros, tensors[".scales"].t(), self._groups(tensors, levels))

    def _groups(self, tensors: Mapping[str, torch.Tensor], levels: torch.Tensor) -> torch.Tensor:
        if ".g_idx" not in tensors:
            return groups_of(levels.shape[1], self.group_size, levels.device)
        return checked_groups(".g_idx", tensors[".g_idx"], len(tensors[".scales"]))


def checked_groups(name: str, groups: torch.Tensor, count: int) -> torch.Tensor:
    """Return the tensor ``name``, which has the group index of each column, as int64. Raises ValueError if an index is
    not below ``count``.
    """
    if groups.min() < 0 or groups.max() >= count:
        raise ValueError(
            f"{name} has group numbers from {int(groups.min())} to {int(groups.max())}, but the weights have {count} groups, "
            "numbered from 0"
        )
    return groups.long()


# Checkpoints in the format ``pack-quantized`` of compressed-tensors.

_PACKED, _SCALE, _SHAPE, _ZERO, _GROUP = "_packed", "_scale", "_shape", "_zero_point", "_g_idx"


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed weight: levels ``[out_features, in_features * bits / 32]``, with scales per group of input features.

    Half of their range is added to levels and zeros before they are stored.

    Attributes:
        bits: Number of bits of a level.
        group_size: Number of input features in a group, or -1 for one group.
        symmetric: Whether the quantization is symmetric, so that no zeros are stored.
        act_order: Whether groups of columns are not consecutive.
    """

    bits: int
    group_size: int
    symmetric: bool
    act_order: bool = False

    @property
    def name(self) -> str:
        """Name of the quantization scheme, including the group size."""
        groups = f"groups of {self.group_size}" if self.group_size > 0 else "by row"
        return f"compressed-tensors, {self.bits} bits, {groups}"

    @property
    def parts(self) -> tuple[Part, ...]:
        """Tensors of a weight: levels, scales, shape, zeros and groups."""
        return (
            Part(_PACKED, INT32),
            Part(_SCALE, FLOATS),
            Part(_SHAPE, INT32 | {"I64"}, required=False),
            Part(_ZERO, INT32, required=not self.symmetric),
            Part(_GROUP, INT32 | {"I64"}, required=False),
        )

    @property
    def dense(self) -> str:
        """Suffix that the weight's name has without quantization, which is empty."""
        return ""

    def dense_shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Return the shape of the weight, ``[out_features, in_features]``. Raises ValueError if the last word of a row
        is not full.
        """
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
        """Return the dequantized weight in ``dtype``."""
        return self.integers(tensors).dequantize(dtype)

    def integers(self, tensors: Mapping[str, torch.Tensor]) -> GroupedIntegers:
        """Return the weight as unpacked integers with scales and zeros."""
        levels = unpack(tensors[_PACKED], self.bits)
        if _SHAPE in tensors and tensors[_SHAPE].tolist() != list(levels.shape):
            raise ValueError(
                f"{_SHAPE} is {tensors[_SHAPE].tolist()}, but {_PACKED} has levels of shape {list(levels.shape)}"
            )
        scales = tensors[_SCALE].reshape(len(levels), -1)
        zeros = torch.full(scales.shape, 2 ** (self.bits - 1), dtype=torch.int16, device=levels.device)
        if not self.symmetric:
            zeros = unpack(tensors[_ZERO].t(), self.bits)[:, : len(levels)].t().to(torch.int16)
        groups = groups_of(levels.shape[1], self.group_size, levels.device)
        # If all group indices are -1, each group has consecutive columns.
        if _GROUP in tensors and bool((tensors[_GROUP] >= 0).all()):
            groups = checked_groups(_GROUP, tensors[_GROUP], scales.shape[1])
        return GroupedIntegers(levels, zeros, scales, groups)

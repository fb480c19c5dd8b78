"""Weights of small integers with a scale and a zero for each group of columns: what AWQ, GPTQ and compressed-tensors have in
common, once their packing is undone.
"""

from dataclasses import dataclass

import torch

from penstock_enginecore.models.quantization.scheme import pieces

WORD = 32
"""Bits of the integers that levels are packed into."""


@dataclass(frozen=True, slots=True)
class GroupedIntegers:
    """A weight ``[out_features, in_features]`` of ``(level - zero) * scale``. ``levels`` uint8 of its shape; ``zeros`` int16 and
    ``scales`` ``[out_features, groups]``; ``groups`` int64 ``[in_features]``: the group of each column.
    """

    levels: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    groups: torch.Tensor

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight in ``dtype``, multiplied in float32."""
        out = torch.empty(self.levels.shape, dtype=dtype, device=self.levels.device)
        for piece in pieces(*self.levels.shape):
            numbers = self.levels[piece].float()
            numbers -= self.zeros[piece].float().index_select(1, self.groups)
            numbers *= self.scales[piece].float().index_select(1, self.groups)
            out[piece] = numbers.to(dtype)
        return out


def unpack(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Levels of ``words`` int32 ``[..., n]``: uint8 ``[..., n * (32 / bits)]``, from the lowest bits up. ``order``: which of a
    word's levels, counted so, comes at each place.
    """
    places = range(WORD // bits) if order is None else order
    mask = 2**bits - 1
    levels = torch.empty(*words.shape, WORD // bits, dtype=torch.uint8, device=words.device)
    for i, place in enumerate(places):
        levels[..., i] = words.bitwise_right_shift(place * bits).bitwise_and_(mask)
    return levels.flatten(-2)


def groups_of(in_features: int, group_size: int, device: torch.device) -> torch.Tensor:
    """The group of each column where groups follow one another; one group for a ``group_size`` of -1."""
    columns = torch.arange(in_features, device=device)
    return columns.zero_() if group_size < 0 else columns // group_size


def num_groups(in_features: int, group_size: int) -> int:
    """How many there are."""
    return 1 if group_size < 0 else -(-in_features // group_size)

"""Layout of quantized weights for the kernels: words of 16 bits with two 8-bit floats or four 4-bit elements.

A row of a weight consists of tiles. A tile has ``count`` parts of ``part`` columns each, and word ``i`` of a tile has
column ``i`` of each part. ``count`` is 2 for 8-bit floats and 4 for 4-bit elements. Therefore a kernel multiplies one
part after the other, and each part's columns are consecutive. The bits of an element are arranged so that
``kernels/conversions.py`` needs few instructions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from penstock_enginecore.models.quantization.float8 import Float8
from penstock_enginecore.models.quantization.layers import Part, Shape, pieces

MIN_PART = 16
"""Number of columns that a tensor core instruction multiplies."""
_MAX_PART_8, _MAX_PART_4 = 64, 32
_WASTE = 16
"""The empty part of the last tile may be a sixteenth of the columns."""
_NAN = 0x7F


def power_of_two(number: int) -> int:
    """Return the largest power of two that divides ``number``."""
    return number & -number


def float8_part(columns: int, width: int) -> int:
    """Return the number of columns of a part of 8-bit floats. ``width`` is the number of columns that share a scale.
    The result is below ``MIN_PART`` if the kernels cannot multiply the weight.
    """
    shared = columns if width >= columns else width
    return min(_MAX_PART_8, power_of_two(columns) // 2, power_of_two(shared))


def part_of_4_bits(columns: int, width: int) -> int:
    """Return the number of columns of a part of 4-bit elements. ``width`` is the number of columns that share a scale.
    Parts are smaller if the last tile of a row would be mostly empty.
    """
    part = min(_MAX_PART_4, power_of_two(width))
    return part if -columns % (4 * part) * _WASTE <= columns else min(part, MIN_PART)


def words_of_4_bits(columns: int, part: int) -> int:
    """Return the number of words of a row of 4-bit elements."""
    return -(-columns // (4 * part)) * part


def pack_float8(numbers: torch.Tensor, part: int) -> torch.Tensor:
    """Rearrange contiguous 8-bit floats ``[..., columns]`` in their own memory, and return them as words ``[...,
    columns / 2]``.

    Raises ValueError, before anything changes, if an element is NaN, because a conversion reads NaN as a number.
    """
    shape, columns = numbers.shape, numbers.shape[-1]
    numbers = numbers.view(-1, columns)
    rows = len(numbers)
    if any(bool(((numbers[piece].view(torch.uint8) & _NAN) == _NAN).any()) for piece in pieces(rows, columns)):
        raise ValueError("a weight contains NaN")
    words = numbers.view(torch.int16)
    for piece in pieces(rows, columns):
        codes = numbers[piece].view(torch.uint8).view(-1, columns // (2 * part), 2, part)
        first, second = codes.to(torch.int16).unbind(2)
        packed = (first & 0x7F) << 4 | (second & 0x80) << 4 | (second & 0x70) << 8 | second & 0x0F
        packed |= torch.where(first >= 0x80, -0x8000, 0).to(torch.int16)
        words[piece] = packed.view(-1, columns // 2)
    return words.view(*shape[:-1], columns // 2)


def unpack_float8(words: torch.Tensor, part: int) -> torch.Tensor:
    """Return a copy of ``words`` as 8-bit floats. This is the inverse of ``pack_float8``."""
    rows, columns = words.shape[0], 2 * words.shape[1]
    numbers = torch.empty(rows, columns, dtype=torch.uint8, device=words.device)
    for piece in pieces(rows, columns):
        bits = words[piece].view(-1, columns // (2 * part), part).int()
        first = (bits >> 8 & 0x80) | (bits >> 4 & 0x7F)
        second = (bits >> 4 & 0x80) | (bits >> 8 & 0x70) | (bits & 0x0F)
        numbers[piece] = torch.stack([first, second], dim=2).view(-1, columns).to(torch.uint8)
    return numbers.view(torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class PackedFloat8:
    """Quantization scheme of 8-bit floats that ``pack_float8`` has rearranged. A module of the model with this scheme
    shares the weight's memory with a matrix product.
    """

    stored: Float8
    part: int

    @property
    def name(self) -> str:
        """Name of the scheme of the checkpoint."""
        return self.stored.name

    @property
    def rounds_activations(self) -> bool:
        """Whether the checkpoint was quantized for 8-bit activations."""
        return self.stored.rounds_activations

    @property
    def parts(self) -> tuple[Part, ...]:
        """Tensors of a weight in the checkpoint."""
        return self.stored.parts

    @property
    def dense(self) -> str:
        """Suffix that the weight's name has without quantization."""
        return self.stored.dense

    def dense_shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Return the shape of the weight whose parts have ``shapes``."""
        *leading, words = shapes[""]
        return self.stored.dense_shape({**shapes, "": (*leading, 2 * words)})

    def dequantize(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the elements times their scales, computed in float32."""
        words = tensors[""]
        numbers = unpack_float8(words.reshape(-1, words.shape[-1]), self.part)
        return self.stored.dequantize({**tensors, "": numbers.view(*words.shape[:-1], -1)}, dtype)

    def by_rows(self, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        """Return the scales of a matrix and the number of columns in a block, as ``Float8.by_rows``."""
        rows, words = tensors[""].shape
        return self.stored.by_rows({**tensors, "": torch.empty(rows, 2 * words, device="meta")})


def pack_int4(levels: torch.Tensor, part: int) -> torch.Tensor:
    """Return 4-bit levels, uint8 ``[rows, columns]``, as words. The last tile of a row is filled with zeros."""
    tiles = _tiles(levels, part)
    words = torch.zeros(*tiles.shape[:2], part, dtype=torch.int16, device=levels.device)
    for i in range(4):
        words |= tiles[:, :, i].to(torch.int16) << 4 * i
    return words.view(len(levels), -1)


def pack_e2m1(codes: torch.Tensor, part: int) -> torch.Tensor:
    """Return 4-bit floats, uint8 ``[rows, columns]``, as words. The last tile of a row is filled with zeros."""
    tiles = _tiles(codes, part).int()
    sign, size = tiles >> 3, tiles & 7
    words = sign[:, :, 0] << 15 | size[:, :, 0] << 6 | sign[:, :, 1] << 12 | size[:, :, 1] << 3
    words |= sign[:, :, 2] << 9 | size[:, :, 2] | sign[:, :, 3] << 14 | (size[:, :, 3] & 4) << 11
    words |= (size[:, :, 3] & 3) << 10
    return torch.where(words < 0x8000, words, words - 0x10000).to(torch.int16).view(len(codes), -1)


def _tiles(elements: torch.Tensor, part: int) -> torch.Tensor:
    """Return the elements ``[rows, tiles, 4, part]``, with zeros behind the last column."""
    rows, columns = elements.shape
    missing = -columns % (4 * part)
    return torch.nn.functional.pad(elements, (0, missing)).view(rows, -1, 4, part)

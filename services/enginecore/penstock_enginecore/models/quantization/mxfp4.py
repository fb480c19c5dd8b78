"""MXFP4 as in gpt-oss: experts in 4-bit floats with a power of two per 32 elements (OCP Microscaling Formats)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from penstock_enginecore.models.quantization.layers import Part, Shape, expect, pieces

NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each 4-bit code (e2m1)."""
_BLOCK = 32
_BIAS = 127
_NAN = 255


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """MXFP4 weight of all experts, dequantized to ``[experts, in_features, out_features]`` as in gpt-oss.

    Blocks are uint8 ``[experts, out_features, in_features / 32, 16]``, where the lower 4 bits of a byte are the first
    of its two elements. A scale is the exponent of a power of two, plus 127.
    """

    @property
    def name(self) -> str:
        """Name of the format."""
        return "MXFP4"

    @property
    def parts(self) -> tuple[Part, ...]:
        """Tensors of a weight: 4-bit elements and the exponents of the scales."""
        byte = frozenset({"U8"})
        return Part("_blocks", byte), Part("_scales", byte)

    @property
    def dense(self) -> str:
        """Suffix that the weight's name has without quantization, which is empty."""
        return ""

    def dense_shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Return the shape of the weight, ``[experts, in_features, out_features]``."""
        blocks = shapes["_blocks"]
        if len(blocks) != 4 or blocks[3] != _BLOCK // 2:
            raise ValueError(
                f"_blocks has shape {list(blocks)}; it must be [experts, out_features, blocks, {_BLOCK // 2}]"
            )
        expect("_scales", shapes["_scales"], blocks[:3])
        experts, out_features, count, _ = blocks
        return experts, count * _BLOCK, out_features

    def dequantize(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the elements times their powers of two, computed in float32. Raises ValueError if a scale is NaN."""
        blocks, scales = tensors["_blocks"], tensors["_scales"]
        if bool((scales == _NAN).any()):
            raise ValueError(f"_scales contains {_NAN}, which means NaN")
        experts, out_features, count, _ = blocks.shape
        numbers = torch.tensor(NUMBERS, device=blocks.device)
        out = torch.empty(experts, count * _BLOCK, out_features, dtype=dtype, device=blocks.device)
        for expert in range(experts):
            for rows in pieces(out_features, count * _BLOCK):
                packed, exponents = blocks[expert, rows], scales[expert, rows].int() - _BIAS
                levels = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).int()
                values = torch.ldexp(numbers[levels], exponents[..., None])
                out[expert, :, rows] = values.flatten(1).t().to(dtype)
        return out

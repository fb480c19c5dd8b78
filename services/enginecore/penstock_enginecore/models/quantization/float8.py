"""Weights in 8-bit floats with a scale per tensor, row or block."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from penstock_enginecore.models.quantization.layers import FLOATS, Part, Shape, expect, pieces

_SCALES = FLOATS | {"F8_E8M0"}


@dataclass(frozen=True, slots=True)
class Float8:
    """Weight in e4m3 ``[..., out_features, in_features]`` with scales.

    Used by fine-grained checkpoints of DeepSeek-V3 and Qwen3, by FBGEMM and by compressed-tensors.

    Attributes:
        granularity: Number of elements with one scale: ``"tensor"`` for all, ``"row"`` for one row (output feature), or
            the (rows, columns) of a block. The last blocks of a dimension may be smaller.
        scale: Suffix in the name of the scales' tensor.
        rounds_activations: Whether the checkpoint was quantized for 8-bit activations. Only without blocks.
    """

    granularity: Literal["tensor", "row"] | tuple[int, int]
    scale: str
    rounds_activations: bool = False

    @property
    def name(self) -> str:
        """Name of the quantization scheme, including the granularity."""
        if isinstance(self.granularity, str):
            return f"fp8 by {self.granularity}"
        return "fp8 by blocks of {}x{}".format(*self.granularity)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Tensors of a weight: the elements, under the weight's own name, and the scales."""
        return Part("", frozenset({"F8_E4M3"})), Part(self.scale, _SCALES)

    @property
    def dense(self) -> str:
        """Suffix that the weight's name has without quantization, which is empty."""
        return ""

    def dense_shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Return the shape of the quantized weight."""
        shape, scales = shapes[""], shapes[self.scale]
        if len(shape) < 2:
            raise ValueError(f"it has shape {list(shape)}; it must have rows and columns")
        *leading, rows, columns = shape
        if self.granularity == "tensor":
            expect(self.scale, scales, (), (1,), tuple(leading) or (1,))
        elif self.granularity == "row":
            expect(self.scale, scales, (*leading, rows, 1), (*leading, rows))
        else:
            height, width = self.granularity
            expect(self.scale, scales, (*leading, -(-rows // height), -(-columns // width)))
        return shape

    def dequantize(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the elements times their scales, computed in float32."""
        weight = tensors[""]
        rows, columns = weight.shape[-2:]
        height, width = self._block(rows, columns)
        matrices = weight.reshape(-1, rows, columns)
        scales = tensors[self.scale].float()
        scales = scales.reshape(scales.numel() // self._scales(rows, columns), -(-rows // height), -(-columns // width))
        out = torch.empty(matrices.shape, dtype=dtype, device=weight.device)
        for i, (matrix, own) in enumerate(zip(matrices, scales.expand(len(matrices), -1, -1), strict=True)):
            for piece in pieces(rows, columns, height):
                of_rows = own[piece.start // height : -(-piece.stop // height)].repeat_interleave(height, 0)
                factors = of_rows[: piece.stop - piece.start].repeat_interleave(width, 1)[:, :columns]
                out[i, piece] = matrix[piece].float().mul_(factors).to(dtype)
        return out.view(weight.shape)

    def by_rows(self, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        """Return the scales of a matrix, and the number of columns in a block. The scales are float32 ``[blocks,
        rows]``, one for each row and each block of columns.
        """
        rows, columns = tensors[""].shape
        height, width = self._block(rows, columns)
        scales = tensors[self.scale].float().reshape(-(-rows // height), -1)
        return scales.repeat_interleave(height, 0)[:rows].t().contiguous(), width

    def _block(self, rows: int, columns: int) -> tuple[int, int]:
        if self.granularity == "tensor":
            return rows, columns
        return (1, columns) if self.granularity == "row" else self.granularity

    def _scales(self, rows: int, columns: int) -> int:
        """Return the number of scales of one matrix."""
        height, width = self._block(rows, columns)
        return -(-rows // height) * -(-columns // width)

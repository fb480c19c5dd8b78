"""Weights of 8-bit floats with a scale for a tensor, a row or a block."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from penstock_enginecore.models.quantization.layers import FLOATS, Part, Shape, expect, pieces

_SCALES = FLOATS | {"F8_E8M0"}


@dataclass(frozen=True, slots=True)
class Float8:
    """e4m3 ``[..., out_features, in_features]``, which a scale is multiplied by: one for the ``"tensor"``, for each ``"row"`` (an
    output feature), or for each block of so many rows and columns, the last ones of which may be smaller. DeepSeek-V3's and
    Qwen3's fine-grained checkpoints, FBGEMM's, and those of compressed-tensors. ``scale``: suffix of its name.
    """

    granularity: Literal["tensor", "row"] | tuple[int, int]
    scale: str

    @property
    def name(self) -> str:
        """By what has a scale."""
        if isinstance(self.granularity, str):
            return f"fp8 by {self.granularity}"
        return "fp8 by blocks of {}x{}".format(*self.granularity)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The weight under its own name, and scales."""
        return Part("", frozenset({"F8_E4M3"})), Part(self.scale, _SCALES)

    @property
    def dense(self) -> str:
        """The weight's own name."""
        return ""

    def dense_shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """That of the quantized weight."""
        shape, scales = shapes[""], shapes[self.scale]
        if len(shape) < 2:
            raise ValueError(f"it is {list(shape)}; it must have rows and columns")
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
        """Numbers times their scales, in float32."""
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
        """Scales of a matrix float32 ``[blocks, rows]``, one for each row and block of columns, and how many columns that is."""
        rows, columns = tensors[""].shape
        height, width = self._block(rows, columns)
        scales = tensors[self.scale].float().reshape(-(-rows // height), -1)
        return scales.repeat_interleave(height, 0)[:rows].t().contiguous(), width

    def _block(self, rows: int, columns: int) -> tuple[int, int]:
        if self.granularity == "tensor":
            return rows, columns
        return (1, columns) if self.granularity == "row" else self.granularity

    def _scales(self, rows: int, columns: int) -> int:
        """Of one matrix."""
        height, width = self._block(rows, columns)
        return -(-rows // height) * -(-columns // width)

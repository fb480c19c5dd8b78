"""Products of many rows whose activations are rounded to 8-bit floats, with weights in 8-bit floats.

Kernels round the activations with one scale per row, and restore the byte order of the packed weight. Tensor cores
multiply the 8-bit floats in torch's scaled product.
"""

import torch
import triton
import triton.language as tl

from penstock_enginecore.attention.kv_cache import FLOAT8
from penstock_enginecore.forward.cuda.kernel_api import Float8Weight
from penstock_enginecore.forward.cuda.kernels.conversions import float8_code

LARGEST = 448.0
"""Largest 8-bit float."""
_BY_ROW_FROM = (9, 0)
"""Compute capability from which torch's scaled product with a scale per row is used. It returns only bfloat16."""
_BLOCK = 4096
_UNPACKED_ROWS = 32


def scaled_product(
    x: torch.Tensor, weight: Float8Weight, bias: torch.Tensor | None, scale: float, out: torch.Tensor
) -> None:
    """Round each row of ``x`` to 8-bit floats, multiply by ``weight``, add ``bias`` if given, multiply by ``scale``, and
    write the result to ``out``. Sums are float32. The call allocates one byte per element of ``x`` and of the weight.

    Args:
        x: ``[rows, in_features]``. All tensors are contiguous.
        weight: Weight with one scale per row.
        bias: ``[out_features]``, or None.
        scale: Factor of the result.
        out: ``[rows, out_features]``. The number of output features is a multiple of 16.

    Raises:
        ValueError: Shapes or strides are not supported, or the weight has several scales per row.
    """
    numbers = torch.empty_like(x, dtype=FLOAT8)
    scales = x.new_empty(len(x), 1, dtype=torch.float32)
    round_rows(x, numbers, scales)
    matrix = torch.empty(weight.numbers.shape[0], weight.in_features, dtype=FLOAT8, device=x.device)
    unpack(weight, matrix)
    if weight.scales.shape != (1, len(matrix)) or out.shape != (len(x), len(matrix)) or not out.is_contiguous():
        raise ValueError(
            f"scales {list(weight.scales.shape)} and output {list(out.shape)} do not fit {len(x)} rows and "
            f"{len(matrix)} output features with one scale each, or the output is not contiguous"
        )
    if by_row(x.device, out.dtype):
        if scale != 1.0:
            scales, bias = scales * scale, None if bias is None else bias * scale
        torch._scaled_mm(numbers, matrix.t(), scales, weight.scales, bias=bias, out_dtype=out.dtype, out=out)
        return
    one = torch.ones((), device=x.device)
    total = torch._scaled_mm(numbers, matrix.t(), one, one, out_dtype=torch.float32)
    total.mul_(scales).mul_(weight.scales)
    if bias is not None:
        total.add_(bias)
    out.copy_(total.mul_(scale))


def by_row(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's product applies a scale per row and writes the result in ``dtype``. Otherwise, the product
    is float32 without scales, and the scales are applied afterwards.
    """
    if dtype != torch.bfloat16:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _BY_ROW_FROM


def round_rows(x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the rows of ``x``, divided by their scales, to ``numbers`` as 8-bit floats. The scale of a row is its largest
    absolute element divided by 448, or 1 for a row of zeros.

    Args:
        x: ``[rows, columns]``. All tensors are contiguous.
        numbers: float8_e4m3fn ``[rows, columns]``.
        scales: float32 ``[rows, 1]``.

    Raises:
        ValueError: Shapes or strides are not supported.
    """
    rows, columns = x.shape
    if numbers.shape != x.shape or scales.shape != (rows, 1):
        raise ValueError(f"{list(numbers.shape)} and {list(scales.shape)} do not fit {rows} rows of {columns} elements")
    if not (x.is_contiguous() and numbers.is_contiguous() and scales.is_contiguous()):
        raise ValueError("all tensors must be contiguous")
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(columns))
        rounded_row[(rows,)](x, numbers, scales, columns, MOST=LARGEST, BLOCK=block)


def unpack(weight: Float8Weight, out: torch.Tensor) -> None:
    """Write the elements of a packed weight, without their scales, to ``out``.

    Args:
        weight: The packed weight.
        out: float8_e4m3fn ``[out_features, in_features]``, contiguous.
    """
    out_features, words = weight.numbers.shape
    grid = triton.cdiv(out_features, _UNPACKED_ROWS), words // weight.part
    unpacked_tiles[grid](
        weight.numbers, out.view(torch.uint8), out_features, words, PART=weight.part, BLOCK_N=_UNPACKED_ROWS
    )


@triton.jit
def rounded_row(x, numbers, scales, columns, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """Round one row of ``x`` to 8-bit floats, and write its scale."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        values = tl.load(x + row * columns + start + k, mask=start + k < columns, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))
    scale = tl.div_rn(tl.max(largest, axis=0), MOST)
    scale = tl.where(scale > 0.0, scale, 1.0)
    tl.store(scales + row, scale)
    for start in range(0, columns, BLOCK):
        inside = start + k < columns
        values = tl.load(x + row * columns + start + k, mask=inside, other=0.0).to(tl.float32)
        values = tl.div_rn(values, tl.zeros((BLOCK,), tl.float32) + scale)
        # For compute capability 8.9, Triton converts by way of float16, so a number near the middle between two 8-bit
        # floats may become either. The division can exceed the largest number by a rounding error. NaN stays NaN.
        values = tl.where(values > MOST, MOST, tl.where(values < -MOST, -MOST, values))
        tl.store(numbers + row * columns + start + k, values.to(tl.float8e4nv), mask=inside)


@triton.jit
def unpacked_tiles(numbers, out, out_features, words, PART: tl.constexpr, BLOCK_N: tl.constexpr):
    """Restore the byte order of one tile of columns of ``BLOCK_N`` rows of a packed weight."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (n < out_features)[:, None]
    k = tl.program_id(1) * PART + tl.arange(0, PART)[None, :]
    row = n[:, None].to(tl.int64) * words
    tile = tl.load(numbers + row + k, mask=inside, other=0)
    for part in tl.static_range(2):
        column = tl.program_id(1) * 2 * PART + part * PART + tl.arange(0, PART)[None, :]
        tl.store(out + row * 2 + column, float8_code(tile, part), mask=inside)

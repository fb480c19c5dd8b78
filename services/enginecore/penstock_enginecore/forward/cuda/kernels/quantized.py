"""Products with quantized weights of linear layers and experts: 8-bit floats, 4-bit integers and MXFP4.

Kernels convert the weights to the dtype of the activations, which represents each quantized value exactly, and multiply
the sums by the scales. Activations are not quantized, because in steps with few rows most of the time is spent on
reading weights.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernel_api import (
    Activation,
    ClampedGate,
    Float8Weight,
    Int4Weight,
    QuantizedWeight,
    StackedWeight,
)
from penstock_enginecore.forward.cuda.kernels.configurations import (
    ExpertTiles,
    Product,
    device_name,
    expert_tiles,
    product_tiles,
)
from penstock_enginecore.forward.cuda.kernels.grouped import (
    check_rows,
    expert_places,
    find_rows,
    gate_constants,
    grid_rows,
    store_rows,
)
from penstock_enginecore.forward.cuda.kernels.invariant import places, store

_BITS = {"float8": 8, "int4": 4}
_MIN_WIDTH = 16
"""Smallest number of columns of a tile. For 4-bit weights, the smallest number of columns of half a tile."""


def quantized_product(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    *,
    invariant: bool = False,
) -> None:
    """Multiply ``x`` by ``weight``, add ``bias`` if given, multiply by ``scale``, and write the result to ``out``. Sums
    are float32. Each sum adds one block of columns after another.

    Args:
        x: ``[rows, in_features]``. All tensors are contiguous.
        weight: The quantized weight.
        bias: ``[out_features]``, or None.
        scale: Factor of the result.
        out: ``[rows, out_features]``.
        invariant: Whether sums must have the same order for any number of rows.

    Raises:
        ValueError: Shapes or strides are not supported, or the number of columns of a tile does not divide the number
            of columns of a block.
    """
    (rows, in_features), out_features = x.shape, weight.numbers.shape[0]
    blocks = triton.cdiv(in_features, weight.width)
    if weight.in_features != in_features or {part.shape for part in weight.tensors[1:]} != {(blocks, out_features)}:
        shapes = " and ".join(str(list(part.shape)) for part in weight.tensors)
        raise ValueError(f"a weight with tensors of shape {shapes} does not fit rows of {in_features} elements")
    if out.shape != (rows, out_features) or not all(part.is_contiguous() for part in (x, out, *weight.tensors)):
        raise ValueError(
            f"an output of {list(out.shape)} does not fit {rows} rows of {out_features} elements, or tensors are "
            "not contiguous"
        )
    tiles = product_tiles(rows, _BITS[weight.kind], device_name(x.device), invariant=invariant)
    constants = _constants(weight, tiles)
    if not rows:
        return
    grid = triton.cdiv(out_features, tiles.block_n), triton.cdiv(rows, tiles.block_m)
    quantized_tiles[grid](
        x, weight.numbers, *_zeros_and_scales(weight), bias, out, rows, out_features, in_features, scale, **constants
    )


def quantized_grouped_product(
    x: torch.Tensor,
    weight: StackedWeight,
    bias: torch.Tensor | None,
    ends: torch.Tensor,
    out: torch.Tensor,
    *,
    order: torch.Tensor | None = None,
    top_k: int = 0,
    activation: Activation | ClampedGate | None = None,
    invariant: bool = False,
) -> None:
    """Multiply each expert's rows by the expert's weight, add the expert's bias, apply the activation if given, and
    write the result to ``out``. Sums are float32. Rows of ``out`` that belong to no expert are unchanged.

    Args:
        x: ``[rows, in_features]``, sorted by expert, or ``[tokens, in_features]`` with ``top_k``. All tensors are
            contiguous.
        weight: The quantized weight of all experts.
        bias: ``[experts, out_features]``, or None.
        ends: int32 ``[experts]``, the end of each expert's rows.
        out: ``[rows, out_features]``, or ``[rows, out_features / 2]`` with an activation.
        order: int32 ``[rows]``, or None; see ``grouped_product``.
        top_k: Number of rows that read the same row of ``x``, or 0; see ``grouped_product``.
        activation: Gated activation; see ``grouped_product``.
        invariant: Whether sums must have the same order for any number of rows.

    Raises:
        ValueError: Shapes or strides are not supported, or the number of columns of a tile does not divide the number
            of columns of a block.
    """
    in_features, (experts, out_features) = x.shape[1], weight.numbers.shape[:2]
    width = out_features if activation is None else out_features // 2
    if weight.in_features != in_features or out.shape[1] != width:
        raise ValueError(
            f"shapes do not match: input {list(x.shape)}, weights of {experts} experts with {out_features} rows of "
            f"{weight.in_features} columns, output {list(out.shape)}"
        )
    check_rows(x, ends, order, top_k, out, experts)
    if bias is not None and bias.shape != (experts, out_features):
        raise ValueError(f"`bias` has shape {list(bias.shape)}, but {experts} experts have {out_features} rows each")
    if not all(part.is_contiguous() for part in (x, ends, out, *weight.tensors, *([] if order is None else [order]))):
        raise ValueError("all tensors of a matrix product must be contiguous")
    blocks = triton.cdiv(in_features, weight.width)
    for part in weight.tensors[1:]:
        if part.shape != (experts, blocks, out_features):
            raise ValueError(
                f"scales or zeros have shape {list(part.shape)}, for {blocks} blocks of {experts} times {out_features} rows"
            )
    rows = len(out)
    tiles = expert_tiles(rows // experts, weight.kind, device_name(x.device), invariant=invariant)
    constants = _constants(weight, tiles)
    if not rows:
        return
    alpha, limit, gate = gate_constants(activation)
    grid = grid_rows(rows, experts, tiles.block_m), triton.cdiv(out_features, tiles.block_n)
    quantized_experts[grid](
        x, weight.numbers, *_zeros_and_scales(weight), bias, ends, order, out, experts, out_features, in_features,
        blocks, alpha, limit, EXPERTS=max(16, triton.next_power_of_2(experts)), TOP_K=top_k, GATE=gate, **constants,
    )  # fmt: skip


def _zeros_and_scales(weight: StackedWeight) -> tuple[torch.Tensor | None, torch.Tensor]:
    *zeros, scales = weight.tensors[1:]
    return (zeros[0] if zeros else None), scales


def _constants(weight: StackedWeight, tiles: Product | ExpertTiles) -> dict[str, Any]:
    """Return the compile-time constants of a kernel. Raises ValueError if the number of columns of a tile does not
    divide the number of columns of a scale block.
    """
    columns, width, half, block_k = weight.in_features, weight.width, 0, tiles.block_k
    if isinstance(weight, Float8Weight):
        width = width if width < columns else 0
        if width and (width < _MIN_WIDTH or width & (width - 1)):
            raise ValueError(f"blocks have {width} columns; the number must be a power of two from {_MIN_WIDTH} on")
        block_k = min(block_k, width) if width else block_k
    else:
        half, block_k = weight.half, 2 * weight.half
        divides = block_k if isinstance(weight, Int4Weight) else half
        if half < _MIN_WIDTH or half & (half - 1) or columns % block_k or width % divides:
            raise ValueError(
                f"tiles of 2 * {half} columns do not divide blocks of {width} columns in rows of {columns} columns"
            )
    return {
        "KIND": weight.kind, "WIDTH": width, "HALF": half, "EVEN": columns % block_k == 0, "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n, "BLOCK_K": block_k, "PRECISION": "ieee",
        "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def quantized_tiles(
    x, numbers, zeros, scales, bias, out, rows, out_features, in_features, scale,
    KIND: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``out`` for a linear layer."""
    begin = tl.program_id(1) * BLOCK_M
    m, n, n_read, x_rows = places(x, begin, rows, tl.program_id(0), out_features, in_features, BLOCK_M, BLOCK_N)
    total = _sums(
        x_rows, numbers, zeros, scales, n_read, out_features, in_features,
        KIND, WIDTH, HALF, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    store(total, bias, scale, n_read, out, m, rows, n, out_features)


@triton.jit
def quantized_experts(
    x, numbers, zeros, scales, bias, ends, order, out, experts, out_features, in_features, blocks, alpha, limit,
    KIND: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    TOP_K: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``out`` with rows of one expert, if the program's tile exists."""
    there, expert, begin, end = find_rows(ends, experts, tl.program_id(0), BLOCK_M, EXPERTS)
    if there:
        nth = tl.program_id(1)
        m, n_read, x_rows = expert_places(
            x, order, begin, end, nth, out_features, in_features, TOP_K, GATE, BLOCK_M, BLOCK_N
        )
        row_bytes = in_features if KIND == "float8" else in_features // 2
        numbers += expert.to(tl.int64) * out_features * row_bytes
        scales += expert.to(tl.int64) * blocks * out_features
        if zeros is not None:
            zeros += expert.to(tl.int64) * blocks * out_features
        if bias is not None:
            bias += expert * out_features
        total = _sums(
            x_rows, numbers, zeros, scales, n_read, out_features, in_features,
            KIND, WIDTH, HALF, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
        )  # fmt: skip
        store_rows(
            total, bias, n_read, alpha, limit, out, order, m, end, nth, out_features, TOP_K, GATE, BLOCK_M, BLOCK_N
        )


@triton.jit
def _sums(
    x_rows, numbers, zeros, scales, n_read, out_features, in_features,
    KIND: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a tile of products: the rows at the addresses ``x_rows`` times the rows ``n_read`` of a weight.

    ``WIDTH`` is the number of columns that share a scale, or 0 if all columns share a scale. ``EVEN`` is true if the
    last tile of columns is full.
    """
    if KIND == "float8":
        total = _float8_sums(
            x_rows,
            numbers,
            scales,
            n_read,
            out_features,
            in_features,
            WIDTH,
            EVEN,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            PRECISION,
        )
    elif KIND == "int4":
        total = _int4_sums(
            x_rows, numbers, zeros, scales, n_read, out_features, in_features, WIDTH, HALF, BLOCK_M, BLOCK_N, PRECISION
        )
    else:
        total = _mxfp4_sums(
            x_rows, numbers, scales, n_read, out_features, in_features, HALF, BLOCK_M, BLOCK_N, PRECISION
        )
    return total


@triton.jit
def _float8_sums(
    x_rows, numbers, scales, n_read, out_features, in_features,
    WIDTH: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, BLOCK_K)
    x_tile = x_rows[:, None] + k[None, :]
    number_tile = numbers + n_read[:, None].to(tl.int64) * in_features + k[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, in_features, BLOCK_K):
        if EVEN:
            left = tl.load(x_tile + start)
            right = tl.load(number_tile + start)
        else:
            inside = (start + k < in_features)[None, :]
            left = tl.load(x_tile + start, mask=inside, other=0.0)
            behind = tl.minimum(start + k, in_features - 1) - k
            right = tl.load(number_tile + behind[None, :])
        right = tl.trans(right.to(left.dtype))
        if WIDTH > 0:
            factor = tl.load(scales + (start // WIDTH) * out_features + n_read)
            total += tl.dot(left, right, input_precision=PRECISION) * factor[None, :]
        else:
            total = tl.dot(left, right, total, input_precision=PRECISION)
    if WIDTH == 0:
        total *= tl.load(scales + n_read)[None, :]
    return total


@triton.jit
def _int4_sums(
    x_rows, numbers, zeros, scales, n_read, out_features, in_features,
    WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, HALF)
    x_tile = x_rows[:, None] + k[None, :]
    number_tile = numbers + n_read[:, None].to(tl.int64) * (in_features // 2) + k[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, in_features, 2 * HALF):
        first = tl.load(x_tile + start)
        second = tl.load(x_tile + start + HALF)
        both = tl.load(number_tile + start // 2)
        place = (start // WIDTH) * out_features + n_read
        zero = tl.load(zeros + place).to(first.dtype)[:, None]
        lower = tl.trans((both & 15).to(first.dtype) - zero)
        upper = tl.trans((both >> 4).to(first.dtype) - zero)
        part = tl.dot(first, lower, input_precision=PRECISION)
        part = tl.dot(second, upper, part, input_precision=PRECISION)
        total += part * tl.load(scales + place).to(tl.float32)[None, :]
    return total


# Products with MXFP4 weights: 4-bit floats with one power of two per 32 elements. The kernel dequantizes a tile when it
# reads the tile, with the same rounding as weights that are dequantized when the model is loaded.


@triton.jit
def e2m1(codes):
    """Decode the lower 4 bits of uint8 ``codes`` to float32: one sign bit, two exponent bits, one mantissa bit."""
    magnitudes = (codes & 7).to(tl.int32)
    normal = ((magnitudes << 22) + 0x3F000000).to(tl.float32, bitcast=True)  # exponent bits 0 mean 2 ** -1
    values = tl.where(magnitudes > 1, normal, magnitudes.to(tl.float32) * 0.5)
    return tl.where((codes & 8) != 0, -values, values)


@triton.jit
def _mxfp4_sums(
    x_rows, numbers, exponents, n_read, out_features, in_features,
    HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, HALF)
    x_tile = x_rows[:, None] + k[None, :]
    number_tile = numbers + n_read[:, None].to(tl.int64) * (in_features // 2) + k[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, in_features, 2 * HALF):
        first = tl.load(x_tile + start)
        second = tl.load(x_tile + start + HALF)
        both = tl.load(number_tile + start // 2)
        place = exponents + (start // 32) * out_features + n_read
        lower_scale = _power(tl.load(place))
        upper_scale = _power(tl.load(place + (HALF // 32) * out_features))
        lower = (e2m1(both) * lower_scale[:, None]).to(first.dtype)
        upper = (e2m1(both >> 4) * upper_scale[:, None]).to(first.dtype)
        total = tl.dot(first, tl.trans(lower), total, input_precision=PRECISION)
        total = tl.dot(second, tl.trans(upper), total, input_precision=PRECISION)
    return total


@triton.jit
def _power(exponent):
    """Return ``2 ** (exponent - 127)`` as float32, for uint8 ``exponent``. An exponent of 0 gives 0, because GPUs flush
    subnormal float32 values to zero.
    """
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)

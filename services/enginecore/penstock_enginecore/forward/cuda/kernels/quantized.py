"""Products with quantized weights of linear layers and experts: 8-bit floats, 4-bit integers and MXFP4.

Kernels convert the weights to the dtype of the activations, which represents each quantized value exactly, and multiply
the sums by the scales. Activations are not quantized, because in steps with few rows most of the time is spent on
reading weights. Tensor cores take the converted weights from registers, so the output features are the rows of their
instructions, and the rows of ``x`` are the columns.
"""

from typing import Any, TypeVar

import msgspec
import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernel_api import (
    Activation,
    ClampedGate,
    Float8Weight,
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
from penstock_enginecore.forward.cuda.kernels.conversions import beside_int4, beside_mxfp4, element
from penstock_enginecore.forward.cuda.kernels.dependent_launch import pdl_options, wait_for_inputs
from penstock_enginecore.forward.cuda.kernels.grouped import (
    Groups,
    expert_places,
    find_rows,
    store_rows,
)
from penstock_enginecore.forward.cuda.kernels.invariant import places, store

_BITS = {"float8": 8, "int4": 4}
_COUNT = {"float8": 2, "int4": 4, "mxfp4": 4}
"""Number of elements in a word."""
_MIN_PART = 16
_PROGRAMS = 264
"""Number of programs that a product of few rows should have: two for each multiprocessor of an H200."""
_MOST_SLICES = 8
_FEWEST_TILES = 4
"""Smallest number of tiles of columns in a slice. A slice with fewer tiles would end before its loads overlap."""
_MERGED = 1024
_DENSE_ROWS = 32
_NARROW, _NARROW_WARPS = 64, 4
_Tiles = TypeVar("_Tiles", Product, ExpertTiles)


def quantized_product(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
    *,
    invariant: bool = False,
    pdl: bool = False,
) -> None:
    """Multiply ``x`` by ``weight``, add ``bias`` if given, multiply by ``scale``, and write the result to ``out``. Sums
    are float32. Each sum adds one block of columns after another.

    Products of few rows split the columns into slices, which other programs compute. The number of slices depends only
    on the shape of the weight, and the slices are added in order.

    Args:
        x: ``[rows, in_features]``. All tensors are contiguous.
        weight: The quantized weight.
        bias: ``[out_features]``, or None.
        scale: Factor of the result.
        out: ``[rows, out_features]``.
        invariant: Whether sums must have the same order for any number of rows.
        pdl: Whether to launch kernels before the previous kernel has ended; see ``dependent_launch.py``.

    Raises:
        ValueError: Shapes or strides are not supported, or the number of columns of a part does not divide the number
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
    tiles = narrowed(product_tiles(rows, _BITS[weight.kind], device_name(x.device), invariant=invariant), weight)
    constants = _constants(weight, tiles, x.dtype)
    if not rows:
        return
    slices = 1 if invariant else slices_of(weight, tiles)
    grid = triton.cdiv(out_features, tiles.block_n), triton.cdiv(rows, tiles.block_m), slices
    parts = x.new_empty(slices, rows, out_features, dtype=torch.float32) if slices > 1 else None
    quantized_tiles[grid](
        x, weight.numbers, *_zeros_and_scales(weight), bias, out, parts, rows, out_features, in_features, scale,
        SLICES=slices, **constants, **pdl_options(pdl=pdl),
    )  # fmt: skip
    if parts is not None:
        merged = rows, triton.cdiv(out_features, _MERGED)
        merge_slices[merged](
            parts, bias, out, rows, out_features, scale, SLICES=slices, BLOCK=_MERGED, **pdl_options(pdl=pdl)
        )


def narrowed(tiles: _Tiles, weight: StackedWeight) -> _Tiles:
    """Return smaller tiles if a tile of columns has several scales, and there are many rows. Then a program keeps two
    sums per output, which need twice as many registers.
    """
    tile = _COUNT[weight.kind] * weight.part
    one_scale = weight.kind == "mxfp4" or weight.width >= weight.in_features or weight.width % tile == 0
    if one_scale or tiles.block_m <= _MIN_PART:
        return tiles
    return msgspec.structs.replace(tiles, block_m=_NARROW, block_n=_NARROW, warps=_NARROW_WARPS)


def slices_of(weight: QuantizedWeight, tiles: Product) -> int:
    """Return the number of slices into which a product splits the columns of ``weight``. Only products of up to one
    tile of 16 rows split columns, because larger products have enough programs or reuse their weights.
    """
    if tiles.block_m > _MIN_PART:
        return 1
    columns = int(triton.cdiv(weight.in_features, _COUNT[weight.kind] * weight.part))
    programs = int(triton.cdiv(weight.numbers.shape[0], tiles.block_n))
    return max(1, min(_MOST_SLICES, _PROGRAMS // programs, columns // _FEWEST_TILES))


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
        ValueError: Shapes or strides are not supported, or the number of columns of a part does not divide the number
            of columns of a block.
    """
    groups = Groups(x, bias, ends, out, order, top_k, activation)
    in_features, (experts, out_features) = weight.in_features, weight.numbers.shape[:2]
    groups.check(weight.tensors, experts, out_features, in_features)
    blocks = triton.cdiv(in_features, weight.width)
    for part in weight.tensors[1:]:
        if part.shape != (experts, blocks, out_features):
            raise ValueError(
                f"scales or zeros have shape {list(part.shape)}, for {blocks} blocks of {experts} times {out_features} rows"
            )
    rows = len(out)
    tiles = narrowed(expert_tiles(rows // experts, weight.kind, device_name(x.device), invariant=invariant), weight)
    constants = _constants(weight, tiles, x.dtype)
    if not rows:
        return
    quantized_experts[groups.grid(tiles, out_features)](
        x, weight.numbers, *_zeros_and_scales(weight), bias, ends, order, out, experts, out_features, in_features,
        blocks, *groups.gate, **groups.constants(), **constants,
    )  # fmt: skip


def dequantize(weight: QuantizedWeight, out: torch.Tensor) -> None:
    """Write the dequantized weight to ``out`` ``[out_features, in_features]``, computed in float32 and rounded once.

    Raises:
        ValueError: ``out`` has another shape or is not contiguous, or the weight's layout is not supported.
    """
    out_features = weight.numbers.shape[0]
    if out.shape != (out_features, weight.in_features) or not out.is_contiguous():
        raise ValueError(
            f"an output of shape {list(out.shape)} does not fit a weight of {out_features} rows of {weight.in_features} "
            "columns, or is not contiguous"
        )
    constants = _layout(weight) | {"PACKED": _packed(weight.kind, out.dtype), "BLOCK_N": _DENSE_ROWS}
    tiles = triton.cdiv(weight.in_features, _COUNT[weight.kind] * weight.part)
    grid = triton.cdiv(out_features, _DENSE_ROWS), tiles
    dense_tiles[grid](
        weight.numbers, *_zeros_and_scales(weight), out, out_features, weight.in_features, **constants, num_warps=4
    )


def _zeros_and_scales(weight: StackedWeight) -> tuple[torch.Tensor | None, torch.Tensor]:
    *zeros, scales = weight.tensors[1:]
    return (zeros[0] if zeros else None), scales


def _constants(weight: StackedWeight, tiles: Product | ExpertTiles, dtype: torch.dtype) -> dict[str, Any]:
    """Return the compile-time constants of a product. Raises the errors of ``_layout``."""
    return _layout(weight) | {
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "PRECISION": "ieee",
        "PACKED": _packed(weight.kind, dtype), "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip


def _layout(weight: StackedWeight) -> dict[str, Any]:
    """Return the compile-time constants of a weight's layout. Raises ValueError if the number of columns of a part does
    not divide the number of columns of a scale block, or if the words of a row do not fit the number of columns.
    """
    columns, width, part = weight.in_features, weight.width, weight.part
    if isinstance(weight, Float8Weight):
        width = width if width < columns else 0
    tile = _COUNT[weight.kind] * part
    words = weight.numbers.shape[-1]
    if part < _MIN_PART or part & (part - 1) or width % part or words != triton.cdiv(columns, tile) * part:
        raise ValueError(
            f"parts of {part} columns do not divide blocks of {width or columns} columns, or {words} words are not a "
            f"row of {columns} columns"
        )
    return {"KIND": weight.kind, "WIDTH": width, "PART": part, "EVEN": columns % tile == 0}


def _packed(kind: str, dtype: torch.dtype) -> bool:
    """Return whether PTX instructions convert the weight. Triton's interpreter cannot run them. A scale of MXFP4 can be
    outside the range of float16.
    """
    if triton.knobs.runtime.interpret:
        return False
    return dtype == torch.bfloat16 or (dtype == torch.float16 and kind != "mxfp4")


@triton.jit(do_not_specialize=["rows"])
def quantized_tiles(
    x, numbers, zeros, scales, bias, out, parts, rows, out_features, in_features, scale,
    KIND: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, SLICES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``out`` for a linear layer, or one slice of the sums of a tile."""
    wait_for_inputs(PDL)
    begin = tl.program_id(1) * BLOCK_M
    m, n, n_read, x_rows = places(x, begin, rows, tl.program_id(0), out_features, in_features, BLOCK_M, BLOCK_N)
    TILE: tl.constexpr = PART * (2 if KIND == "float8" else 4)
    tiles = tl.cdiv(in_features, TILE)
    if SLICES == 1:
        total = _sums(
            x_rows, numbers, zeros, scales, n_read, out_features, in_features, 0, tiles,
            KIND, WIDTH, PART, EVEN, BLOCK_M, BLOCK_N, PRECISION, PACKED,
        )  # fmt: skip
        store(total, bias, scale, n_read, out, m, rows, n, out_features)
    else:
        nth = tl.program_id(2)
        total = _sums(
            x_rows, numbers, zeros, scales, n_read, out_features, in_features, nth * tiles // SLICES,
            (nth + 1) * tiles // SLICES,
            KIND, WIDTH, PART, EVEN, BLOCK_M, BLOCK_N, PRECISION, PACKED,
        )  # fmt: skip
        own = parts + nth.to(tl.int64) * rows * out_features
        store(total, None, 1.0, n_read, own, m, rows, n, out_features)


@triton.jit(do_not_specialize=["rows"])
def merge_slices(
    parts, bias, out, rows, out_features, scale, SLICES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Add the slices ``parts`` of the sums, float32 ``[SLICES, rows, out_features]``, in order, for part of a row."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < out_features
    total = tl.zeros((BLOCK,), tl.float32)
    for nth in tl.static_range(SLICES):
        total += tl.load(parts + (nth * rows + row) * out_features + n, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_features + n, (total * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def dense_tiles(
    numbers, zeros, scales, out, out_features, in_features,
    KIND: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Dequantize one tile of columns of ``BLOCK_N`` rows of an 8-bit float or int4 weight."""
    COUNT: tl.constexpr = 2 if KIND == "float8" else 4
    DTYPE: tl.constexpr = out.dtype.element_ty
    tile = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_read = tl.minimum(n, out_features - 1)
    k = tl.arange(0, PART)
    row_words = tl.cdiv(in_features, COUNT * PART) * PART
    words = tl.load(numbers + n_read[:, None].to(tl.int64) * row_words + tile * PART + k[None, :])
    for part in tl.static_range(COUNT):
        column = (tile * COUNT + part) * PART
        beside = None
        if KIND == "int4":
            own = _row(zeros, column, n_read, out_features, in_features, WIDTH, EVEN)
            beside = beside_int4(own, PACKED, DTYPE)[:, None]
        values = element(words, beside, KIND, part, PACKED, DTYPE).to(tl.float32)
        factor = _row(scales, column, n_read, out_features, in_features, WIDTH, EVEN)
        values *= factor.to(tl.float32)[:, None]
        inside = (n < out_features)[:, None] & (column + k < in_features)[None, :]
        tl.store(out + n[:, None].to(tl.int64) * in_features + column + k[None, :], values.to(DTYPE), mask=inside)


@triton.jit
def quantized_experts(
    x, numbers, zeros, scales, bias, ends, order, out, experts, out_features, in_features, blocks, alpha, limit,
    KIND: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr,
    TOP_K: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``out`` with rows of one expert, if the program's tile exists."""
    there, expert, begin, end = find_rows(ends, experts, tl.program_id(0), BLOCK_M, EXPERTS)
    if there:
        nth = tl.program_id(1)
        m, n_read, x_rows = expert_places(
            x, order, begin, end, nth, out_features, in_features, TOP_K, GATE, BLOCK_M, BLOCK_N
        )
        TILE: tl.constexpr = PART * (2 if KIND == "float8" else 4)
        numbers += expert.to(tl.int64) * out_features * (tl.cdiv(in_features, TILE) * PART)
        scales += expert.to(tl.int64) * blocks * out_features
        if zeros is not None:
            zeros += expert.to(tl.int64) * blocks * out_features
        if bias is not None:
            bias += expert * out_features
        total = _sums(
            x_rows, numbers, zeros, scales, n_read, out_features, in_features, 0, tl.cdiv(in_features, TILE),
            KIND, WIDTH, PART, EVEN, BLOCK_M, BLOCK_N, PRECISION, PACKED,
        )  # fmt: skip
        store_rows(
            total, bias, n_read, alpha, limit, out, order, m, end, nth, out_features, TOP_K, GATE, BLOCK_M, BLOCK_N
        )


@triton.jit
def _sums(
    x_rows, numbers, zeros, scales, n_read, out_features, in_features, first, last,
    KIND: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Return a tile of products: the rows at the addresses ``x_rows`` times the rows ``n_read`` of a weight, for the
    tiles of columns from ``first`` to ``last``.

    ``WIDTH`` is the number of columns that share a scale, or 0 if all columns share a scale. ``EVEN`` is true if the
    last tile of columns is full.
    """
    COUNT: tl.constexpr = 2 if KIND == "float8" else 4
    TILE: tl.constexpr = COUNT * PART
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    ONE_SCALE: tl.constexpr = WIDTH % TILE == 0
    """Whether all columns of a tile share a scale."""
    k = tl.arange(0, PART)
    x_tile = x_rows[None, :] + k[:, None]
    word_tile = numbers + n_read[:, None].to(tl.int64) * (tl.cdiv(in_features, TILE) * PART) + k[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    factor = _row(scales, first * TILE, n_read, out_features, in_features, WIDTH, EVEN)
    for tile in range(first, last):
        words = tl.load(word_tile + tile * PART)
        of_tile = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        beside = None
        for part in tl.static_range(COUNT):
            column = tile * TILE + part * PART
            if EVEN:
                right = tl.load(x_tile + column)
            else:
                right = tl.load(x_tile + column, mask=(column + k < in_features)[:, None], other=0.0)
            if KIND == "int4" and (part == 0 or not ONE_SCALE):
                own = _row(zeros, column, n_read, out_features, in_features, WIDTH, EVEN)
                beside = beside_int4(own, PACKED, DTYPE)[:, None]
            elif KIND == "mxfp4":
                own = _row(scales, column, n_read, out_features, in_features, WIDTH, EVEN)
                beside = beside_mxfp4(own, PACKED)[:, None]
            left = element(words, beside, KIND, part, PACKED, DTYPE)
            if KIND == "mxfp4" or ONE_SCALE:
                of_tile = tl.dot(left, right, of_tile, input_precision=PRECISION)
            else:
                own = _row(scales, column, n_read, out_features, in_features, WIDTH, EVEN)
                total += tl.dot(left, right, input_precision=PRECISION) * own.to(tl.float32)[:, None]
        if KIND == "mxfp4" or WIDTH == 0:
            total += of_tile
        elif ONE_SCALE:
            total += of_tile * factor.to(tl.float32)[:, None]
            # The next tile's scales are loaded while its weights are converted.
            following = tl.minimum(tile + 1, last - 1) * TILE
            factor = _row(scales, following, n_read, out_features, in_features, WIDTH, EVEN)
    if WIDTH == 0:
        total *= tl.load(scales + n_read).to(tl.float32)[:, None]
    return tl.trans(total)


@triton.jit
def _row(table, column, n_read, out_features, in_features, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Load the elements ``n_read`` of the row of ``table`` ``[blocks, out_features]`` for the block of columns with
    ``column``. Columns behind the last column are in the last block.
    """
    if WIDTH > 0:
        block = column // WIDTH
        if not EVEN:
            block = tl.minimum(block, (in_features - 1) // WIDTH)
        table += block * out_features
    return tl.load(table + n_read)

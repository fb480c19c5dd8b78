"""Products with quantized weights, in the shapes of a model with 8 billion parameters."""

from collections.abc import Iterator
from typing import Any

import torch

from penstock_enginecore.forward.cuda.kernel_api import Int4Weight
from penstock_enginecore.forward.cuda.kernels.configurations import ExpertTiles, Product, load_tuned
from penstock_enginecore.forward.cuda.kernels.quantized import narrowed, quantized_tiles
from tests.compiled.kernel import SM_80, SM_90, Kernel

MOST = {"float8": 2.6, "int4": 3.7, "mxfp4": 3.8}
"""Largest number of instructions per element of a weight in the inner loop of products of up to 16 rows.

A multiprocessor of an H200 starts 128 instructions of a thread per clock, and reads about 18 bytes of weights per clock.
"""
FEW = 16
_ARGUMENTS: dict[str, str | None] = {
    "x": "*bf16", "zeros": "*u8", "bias": None, "out": "*bf16", "parts": "*fp32",
    "rows": "i32", "out_features": "i32", "in_features": "i32", "scale": "fp32",
}  # fmt: skip
_ALIGNED = frozenset({"x", "numbers", "zeros", "scales", "out", "parts", "out_features", "in_features"})


def kernels() -> Iterator[Kernel]:
    """Yield kernels for fp8 with scales per row and per block of 128 columns, and for int4 with groups of 32 and 128.
    Kernels of few rows are also compiled for compute capability 8.0.
    """
    for tiles in load_tuned().products:
        for capability in (SM_90, SM_80) if tiles.rows == FEW else (SM_90,):
            if tiles.bits == 8:
                yield from (float8(tiles, width, capability) for width in (0, 128))
            else:
                yield from (int4(tiles, width, capability) for width in (32, 128))


def gate() -> Iterator[Kernel]:
    """Yield the kernels of most checkpoints."""
    return (kernel for kernel in kernels() if kernel.constants["WIDTH"] == 128 and kernel.constants["BLOCK_M"] <= 64)


def float8(tiles: Product, width: int, capability: int = SM_90) -> Kernel:
    """Return the fp8 kernel with scales by blocks of ``width`` columns, or by row if ``width`` is 0."""
    types: dict[str, str | None] = {"zeros": None, "scales": "*fp32"}
    by = f"{width} columns" if width else "row"
    constants = {"KIND": "float8", "WIDTH": width, "PART": 64}
    return _kernel(f"fp8 product, {tiles.rows} rows, by {by}", tiles, types, constants, capability)


def int4(tiles: Product, width: int, capability: int = SM_90) -> Kernel:
    """Return the int4 kernel with scales by groups of ``width`` columns."""
    constants = {"KIND": "int4", "WIDTH": width, "PART": 32}
    tiles = narrowed(tiles, int4_weight(width))
    name = f"int4 product, {tiles.rows} rows, by {width} columns"
    return _kernel(name, tiles, {"scales": "*fp16"}, constants, capability)


def int4_weight(width: int) -> Int4Weight:
    """Return a weight of 4096 columns without elements, with groups of ``width`` columns."""
    empty = torch.empty(0, device="meta")
    return Int4Weight(empty, empty, empty, width, 32, 4096)


def counted(tiles: Product | ExpertTiles, constants: dict[str, Any], capability: int) -> dict[str, Any]:
    """Return the fields of a ``Kernel`` for the count of instructions per element."""
    kind, part = constants["KIND"], constants["PART"]
    elements = tiles.block_n * part * (2 if kind == "float8" else 4) // (32 * tiles.warps)
    few = tiles.block_m == FEW
    # An instruction of compute capability 9.0 multiplies 8 elements of a thread by all rows, of 8.0 by 8 rows.
    matrix = elements // 8 * (1 if capability == SM_90 else tiles.block_m // 8)
    return {"elements": elements, "matrix": matrix, "most": MOST[kind] if few else 0.0}


def must_have(tiles: Product | ExpertTiles, capability: int) -> tuple[str, ...]:
    """Return the PTX instructions that a product needs: asynchronous copies, and tensor cores for all rows of a tile."""
    if capability == SM_80:
        return "cp.async", "mma.sync.aligned.m16n8k16"
    return "cp.async", f"wgmma.mma_async.sync.aligned.m64n{tiles.block_m}k16"


def _kernel(
    name: str, tiles: Product, types: dict[str, str | None], constants: dict[str, Any], capability: int
) -> Kernel:
    shape = {
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "EVEN": True, "PRECISION": "ieee", "PACKED": True,
        "SLICES": 4 if tiles.block_m == FEW else 1,
    }  # fmt: skip
    return Kernel(
        name if capability == SM_90 else f"{name}, capability {capability}",
        quantized_tiles,
        {**_ARGUMENTS, "numbers": "*i16", **types},
        {**shape, **constants},
        _ALIGNED,
        tiles.warps,
        tiles.stages,
        must_have(tiles, capability),
        capability=capability,
        **counted(tiles, constants, capability),
    )

"""Products with quantized weights, as a model of 8 billion parameters has them."""

from collections.abc import Iterator
from typing import Any

from penstock_enginecore.forward.cuda.kernels.configurations import Product, load_tuned
from penstock_enginecore.forward.cuda.kernels.quantized import float8_tiles, int4_tiles
from tests.compiled.kernel import Kernel

_ARGUMENTS: dict[str, str | None] = {
    "x": "*bf16", "zeros": "*u8", "bias": None, "out": "*bf16",
    "rows": "i32", "out_features": "i32", "in_features": "i32", "scale": "fp32",
}  # fmt: skip
_ALIGNED = frozenset({"x", "numbers", "zeros", "scales", "out", "out_features", "in_features"})


def kernels() -> Iterator[Kernel]:
    """8-bit floats with scales by row and by blocks of 128 columns, and 4 bits by groups of 32 and of 128."""
    for tiles in load_tuned().products:
        if tiles.bits == 8:
            yield from (float8(tiles, width) for width in (0, 128))
        else:
            yield from (int4(tiles, width) for width in (32, 128))


def gate() -> Iterator[Kernel]:
    """Those of most checkpoints."""
    return (kernel for kernel in kernels() if kernel.constants["WIDTH"] == 128)


def float8(tiles: Product, width: int) -> Kernel:
    """By blocks of ``width`` columns, 0 for rows."""
    arguments = {**_ARGUMENTS, "numbers": "*fp8e4nv", "scales": "*fp32"}
    constants = {"WIDTH": width, "EVEN": True, "BLOCK_K": tiles.block_k}
    by = f"{width} columns" if width else "row"
    return _kernel(f"fp8 product, {tiles.rows} rows, by {by}", float8_tiles, tiles, arguments, constants)


def int4(tiles: Product, width: int) -> Kernel:
    """By groups of ``width`` columns."""
    arguments = {**_ARGUMENTS, "numbers": "*u8", "scales": "*fp16"}
    constants = {"WIDTH": width, "HALF": width // 2}
    return _kernel(f"int4 product, {tiles.rows} rows, by {width} columns", int4_tiles, tiles, arguments, constants)


def _kernel(
    name: str, function: Any, tiles: Product, arguments: dict[str, str | None], constants: dict[str, Any]
) -> Kernel:
    shape = {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "PRECISION": "ieee"}
    must_have = ("cp.async",) if tiles.block_m < 64 else ("cp.async", "wgmma.mma_async")
    return Kernel(name, function, arguments, {**shape, **constants}, _ALIGNED, tiles.warps, tiles.stages, must_have)

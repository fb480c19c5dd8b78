"""Products with quantized weights, in the shapes of a model with 8 billion parameters."""

from collections.abc import Iterator
from typing import Any

from penstock_enginecore.forward.cuda.kernels.configurations import Product, load_tuned
from penstock_enginecore.forward.cuda.kernels.quantized import quantized_tiles
from tests.compiled.kernel import Kernel

_ARGUMENTS: dict[str, str | None] = {
    "x": "*bf16", "zeros": "*u8", "bias": None, "out": "*bf16",
    "rows": "i32", "out_features": "i32", "in_features": "i32", "scale": "fp32",
}  # fmt: skip
_ALIGNED = frozenset({"x", "numbers", "zeros", "scales", "out", "out_features", "in_features"})


def kernels() -> Iterator[Kernel]:
    """Yield kernels for fp8 with scales per row and per block of 128 columns, and for int4 with groups of 32 and 128."""
    for tiles in load_tuned().products:
        if tiles.bits == 8:
            yield from (float8(tiles, width) for width in (0, 128))
        else:
            yield from (int4(tiles, width) for width in (32, 128))


def gate() -> Iterator[Kernel]:
    """Yield the kernels of most checkpoints."""
    return (kernel for kernel in kernels() if kernel.constants["WIDTH"] == 128)


def float8(tiles: Product, width: int) -> Kernel:
    """Return the fp8 kernel with scales by blocks of ``width`` columns, or by row if ``width`` is 0."""
    arguments = {**_ARGUMENTS, "zeros": None, "numbers": "*fp8e4nv", "scales": "*fp32"}
    constants = {"KIND": "float8", "WIDTH": width, "HALF": 0, "BLOCK_K": tiles.block_k}
    by = f"{width} columns" if width else "row"
    return _kernel(f"fp8 product, {tiles.rows} rows, by {by}", tiles, arguments, constants)


def int4(tiles: Product, width: int) -> Kernel:
    """Return the int4 kernel with scales by groups of ``width`` columns."""
    arguments = {**_ARGUMENTS, "numbers": "*u8", "scales": "*fp16"}
    constants = {"KIND": "int4", "WIDTH": width, "HALF": width // 2, "BLOCK_K": width}
    return _kernel(f"int4 product, {tiles.rows} rows, by {width} columns", tiles, arguments, constants)


def _kernel(name: str, tiles: Product, arguments: dict[str, str | None], constants: dict[str, Any]) -> Kernel:
    shape = {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "EVEN": True, "PRECISION": "ieee"}
    must_have = ("cp.async",) if tiles.block_m < 64 else ("cp.async", "wgmma.mma_async")
    return Kernel(
        name, quantized_tiles, arguments, {**shape, **constants}, _ALIGNED, tiles.warps, tiles.stages, must_have
    )

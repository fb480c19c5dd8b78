"""Products with quantized weights, as a model of 8 billion parameters has them."""

from collections.abc import Iterator

from penstock_enginecore.forward.cuda.kernels.configurations import Product, load_tuned
from penstock_enginecore.forward.cuda.kernels.float8 import float8_tiles
from tests.compiled.kernel import Kernel

_ARGUMENTS: dict[str, str | None] = {
    "x": "*bf16", "numbers": "*fp8e4nv", "scales": "*fp32", "bias": None, "out": "*bf16",
    "rows": "i32", "out_features": "i32", "in_features": "i32", "scale": "fp32",
}  # fmt: skip
_ALIGNED = frozenset({"x", "numbers", "scales", "out", "out_features", "in_features"})


def kernels() -> Iterator[Kernel]:
    """Scales by row, and by blocks of 128 columns."""
    for tiles in load_tuned().products:
        for width in (0, 128):
            yield _float8(tiles, width)


def gate() -> Iterator[Kernel]:
    """Those of fine-grained checkpoints."""
    return (kernel for kernel in kernels() if kernel.constants["WIDTH"])


def _float8(tiles: Product, width: int) -> Kernel:
    constants = {
        "WIDTH": width, "EVEN": True, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k,
        "PRECISION": "ieee",
    }  # fmt: skip
    must_have = ("cp.async",) if tiles.block_m < 64 else ("cp.async", "wgmma.mma_async")
    by = f"by {width} columns" if width else "by row"
    name = f"fp8 product, {tiles.rows} rows, {by}"
    return Kernel(name, float8_tiles, _ARGUMENTS, constants, _ALIGNED, tiles.warps, tiles.stages, must_have)

"""Batch-invariant products, in the shapes of a model with 8 billion parameters and of a model with 128 experts."""

from collections.abc import Iterator
from dataclasses import replace

from penstock_enginecore.forward.cuda.kernels.configurations import InvariantTiles, invariant_tiles, product_tiles
from penstock_enginecore.forward.cuda.kernels.grouped import grouped_tiles
from penstock_enginecore.forward.cuda.kernels.invariant import product_tiles as product_kernel
from tests.compiled import experts, products
from tests.compiled.kernel import Kernel

ROWS = (64, 512)
"""Rows of steps for which a program computes 64 rows and 128 rows."""
FEATURES = (4096, 28_672)
_ARGUMENTS: dict[str, str | None] = {
    "x": "*bf16", "weight": "*bf16", "bias": None, "out": "*bf16", "rows": "i32", "out_features": "i32",
    "in_features": "i32", "scale": "fp32",
}  # fmt: skip
_ALIGNED = frozenset({"x", "weight", "out", "out_features", "in_features"})


def kernels() -> Iterator[Kernel]:
    """Yield kernels for dense and grouped products, also with quantized weights.

    The sizes of weights are on both sides of the limit between two tile sizes.
    """
    for features in FEATURES:
        for rows in ROWS:
            tiles = invariant_tiles(rows, features, 2)
            for transposed in (None, False, True):
                yield _product(tiles, features, rows, transposed=transposed)
    of_8, of_4 = (product_tiles(1, bits, invariant=True) for bits in (8, 4))
    quantized = [products.float8(of_8, width) for width in (0, 128)]
    for kernel in (*quantized, *(products.int4(of_4, width) for width in (32, 128))):
        yield replace(kernel, name=f"invariant {kernel.name}".replace(f"{of_8.rows} rows", "any rows"))


def gate() -> Iterator[Kernel]:
    """Yield the kernels of dense products."""
    return (kernel for kernel in kernels() if kernel.function is product_kernel)


def _product(tiles: InvariantTiles, features: int, rows: int, *, transposed: bool | None) -> Kernel:
    shape = {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "EVEN": True,
        "PRECISION": "tf32",
    }
    common = tiles.warps, tiles.stages, ("cp.async", _instruction(tiles.block_n))
    name = f"{rows} rows, {features} features"
    if transposed is None:
        return Kernel(f"invariant product, {name}", product_kernel, _ARGUMENTS, shape, _ALIGNED, *common)
    shape |= {"EXPERTS": 128, "TRANSPOSED": transposed, "TOP_K": 0, "GATE": "", "SHARED_EVEN": True}
    types = {**experts.ARGUMENTS, "weight": "*bf16"}
    kind = "transposed experts" if transposed else "experts"
    return Kernel(f"invariant {kind}, {name}", grouped_tiles, types, shape, experts.ALIGNED, *common)


def _instruction(block_n: int) -> str:
    """Return the instruction of tiles with any number of rows."""
    return f"wgmma.mma_async.sync.aligned.m64n{block_n}k16"

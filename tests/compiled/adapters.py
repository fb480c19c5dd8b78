"""LoRA kernels of matrix products, in the shapes of a model of 8 billion parameters."""

from collections.abc import Iterator

from penstock_enginecore.lora.device_slots import PIECE, ROW_ALIGNED, TILE_ROWS, ProductShape
from penstock_enginecore.lora.triton import COLUMNS, RANKS, STAGES, WARPS, expand_tiles, shrink_tiles
from tests.compiled.kernel import Kernel

SHAPES = {
    "qkv": ProductShape(4096, (4096, 1024, 1024)),
    "gate and up": ProductShape(4096, (14_336, 14_336)),
    "down": ProductShape(14_336, (4096,)),
}
_ARGUMENTS: dict[str, str | None] = {
    "table": "*i64", "slots": "*i32", "tile_rows": "*i32", "pieces": "*i32", "h": "*fp32",
    "in_features": "i32", "chunk": "i32", "x_stride": "i32", "out_stride": "i32", "slot_stride": "i64",
    "table_stride": "i32", "most_ranks": "i32", "scale": "fp32",
}  # fmt: skip
_ALIGNED = frozenset({
    "x", "numbers", "table", "slots", "tile_rows", "pieces", "h", "out", "in_features", "chunk", "x_stride", "out_stride",
    "slot_stride", "most_ranks",
})  # fmt: skip


def kernels() -> Iterator[Kernel]:
    """Yield both kernels for the products of a layer, in the dtypes of models."""
    for dtype in ("bf16", "fp16", "fp32"):
        for name, shape in SHAPES.items():
            yield from _both(name, shape, dtype)


def gate() -> Iterator[Kernel]:
    """Yield the kernels of one product."""
    return _both("down", SHAPES["down"], "bf16")


def _both(name: str, shape: ProductShape, dtype: str) -> Iterator[Kernel]:
    arguments = {**_ARGUMENTS, "x": f"*{dtype}", "numbers": f"*{dtype}", "out": f"*{dtype}"}
    precision = "ieee" if dtype == "fp32" else "tf32"
    common = {"PARTS": len(shape.features), "TILE": TILE_ROWS, "RANKS": RANKS, "PRECISION": precision}
    own = {"CHUNKS": shape.chunks, "FEATURES": PIECE, "ROW_ALIGNED": ROW_ALIGNED}
    multiplies = () if dtype == "fp32" else ("mma.sync.aligned.m16n8k16",)
    loads = ("cp.async", *multiplies)
    shrink = {**common, "COLUMNS": COLUMNS}
    yield Kernel(f"shrink, {name}, {dtype}", shrink_tiles, arguments, shrink, _ALIGNED, WARPS, STAGES, loads)
    yield Kernel(
        f"expand, {name}, {dtype}", expand_tiles, arguments, {**common, **own}, _ALIGNED, WARPS, STAGES, multiplies
    )

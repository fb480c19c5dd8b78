"""Grouped products with quantized and with 16-bit expert weights, in the shapes of a model with 128 experts."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from penstock_enginecore.forward.cuda.kernel_api import MAX_ASSIGNED_TOKENS, Kind
from penstock_enginecore.forward.cuda.kernels.configurations import (
    DenseExpertTiles,
    ExpertTiles,
    expert_tiles,
    load_tuned,
)
from penstock_enginecore.forward.cuda.kernels.grouped import grouped_tiles
from penstock_enginecore.forward.cuda.kernels.quantized import narrowed, quantized_experts
from tests.compiled.kernel import SM_90, Kernel
from tests.compiled.products import counted, int4_weight, must_have

EXPERTS = 128
_KINDS: tuple[Kind, ...] = ("float8", "int4", "mxfp4")
ARGUMENTS: dict[str, str | None] = {
    "x": "*bf16", "zeros": None, "bias": None, "ends": "*i32", "order": "*i32", "out": "*bf16", "experts": "i32",
    "out_features": "i32", "in_features": "i32", "blocks": "i32", "alpha": "fp32", "limit": "fp32", "tiles": "i32",
    "shared_x": None, "shared_weight": None, "shared_out": None, "tokens": "i32", "shared_out_features": "i32",
    "shared_in_features": "i32",
}  # fmt: skip
"""Types of the arguments that all grouped products have, without a shared MLP."""
ALIGNED = frozenset(
    {"x", "weight", "numbers", "zeros", "scales", "bias", "ends", "order", "out", "out_features", "in_features"}
    | {"shared_x", "shared_weight", "shared_out", "shared_out_features", "shared_in_features"}
)
"""Arguments that are divisible by 16."""
_SHARED = {"shared_x": "*bf16", "shared_weight": "*bf16", "shared_out": "*bf16"}
_GATHERS = {"TOP_K": 8, "GATE": "silu"}
_SCATTERS = {"TOP_K": 0, "GATE": ""}


def kernels() -> Iterator[Kernel]:
    """Yield kernels for each format of weights.

    The formats are fp8 with scales per row and per block of 128 columns, int4 with groups of 32 and 128, and MXFP4 with
    biases. These products gather and activate rows. Products with 16-bit weights also scatter rows.
    """
    for tiles in load_tuned().experts:
        yield from _of(tiles, str(tiles.rows))
    for dense in load_tuned().dense_experts:
        for role, constants in (("gather", _GATHERS), ("scatter", _SCATTERS)):
            own = {"BLOCK_K": dense.block_k, "TRANSPOSED": False, "SHARED_EVEN": True, **constants}
            yield _kernel(f"16-bit experts, {dense.rows} rows, {role}", dense, {"weight": "*bf16"}, own)
            if dense.rows <= MAX_ASSIGNED_TOKENS:
                types = {"weight": "*bf16", **_SHARED}
                yield _kernel(f"16-bit experts and shared MLP, {dense.rows} rows, {role}", dense, types, own)
    for kind in _KINDS:
        for kernel in _of(expert_tiles(1, kind, invariant=True), "any"):
            yield replace(kernel, name=f"invariant {kernel.name}")


def gate() -> Iterator[Kernel]:
    """Yield the kernels of decode steps."""
    return (kernel for kernel in kernels() if kernel.constants["BLOCK_M"] == 16)


def _of(tiles: ExpertTiles, rows: str) -> Iterator[Kernel]:
    """Yield the kernels of each layout of a kind of weights."""
    if tiles.kind == "float8":
        for width in (0, 128):
            own = {"WIDTH": width, "PART": 64}
            types = {"numbers": "*i16", "scales": "*fp32"}
            by = f"{width} columns" if width else "row"
            yield _kernel(f"fp8 experts, {rows} rows, by {by}", tiles, types, own)
    elif tiles.kind == "int4":
        for width in (32, 128):
            own = {"WIDTH": width, "PART": 32}
            types = {"numbers": "*i16", "zeros": "*u8", "scales": "*fp16"}
            fit = narrowed(tiles, int4_weight(width))
            yield _kernel(f"int4 experts, {rows} rows, by {width} columns", fit, types, own)
    else:
        types = {"numbers": "*i16", "scales": "*u8", "bias": "*bf16"}
        own = {"WIDTH": 32, "PART": 32, "GATE": "clamped"}
        yield _kernel(f"mxfp4 experts, {rows} rows", tiles, types, own)


def _kernel(name: str, tiles: ExpertTiles | DenseExpertTiles, types: dict[str, str], own: dict[str, Any]) -> Kernel:
    shape = {
        **_GATHERS,
        "EVEN": True,
        "EXPERTS": EXPERTS,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "PRECISION": "ieee",
        **own,
    }
    common = (ALIGNED, tiles.warps, tiles.stages)
    if isinstance(tiles, DenseExpertTiles):
        needed: tuple[str, ...] = ("cp.async",) if tiles.block_m < 64 else ("cp.async", "wgmma.mma_async")
        return Kernel(name, grouped_tiles, {**ARGUMENTS, **types}, shape, *common, needed)
    shape |= {"KIND": tiles.kind, "PACKED": True}
    needed = must_have(tiles, SM_90)
    return Kernel(
        name, quantized_experts, {**ARGUMENTS, **types}, shape, *common, needed, **counted(tiles, shape, SM_90)
    )

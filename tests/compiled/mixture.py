"""Choice of experts, order of rows and weighted sums, in the shapes of Qwen3-30B-A3B, DeepSeek-V2 and DeepSeek-V3."""

from collections.abc import Iterator
from typing import Any

from penstock_enginecore.forward.cuda.kernels import mixture, norm, router
from tests.compiled.kernel import SM_80, SM_90, Kernel

_ROUTE: dict[str, str | None] = {
    "logits": "*bf16", "correction": None, "starts": "*i32", "weights": "*fp32", "chosen": "*i32", "requests": "i32",
    "experts": "i32", "scale": "fp32",
}  # fmt: skip
_PLAIN = {
    "TOP_K": 8, "SIGMOID": False, "RENORMALIZE": True, "GROUPS": 1, "KEPT": 1, "GROUP_SIZE": 128, "COUNTED": 1,
    "LEAST_SUM": 1e-20, "EXPERTS": 128, "CHOICES": 8, "GROUPS_PADDED": 1,
}  # fmt: skip
_V2 = _PLAIN | {"TOP_K": 6, "RENORMALIZE": False, "GROUPS": 8, "KEPT": 3, "GROUP_SIZE": 20, "EXPERTS": 256}
_V3 = _PLAIN | {"SIGMOID": True, "GROUPS": 8, "KEPT": 4, "GROUP_SIZE": 32, "COUNTED": 2, "EXPERTS": 256}
_ALIGNED = frozenset({"logits", "correction", "starts", "weights", "chosen", "ends", "order", "x", "shared", "out"})
_ROUTER: dict[str, str | None] = {
    **_ROUTE, "x": "*bf16", "router": "*bf16", "bias": None, "logits": "*fp32", "counters": "*i32", "ends": "*i32",
    "order": "*i32", "tokens": "i32", "in_features": "i32",
}  # fmt: skip
_TILES = {"TOKENS": 16, "BLOCK_N": 32, "BLOCK_K": 128, "STEP_COUNTER": 4, "PAIRS": 512}
_COUNTED = "atom.global.gpu.acq_rel.add", "bar.sync"
"""Instructions by which the programs of a router count themselves."""


def kernels() -> Iterator[Kernel]:
    """Yield the kernels of a mixture around its products."""
    yield _routed("route, 128 experts", {}, _PLAIN)
    yield _routed("route, DeepSeek-V2", {"logits": "*fp32"}, _V2 | {"GROUPS_PADDED": 8})
    yield _routed("route, DeepSeek-V3", {"logits": "*fp32", "correction": "*fp32"}, _V3 | {"GROUPS_PADDED": 8})
    types = {"chosen": "*i32", "ends": "*i32", "order": "*i32", "pairs": "i32", "experts": "i32"}
    for block in (128, 1024):
        yield Kernel(f"order of rows, {block} pairs at once", mixture._align, {**types}, {"BLOCK": block}, _ALIGNED)
    summed: dict[str, str | None] = {
        "x": "*bf16", "weights": "*fp32", "shared": "*bf16", "out": "*bf16", "width": "i32",
    }  # fmt: skip
    aligned = _ALIGNED | {"width"}
    yield from _routers()
    yield from _norms()
    yield Kernel("weighted sum", mixture._weighted_rows, summed, {"TOP_K": 8, "BLOCK": 1024}, aligned)


def _routers() -> Iterator[Kernel]:
    """Yield routers of few tokens in one kernel."""
    aligned = _ALIGNED | {"router", "bias", "counters", "in_features"}
    v3 = _V3 | {"GROUPS_PADDED": 8, "ROUNDS": False, "PART": 896, "PARTS": 8}
    of_v3: dict[str, str | None] = {"correction": "*fp32"}
    for capability in (SM_80, SM_90):
        for name, types, constants, warps in [
            ("router, 128 experts", {}, _PLAIN | {"ROUNDS": True, "PART": 256, "PARTS": 8}, 4),
            ("router, 128 experts, few pairs", {}, _PLAIN | {"ROUNDS": True, "PART": 256, "PARTS": 8, "PAIRS": 128}, 4),
            ("router, DeepSeek-V3", of_v3, v3, 8),
            ("router, DeepSeek-V3, float32", of_v3 | {"router": "*fp32"}, v3, 8),
        ]:  # fmt: skip
            yield Kernel(
                f"{name}, sm_{capability}", router._assign, {**_ROUTER, **types}, _TILES | constants, aligned,
                warps=warps, must_have=_COUNTED, capability=capability,
            )  # fmt: skip


def _norms() -> Iterator[Kernel]:
    """Yield norms of a sum over a token's experts, in the widths of Qwen3-30B-A3B and DeepSeek-V3."""
    types: dict[str, str | None] = {
        "x": "*bf16", "residual": "*bf16", "weight": "*bf16", "out": "*bf16", "weights": "*fp32", "shared": "*bf16",
        "width": "i32", "eps": "fp32", "offset": "fp32",
    }  # fmt: skip
    aligned = _ALIGNED | {"residual", "weight", "width"}
    for block, warps in ((2048, 4), (8192, 16)):
        constants = {"ADDS": True, "TOP_K": 8, "BLOCK": block}
        yield Kernel(
            f"norm of a weighted sum, {block} columns", norm._add_rms_norm, types, constants, aligned, warps, early=2
        )


def gate() -> Iterator[Kernel]:
    """Yield the choice of experts of DeepSeek-V3, alone and in its router. They are the largest kernels."""
    return (kernel for kernel in kernels() if kernel.name in ("route, DeepSeek-V3", "router, DeepSeek-V3, sm_90"))


def _routed(name: str, types: dict[str, str | None], constants: dict[str, Any]) -> Kernel:
    return Kernel(name, mixture._route, {**_ROUTE, **types}, constants, _ALIGNED, warps=1)

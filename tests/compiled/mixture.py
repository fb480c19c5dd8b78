"""Choice of experts, order of rows and weighted sums, in the shapes of Qwen3-30B-A3B, DeepSeek-V2 and DeepSeek-V3."""

from collections.abc import Iterator
from typing import Any

from penstock_enginecore.forward.cuda.kernels import mixture
from tests.compiled.kernel import Kernel

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
    yield Kernel("weighted sum", mixture._weighted_rows, summed, {"TOP_K": 8, "BLOCK": 1024}, aligned)


def gate() -> Iterator[Kernel]:
    """Yield the choice of experts of DeepSeek-V3, which is the largest kernel."""
    return (kernel for kernel in kernels() if "V3" in kernel.name)


def _routed(name: str, types: dict[str, str | None], constants: dict[str, Any]) -> Kernel:
    return Kernel(name, mixture._route, {**_ROUTE, **types}, constants, _ALIGNED, warps=1)

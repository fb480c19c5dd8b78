"""Sampling kernels, for logits of a vocabulary of 128256 tokens."""

from collections.abc import Iterator
from typing import Any

from penstock_enginecore.forward.cuda.kernels import filters, sample
from tests.compiled.kernel import Kernel

VOCAB = 128_256
PART = 4096
"""Number of logits that a program reads."""
SCALE = 62 - (VOCAB - 1).bit_length()
_ARGUMENTS: dict[str, str | None] = {
    **dict.fromkeys(("peaks", "temperatures", "max_distances", "limits", "part_peaks"), "*fp32"),
    **dict.fromkeys(("top_ks", "candidates", "part_columns", "part_nans"), "*i32"),
    **dict.fromkeys(("top_ps", "sums"), "*fp64"),
    **dict.fromkeys(("vocab", "blocks"), "i32"),
    "tallies": "*i64",
}
_ALIGNED = frozenset({*_ARGUMENTS, "logits"}) - {"blocks"}


def kernels() -> Iterator[Kernel]:
    """Yield the kernels that read all logits, and the search for limits, for each dtype of logits."""
    for dtype in ("bf16", "fp16", "fp32"):
        yield from _kernels(dtype)


def gate() -> Iterator[Kernel]:
    """Yield the kernels of filters for bf16 logits."""
    return _of_filters("bf16")


def _kernels(dtype: str) -> Iterator[Kernel]:
    yield from _of_filters(dtype)
    peaks = {"PART": PART}
    yield Kernel(f"peaks, {dtype}", sample._peaks, _of(dtype), peaks, _ALIGNED, 8, numbers=PART)
    for filtered in (False, True):
        options = {"PART": PART, "SUMMED": sample._SUMMED, "FILTERED": filtered}
        name = f"sums{' of kept weights' * filtered}, {dtype}"
        yield Kernel(name, sample._sum, _of(dtype), options, _ALIGNED, 8, numbers=PART)


def _of_filters(dtype: str) -> Iterator[Kernel]:
    """Yield the four kernels of filters, in the order of their launches."""
    arguments, warps = _of(dtype), filters.WARPS
    # Atomic additions that order no other memory accesses.
    adds: dict[str, Any] = {"must_have": ("atom.global.gpu.relaxed.add.u64",), "numbers": PART}
    tallies, copies = {"PART": PART, "SCALE": SCALE}, {"PART": PART, "ROOM": filters.CANDIDATES}
    search = {"SCALE": SCALE, "BLOCK": filters.CANDIDATES}
    yield Kernel(f"tallies, {dtype}", filters._tally, arguments, tallies, _ALIGNED, warps, **adds)
    yield Kernel(f"fine tallies, {dtype}", filters._refine, arguments, tallies, _ALIGNED - {"vocab"}, warps, **adds)
    yield Kernel(f"candidates, {dtype}", filters._gather, arguments, copies, _ALIGNED, warps, **adds)
    yield Kernel(f"limits, {dtype}", filters._finish, arguments, search, _ALIGNED, 8)


def _of(dtype: str) -> dict[str, str | None]:
    return {**_ARGUMENTS, "logits": f"*{dtype}"}

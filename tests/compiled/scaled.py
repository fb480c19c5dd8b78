"""Kernels around products of 8-bit floats, in the shapes of a model with 8 billion parameters."""

from collections.abc import Iterator

from penstock_enginecore.forward.cuda.kernels import scaled
from tests.compiled.kernel import Kernel


def kernels() -> Iterator[Kernel]:
    """Yield the kernel that rounds activations and the kernel that unpacks a weight."""
    rounded: dict[str, str | None] = {"x": "*bf16", "numbers": "*fp8e4nv", "scales": "*fp32", "columns": "i32"}
    constants = {"MOST": scaled.LARGEST, "BLOCK": 4096}
    aligned = frozenset({"x", "numbers", "scales", "columns"})
    yield Kernel("activations in 8 bits", scaled.rounded_row, rounded, constants, aligned)
    unpacked: dict[str, str | None] = {"numbers": "*i16", "out": "*u8", "out_features": "i32", "words": "i32"}
    aligned = frozenset({"numbers", "out", "out_features", "words"})
    yield Kernel("unpacked fp8 weight", scaled.unpacked_tiles, unpacked, {"PART": 64, "BLOCK_N": 32}, aligned)


def gate() -> Iterator[Kernel]:
    """Yield both kernels, because they are small."""
    return kernels()

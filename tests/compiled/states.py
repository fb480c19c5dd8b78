"""Kernels of recurrent layers, in the shapes of published models."""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock_enginecore.states.cuda.kernels import convolution, scan
from tests.compiled.kernel import Kernel


@dataclass(frozen=True)
class Shape:
    """Sizes of a recurrent layer. ``corrects`` is true for the delta rule."""

    heads: int
    key_heads: int
    key_size: int
    value_size: int
    corrects: bool


SHAPES = {
    "Qwen3.5-0.8B": Shape(16, 16, 128, 128, corrects=True),
    "Qwen3.5-35B-A3B": Shape(32, 16, 128, 128, corrects=True),
    "Granite-4.0-h": Shape(48, 1, 128, 64, corrects=False),
    "Nemotron-3": Shape(64, 8, 128, 64, corrects=False),
    "Falcon-H1": Shape(24, 1, 256, 64, corrects=False),
    "largest": Shape(16, 16, 256, 256, corrects=True),
}
_INDICES = ("owners", "writes", "firsts", "starts", "counts", "rings", "slots", "broken")
_FLOATS = (
    "query", "key", "value", "decay", "beta", "closed", "keys", "updates", "decays", "new_updates", "new_sums",
)  # fmt: skip
_ARGUMENTS: dict[str, str | None] = {
    **dict.fromkeys(_INDICES, "*i32"),
    **dict.fromkeys(_FLOATS, "*fp32"),
    **dict.fromkeys(("tokens", "channels", "length", "row_stride", "channel_stride"), "i32"),
    "out": "*fp32",
}
_ALIGNED = frozenset({*_INDICES, *_FLOATS, "out", "inputs", "weight", "bias", "tails", "kept", "channels", "length"})
_BLOCK = {"TOKENS": convolution.TOKENS, "CHANNELS": convolution.CHANNELS}


def kernels() -> Iterator[Kernel]:
    """Yield the kernels of all shapes."""
    for name, shape in SHAPES.items():
        yield from _scans(name, shape)
    for dtype in ("bf16", "fp16", "fp32"):
        for taps in (3, 4):
            yield _convolution(dtype, taps)
        yield _kept_inputs(dtype)


def gate() -> Iterator[Kernel]:
    """Yield the kernels of one layer with the delta rule, and one state space layer."""
    for name in ("Qwen3.5-0.8B", "Granite-4.0-h"):
        yield from _scans(name, SHAPES[name])
    yield _convolution("bf16", 4)
    yield _kept_inputs("bf16")


def _scans(name: str, shape: Shape) -> Iterator[Kernel]:
    sizes = {
        "HEADS": shape.heads, "KEY_HEADS": shape.key_heads, "KEY_SIZE": shape.key_size, "VALUE_SIZE": shape.value_size,
    }  # fmt: skip
    tile = {
        "ROWS": scan.rows_of(shape.key_size),
        "COLUMNS": scan.columns_of(shape.value_size),
        "CORRECTS": shape.corrects,
    }
    yield Kernel(f"scan, {name}", scan.scan_tokens, _ARGUMENTS, sizes | tile, _ALIGNED, scan.WARPS)
    copies = scan.copied_at_once(shape.key_heads * shape.key_size, shape.heads * shape.value_size, shape.heads)
    yield Kernel(f"rows of scans, {name}", scan.keep_rows, _ARGUMENTS, sizes | copies, _ALIGNED, scan.WARPS)


def _convolution(dtype: str, taps: int) -> Kernel:
    """Return the convolution of a short convolution (3 taps), or of a layer with a recurrent state."""
    short = taps == 3
    options = {"BIASED": not short, "ACTIVATED": not short, "CHECKS": short, "KERNEL": taps, **_BLOCK}
    function, arguments = convolution.convolve_tokens, _of_dtype(dtype)
    return Kernel(f"convolution of {taps} taps, {dtype}", function, arguments, options, _ALIGNED, convolution.WARPS)


def _kept_inputs(dtype: str) -> Kernel:
    function, arguments = convolution.keep_inputs, _of_dtype(dtype)
    return Kernel(f"rows of convolutions, {dtype}", function, arguments, _BLOCK, _ALIGNED, convolution.WARPS)


def _of_dtype(dtype: str) -> dict[str, str | None]:
    return _ARGUMENTS | dict.fromkeys(("inputs", "weight", "bias", "out", "tails", "kept"), f"*{dtype}")

"""Kernels between the matrix products of a layer, in the shapes of models with 8 billion parameters and of
DeepSeek-V3.
"""

from collections.abc import Iterator
from typing import Any

from penstock_enginecore.forward.cuda.kernels import activation, latent_attention, norm, prologue
from tests.compiled.kernel import Kernel

_POINTERS: dict[str, str | None] = dict.fromkeys(
    ("x", "residual", "weight", "out", "gate_up", "qkv", "query_weight", "key_weight", "keys", "values", "query",
     "product", "cache", "low"), "*bf16",
) | {"bias": "*bf16", "cosines": "*fp32", "sines": "*fp32", "positions": "*i32", "slots": "*i64"}  # fmt: skip
_INTEGERS = (
    "width", "num_heads", "num_kv_heads", "block_size", "key_stride", "value_stride", "stride", "first",
)  # fmt: skip
_FLOATS = (
    "eps", "offset", "query_eps", "key_eps", "query_offset", "key_offset", "key_inverse_scale", "value_inverse_scale",
)  # fmt: skip
_ARGUMENTS = _POINTERS | dict.fromkeys(_INTEGERS, "i32") | dict.fromkeys(_FLOATS, "fp32")
_ARGUMENTS |= {"weights": None, "shared": None}
_ALIGNED = frozenset({*_POINTERS, "width", "key_stride", "value_stride", "stride", "first"})
_ROTATED = {"HALF": 32, "HALF_BLOCK": 32}


def kernels() -> Iterator[Kernel]:
    """Yield the norm, the prologue with norms of heads, the activation, and the kernels before latent attention."""
    yield _kernel("norm", norm._add_rms_norm, {"ADDS": True, "TOP_K": 0, "BLOCK": 4096}, warps=8, early=2)
    heads = {"SIZE": 128, "HALF": 64, "BIAS": False, "NORMS": True, "HEADS": 4, "HALF_BLOCK": 64, "REST_BLOCK": 0}
    yield _kernel("prologue", prologue._prologue, heads, warps=2, early=4)
    yield _kernel("activation", activation._gated, {"KIND": "silu", "BLOCK": 1024}, warps=4)
    latent = {"LATENT": 512, "LATENT_BLOCK": 512, "LOW": 1536, "LOW_BLOCK": 2048, "BIAS": False, "INTERLEAVED": True}
    yield _kernel("latent prologue", latent_attention._latent_prologue, _ROTATED | latent, warps=4, early=4)
    turned = {"SIZE": 192, "INTERLEAVED": True, "HEADS": 4}
    yield _kernel("rotation of queries", latent_attention._turn_queries, _ROTATED | turned, warps=2, early=4)


def gate() -> Iterator[Kernel]:
    """Yield the kernels of most models."""
    return (kernel for kernel in kernels() if kernel.name in ("norm", "prologue", "activation"))


def _kernel(name: str, function: Any, constants: dict[str, Any], *, warps: int, early: int = 0) -> Kernel:
    return Kernel(name, function, _ARGUMENTS, constants, _ALIGNED, warps, early=early)

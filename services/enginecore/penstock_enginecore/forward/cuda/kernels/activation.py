"""Gated activations of MLPs, applied to the output of the merged gate and up projections."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernel_api import Activation

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """Activation of gpt-oss: ``(up + 1) * gate * sigmoid(alpha * gate)``. Values of ``gate`` are clamped to at most
    ``limit``, and values of ``up`` to ``[-limit, limit]``.
    """

    limit: float
    alpha: float


def gated(gate_up: torch.Tensor, activation: Activation | ClampedSwiglu, out: torch.Tensor) -> None:
    """Apply the activation to the first half of ``gate_up``, multiply the result by the second half, and write the
    product to ``out``.

    ``gate_up`` is ``[tokens, 2 * intermediate size]`` and ``out`` is ``[tokens, intermediate size]``, both contiguous.
    The computation is float32. Raises ValueError for other shapes or strides.
    """
    tokens, width = out.shape
    if gate_up.shape != (tokens, 2 * width) or not gate_up.is_contiguous() or not out.is_contiguous():
        raise ValueError(
            f"`gate_up` has shape {list(gate_up.shape)}, which does not match the output's shape {list(out.shape)}"
        )
    clamped = activation if isinstance(activation, ClampedSwiglu) else None
    if not out.numel():
        return
    _gated[(tokens, triton.cdiv(width, _BLOCK))](
        gate_up,
        out,
        width,
        0.0 if clamped is None else clamped.limit,
        0.0 if clamped is None else clamped.alpha,
        KIND="clamped_swiglu" if clamped is not None else activation,
        BLOCK=_BLOCK,
    )


@triton.jit
def _gated(gate_up, out, width, limit, alpha, KIND: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gates = gate_up + token * 2 * width
    gate = tl.load(gates + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + width + columns, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu":
        value = gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        value = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # (1 + tanh(y)) / 2 is sigmoid(2 * y), here with y = sqrt(2 / pi) * (x + 0.044715 * x**3).
        value = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        tl.static_assert(KIND == "clamped_swiglu")
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        value = gate * tl.sigmoid(alpha * gate)
    tl.store(out + token * width + columns, (value * up).to(out.dtype.element_ty), mask=inside)

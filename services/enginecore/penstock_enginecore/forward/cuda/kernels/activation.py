"""Gated activations of MLPs, applied to the output of the merged gate and up projections."""

import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernel_api import Activation
from penstock_enginecore.forward.cuda.kernels.dependent_launch import pdl_options, wait_for_inputs

_BLOCK = 1024


def gated(gate_up: torch.Tensor, activation: Activation, out: torch.Tensor, *, pdl: bool = False) -> None:
    """Apply the activation to the first half of ``gate_up``, multiply the result by the second half, and write the
    product to ``out``.

    ``gate_up`` is ``[tokens, 2 * intermediate size]`` and ``out`` is ``[tokens, intermediate size]``, both contiguous.
    The computation is float32. ``pdl`` selects dependent launch, see ``dependent_launch.py``. Raises ValueError for
    other shapes or strides.
    """
    tokens, width = out.shape
    if gate_up.shape != (tokens, 2 * width) or not gate_up.is_contiguous() or not out.is_contiguous():
        raise ValueError(
            f"`gate_up` has shape {list(gate_up.shape)}, which does not match the output's shape {list(out.shape)}"
        )
    if not out.numel():
        return
    grid = tokens, triton.cdiv(width, _BLOCK)
    _gated[grid](gate_up, out, width, KIND=activation, BLOCK=_BLOCK, **pdl_options(pdl=pdl))


@triton.jit
def activated(gate, up, alpha, limit, KIND: tl.constexpr):
    """Return the activation of float32 ``gate``, times ``up``. The kind ``clamped`` is the activation of gpt-oss, see
    ``ClampedGate``; other kinds ignore ``alpha`` and ``limit``.
    """
    if KIND == "silu":
        value = gate * tl.sigmoid(gate)
    elif KIND == "gelu":
        value = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # (1 + tanh(y)) / 2 is sigmoid(2 * y), here with y = sqrt(2 / pi) * (x + 0.044715 * x**3).
        value = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        tl.static_assert(KIND == "clamped")
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        value = gate * tl.sigmoid(alpha * gate)
    return value * up


@triton.jit
def _gated(gate_up, out, width, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gates = gate_up + token * 2 * width
    gate = tl.load(gates + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + width + columns, mask=inside, other=0.0).to(tl.float32)
    value = activated(gate, up, 0.0, 0.0, KIND)
    tl.store(out + token * width + columns, value.to(out.dtype.element_ty), mask=inside)

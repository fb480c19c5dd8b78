"""RMSNorm, together with the additions before the norm: the sum over a token's experts, and the addition to the residual
stream. One program computes one token.
"""

import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernel_api import Norm, WeightedRows
from penstock_enginecore.forward.cuda.kernels.dependent_launch import pdl_options, wait_for_inputs
from penstock_enginecore.forward.cuda.kernels.mixture import summed

_NUMBERS_PER_WARP = 512


def add_rms_norm(
    x: torch.Tensor | WeightedRows,
    residual: torch.Tensor | None,
    norm: Norm,
    out: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Add ``x`` to ``residual`` in place, and write the norm of the sum, times ``weight + offset``, to ``out``.

    If ``residual`` is None, write the norm of ``x``. The computation is float32, and the sum is rounded to the
    residual's dtype. ``WeightedRows`` are summed first, and this sum is rounded to the dtype of the rows. So the results
    have the bits of ``weighted_sum`` and a norm. All tensors are contiguous ``[tokens, hidden size]``, and ``out``
    shares no memory with the others. ``pdl`` selects dependent launch, see ``dependent_launch.py``. Raises ValueError
    for other shapes or strides.
    """
    if isinstance(x, WeightedRows):
        x.check()
        first, weights, shared, top_k = x.rows, x.weights, x.shared, x.weights.shape[1]
    else:
        first, weights, shared, top_k = x, None, None, 0
    for tensor in (first, out) if residual is None else (first, residual, out):
        fits = tensor.shape == x.shape or (tensor is first and top_k > 0)
        if not fits or tensor.dim() != 2 or not tensor.is_contiguous():
            raise ValueError(
                f"norms need contiguous tensors of one shape, but got {list(tensor.shape)} and {list(x.shape)}"
            )
    tokens, width = x.shape
    if norm.size != width:
        raise ValueError(f"the norm's weight has shape [{norm.size}], but the hidden size is {width}")
    if not tokens:
        return
    block = triton.next_power_of_2(width)
    _add_rms_norm[(tokens,)](
        first, first if residual is None else residual, norm.weight, out, weights, shared, width, norm.eps, norm.offset,
        ADDS=residual is not None, TOP_K=top_k, BLOCK=block, num_warps=min(16, max(1, block // _NUMBERS_PER_WARP)),
        **pdl_options(pdl=pdl),
    )  # fmt: skip


@triton.jit
def _add_rms_norm(
    x, residual, weight, out, weights, shared, width, eps, offset,
    ADDS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the norm of one token. ``x`` has ``TOP_K`` rows for each token, or one row if ``TOP_K`` is 0."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    start = token * width
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
    wait_for_inputs(PDL)
    if TOP_K == 0:
        value = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
    else:
        value = summed(x, weights, shared, token, columns, width, TOP_K, BLOCK)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    if ADDS:
        value += tl.load(residual + start + columns, mask=inside, other=0.0).to(tl.float32)
        # Compute the norm from the sum that is rounded to the residual's dtype, because later layers read the rounded
        # sum.
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + start + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    tl.store(out + start + columns, (value * scale * factor).to(out.dtype.element_ty), mask=inside)

"""RMSNorm, with the add of the residual stream before it: one program per token."""

import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernel_api import Norm

_NUMBERS_PER_WARP = 512


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, out: torch.Tensor) -> None:
    """Where there is a ``residual`` add ``x`` to it, in its place and rounded to its dtype; write the norm of the sum, or of
    ``x``, times ``weight + offset`` to ``out``. All contiguous ``[tokens, hidden size]``; ``out`` shares no memory with the
    others. Computed in float32. ValueError for other shapes or strides.
    """
    for tensor in (x, out) if residual is None else (x, residual, out):
        if tensor.shape != x.shape or x.dim() != 2 or not tensor.is_contiguous():
            raise ValueError(f"{list(tensor.shape)} beside {list(x.shape)}: norms take contiguous tensors of one shape")
    tokens, width = x.shape
    if norm.weight.shape != (width,):
        raise ValueError(f"the norm's weight is {list(norm.weight.shape)}, the hidden size {width}")
    if not tokens:
        return
    block = triton.next_power_of_2(width)
    _add_rms_norm[(tokens,)](
        x, x if residual is None else residual, norm.weight, out, width, norm.eps, norm.offset,
        ADDS=residual is not None, BLOCK=block, num_warps=min(16, max(1, block // _NUMBERS_PER_WARP)),
    )  # fmt: skip


@triton.jit
def _add_rms_norm(x, residual, weight, out, width, eps, offset, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    start = tl.program_id(0).to(tl.int64) * width
    value = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(residual + start + columns, mask=inside, other=0.0).to(tl.float32)
        # What is normed is what later layers find: the sum as the stream's dtype holds it.
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + start + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(out + start + columns, (value * scale * factor).to(out.dtype.element_ty), mask=inside)

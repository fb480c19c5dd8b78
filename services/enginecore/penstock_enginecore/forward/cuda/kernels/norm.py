"""RMSNorm, together with the addition to the residual stream before the norm. One program computes one token."""

import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernel_api import Norm

_NUMBERS_PER_WARP = 512


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, out: torch.Tensor) -> None:
    """Add ``x`` to ``residual`` in place, and write the norm of the sum, times ``weight + offset``, to ``out``.

    If ``residual`` is None, write the norm of ``x``. The computation is float32, and the sum is rounded to the
    residual's dtype. All tensors are contiguous ``[tokens, hidden size]``, and ``out`` shares no memory with the
    others. Raises ValueError for other shapes or strides.
    """
    for tensor in (x, out) if residual is None else (x, residual, out):
        if tensor.shape != x.shape or x.dim() != 2 or not tensor.is_contiguous():
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
        # Compute the norm from the sum that is rounded to the residual's dtype, because later layers read the rounded
        # sum.
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + start + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(out + start + columns, (value * scale * factor).to(out.dtype.element_ty), mask=inside)

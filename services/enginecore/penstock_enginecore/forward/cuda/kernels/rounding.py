"""From what is computed to what the KV cache holds."""

import triton
import triton.language as tl


@triton.jit
def rounded(value, inverse_scale, TO: tl.constexpr):
    """Float32 ``value`` as ``TO``; as an 8-bit float times ``inverse_scale``, at most its largest number. NaN stays NaN."""
    if tl.float8e4nv == TO:
        value = value * inverse_scale
        value = tl.where(value > 448.0, 448.0, tl.where(value < -448.0, -448.0, value))
    return value.to(TO)

"""Kernel that writes the keys and values of new tokens into the KV cache, for models that do not use the prologue
kernel.
"""

import torch
import triton
import triton.language as tl

from penstock_enginecore.attention.kv_cache import FLOAT8, UNSCALED, KVScales

# Conversion of computed keys and values to the dtype of the KV cache.


@triton.jit
def rounded(value, inverse_scale, TO: tl.constexpr):
    """Convert a float32 ``value`` to the dtype ``TO``. If ``TO`` is an 8-bit float, multiply ``value`` by
    ``inverse_scale`` and clamp it first. NaN stays NaN.
    """
    if tl.float8e4nv == TO:
        value = value * inverse_scale
        value = tl.where(value > 448.0, 448.0, tl.where(value < -448.0, -448.0, value))
    return value.to(TO)


_HEADS = 4
"""Number of heads per program."""


def write_cache(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scales: KVScales = UNSCALED,
) -> None:
    """Write the keys and values of new tokens into the KV cache. Nothing is written for a token whose slot is -1.

    Args:
        keys: ``[tokens, kv_heads, head size]``. Tokens and heads may be strided.
        values: ``[tokens, kv_heads, head size]``. Tokens and heads may be strided.
        slots: int64 ``[tokens]``, slots of the tokens in the cache.
        key_cache: ``[blocks, kv_heads, block_size, head size]``. Blocks may be strided.
        value_cache: ``[blocks, kv_heads, block_size, head size]``. Blocks may be strided.
        scales: Scales of a float8_e4m3fn cache: keys and values are divided by the scale before they are stored, and
            clamped to the dtype's range. Caches of other dtypes have no scales.

    Raises:
        ValueError: Shapes or strides are not supported.
    """
    tokens, kv_heads, size = keys.shape
    size_v = values.shape[2]
    for name, new, cache in (("keys", keys, key_cache), ("values", values, value_cache)):
        if (new.shape[1], new.shape[2]) != (cache.shape[1], cache.shape[3]) or len(new) != len(slots):
            raise ValueError(
                f"new {name} have shape {list(new.shape)}, but there are {len(slots)} slots and the cache has shape "
                f"{list(cache.shape)}"
            )
        if new.stride(2) != 1 or not cache[0].is_contiguous():
            strides = f"{list(new.stride())}, the strides of the cache {list(cache.stride())}"
            raise ValueError(f"heads and blocks must be contiguous; the strides of {name} are {strides}")
    if key_cache.shape[2] != value_cache.shape[2]:
        raise ValueError(
            f"a block has {key_cache.shape[2]} keys, but {value_cache.shape[2]} values; the numbers must be equal"
        )
    if scales != UNSCALED and not key_cache.dtype == value_cache.dtype == FLOAT8:
        raise ValueError(
            f"{scales} requires caches of float8_e4m3fn, but the caches have dtypes {key_cache.dtype} and {value_cache.dtype}"
        )
    if not tokens:
        return
    _write[(tokens, triton.cdiv(kv_heads, _HEADS))](
        keys, values, slots, key_cache, value_cache,
        *keys.stride()[:2], *values.stride()[:2], key_cache.stride(0), value_cache.stride(0),
        kv_heads, key_cache.shape[2], 1.0 / scales.key, 1.0 / scales.value,
        SIZE=size, SIZE_V=size_v, PADDED=triton.next_power_of_2(size), PADDED_V=triton.next_power_of_2(size_v),
        HEADS=_HEADS, num_warps=2,
    )  # fmt: skip


@triton.jit
def _copy(
    source, cache, token, heads, there, block, in_block, token_stride, head_stride, block_stride, block_size,
    inverse_scale, SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    numbers = tl.arange(0, PADDED)
    inside = there[:, None] & (numbers < SIZE)[None, :]
    value = tl.load(source + token * token_stride + (heads * head_stride)[:, None] + numbers[None, :], mask=inside)
    value = rounded(value.to(tl.float32), inverse_scale, cache.dtype.element_ty)
    to = block * block_stride + ((heads * block_size + in_block) * SIZE)[:, None] + numbers[None, :]
    tl.store(cache + to, value, mask=inside)


@triton.jit
def _write(
    keys, values, slots, key_cache, value_cache,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride, key_block_stride, value_block_stride,
    kv_heads, block_size, key_inverse_scale, value_inverse_scale,
    SIZE: tl.constexpr, SIZE_V: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write the keys and values of ``_HEADS`` heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS).to(tl.int64)
    there = heads < kv_heads
    block, in_block = slot // block_size, slot % block_size
    _copy(
        keys, key_cache, token, heads, there, block, in_block, key_token_stride, key_head_stride, key_block_stride,
        block_size, key_inverse_scale, SIZE, PADDED,
    )  # fmt: skip
    _copy(
        values, value_cache, token, heads, there, block, in_block, value_token_stride, value_head_stride,
        value_block_stride, block_size, value_inverse_scale, SIZE_V, PADDED_V,
    )  # fmt: skip

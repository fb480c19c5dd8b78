"""Operations between the merged matrix product of queries, keys and values and the attention kernel.

One launch adds biases, applies the norms of heads, applies rotary positions and writes the KV cache. A program computes
a few heads of one token.
"""

import torch
import triton
import triton.language as tl

from penstock_enginecore.attention.kv_cache import FLOAT8, UNSCALED, KVScales
from penstock_enginecore.forward.cuda.kernel_api import Norm, RotaryTable
from penstock_enginecore.forward.cuda.kernels.cache import rounded
from penstock_enginecore.forward.cuda.kernels.dependent_launch import pdl_options, wait_for_inputs

_HEADS = 4
"""Number of heads per program."""


def prologue(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    norms: tuple[Norm, Norm] | None,
    rotary: RotaryTable,
    positions: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query: torch.Tensor,
    scales: KVScales = UNSCALED,
    *,
    pdl: bool = False,
) -> None:
    """Add biases, apply norms of heads, and apply rotary positions. Keys and values are written into the KV cache, and
    queries to ``query``.

    The computation is float32. Nothing is written for a token whose slot is -1. Blocks of the cache may be strided;
    other tensors are contiguous.

    Args:
        qkv: ``[tokens, (heads + 2 * kv_heads) * head size]``, the merged matrix product.
        bias: Bias of that matrix product, or None.
        norms: Norms of query heads and key heads, or None.
        rotary: Cosines and sines of the rotary positions.
        positions: int32 ``[tokens]``.
        slots: int64 ``[tokens]``, slots of the cache.
        keys: ``[blocks, kv_heads, block_size, head size]``, the cache.
        values: ``[blocks, kv_heads, block_size, head size]``, the cache.
        query: ``[tokens, heads, head size]``, receives the queries.
        scales: Scales of a float8_e4m3fn cache: keys and values are divided by the scale before they are stored, and
            clamped to the dtype's range. Caches of other dtypes have no scales.
        pdl: Whether to launch the kernel before the previous kernel has ended; see ``dependent_launch.py``.

    Raises:
        ValueError: Shapes or strides are not supported.
    """
    tokens, num_heads, size = query.shape
    num_kv_heads, block_size = keys.shape[1:3]
    half = rotary.cosines.shape[1]
    _check_shapes(qkv, query, keys, values, positions, slots, half)
    _check_strides((qkv, query, positions, slots, rotary.cosines, rotary.sines), (keys, values))
    if scales != UNSCALED and not keys.dtype == values.dtype == FLOAT8:
        raise ValueError(
            f"{scales} requires caches of float8_e4m3fn, but the caches have dtypes {keys.dtype} and {values.dtype}"
        )
    if not tokens:
        return
    groups = triton.cdiv(num_heads, _HEADS) + 2 * triton.cdiv(num_kv_heads, _HEADS)
    rest = size - 2 * half
    eps, offsets = ((0.0, 0.0), (0.0, 0.0)) if norms is None else zip(*((n.eps, n.offset) for n in norms), strict=True)
    _prologue[(tokens, groups)](
        qkv, qkv if bias is None else bias, *((qkv, qkv) if norms is None else (norms[0].weight, norms[1].weight)),
        rotary.cosines, rotary.sines, positions, slots, keys, values, query,
        num_heads, num_kv_heads, block_size, keys.stride(0), values.stride(0), *eps, *offsets,
        1.0 / scales.key, 1.0 / scales.value,
        SIZE=size, HALF=half, BIAS=bias is not None, NORMS=norms is not None, HEADS=_HEADS,
        HALF_BLOCK=triton.next_power_of_2(max(1, half)), REST_BLOCK=triton.next_power_of_2(rest) if rest else 0,
        num_warps=2, **pdl_options(pdl=pdl),
    )  # fmt: skip


def _check_shapes(
    qkv: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    half: int,
) -> None:
    tokens, num_heads, size = query.shape
    if (
        qkv.shape != (tokens, (num_heads + 2 * keys.shape[1]) * size)
        or values.shape != keys.shape
        or keys.shape[3] != size
    ):
        shapes = f"queries {list(query.shape)}, keys {list(keys.shape)}, values {list(values.shape)}"
        raise ValueError(f"the product has shape {list(qkv.shape)}, which does not match {shapes}")
    if positions.shape != (tokens,) or slots.shape != (tokens,):
        raise ValueError(
            f"positions have shape {list(positions.shape)} and slots {list(slots.shape)} for {tokens} tokens"
        )
    if 2 * half > size:
        raise ValueError(f"{2 * half} rotated elements do not fit heads of size {size}")


def _check_strides(whole: tuple[torch.Tensor, ...], caches: tuple[torch.Tensor, torch.Tensor]) -> None:
    if not all(tensor.is_contiguous() for tensor in whole):
        raise ValueError("the product, queries, positions, slots and rotary tables must be contiguous")
    if not all(cache[0].is_contiguous() for cache in caches):
        raise ValueError(f"each block must be contiguous; the strides are {[cache.stride() for cache in caches]}")


@triton.jit
def _load(qkv, bias, heads, columns, inside, token, width, SIZE: tl.constexpr, BIAS: tl.constexpr):
    """Return the elements ``columns`` of ``heads``, plus their bias, as float32 ``[heads, columns]``."""
    offsets = heads[:, None] * SIZE + columns[None, :]
    value = tl.load(qkv + token * width + offsets, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + offsets, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def _factor(weight, columns, offset, SIZE: tl.constexpr):
    return tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32)[None, :] + offset


@triton.jit
def _write(into, offsets, value, inside, inverse_scale):
    tl.store(into + offsets, rounded(value, inverse_scale, into.dtype.element_ty), mask=inside)


@triton.jit
def _prologue(
    qkv, bias, query_weight, key_weight, cosines, sines, positions, slots, keys, values, query,
    num_heads, num_kv_heads, block_size, key_stride, value_stride, query_eps, key_eps, query_offset, key_offset,
    key_inverse_scale, value_inverse_scale,
    SIZE: tl.constexpr, HALF: tl.constexpr, BIAS: tl.constexpr, NORMS: tl.constexpr, HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    group = tl.program_id(1)
    query_groups, kv_groups = tl.cdiv(num_heads, HEADS), tl.cdiv(num_kv_heads, HEADS)
    is_query = group < query_groups
    is_value = group >= query_groups + kv_groups
    turned = tl.arange(0, HALF_BLOCK)
    # Values are not rotated.
    at = tl.load(positions + token).to(tl.int64) * HALF + turned
    turns = (turned < HALF) & (not is_value) & (slot >= 0)
    cosine = tl.load(cosines + at, mask=turns, other=1.0)[None, :]
    sine = tl.load(sines + at, mask=turns, other=0.0)[None, :]
    wait_for_inputs(PDL)
    if slot < 0:
        return
    # First head of this kind (query, key or value) in the merged product, and the indices of the program's heads among
    # the heads of this kind.
    first = tl.where(is_query, 0, num_heads + tl.where(is_value, num_kv_heads, 0))
    group -= tl.where(is_query, 0, query_groups + tl.where(is_value, kv_groups, 0))
    heads = group * HEADS + tl.arange(0, HEADS)
    there = (heads < tl.where(is_query, num_heads, num_kv_heads))[:, None]
    width = (num_heads + 2 * num_kv_heads) * SIZE
    other_columns = turned + HALF
    in_half = there & (turned < HALF)[None, :]
    one = _load(qkv, bias, first + heads, turned, in_half, token, width, SIZE, BIAS)
    other = _load(qkv, bias, first + heads, other_columns, in_half, token, width, SIZE, BIAS)
    if REST_BLOCK > 0:
        rest_columns = 2 * HALF + tl.arange(0, REST_BLOCK)
        in_rest = there & (rest_columns < SIZE)[None, :]
        rest = _load(qkv, bias, first + heads, rest_columns, in_rest, token, width, SIZE, BIAS)
    if NORMS:  # noqa: SIM102 - NORMS is a compile-time constant, is_value is not
        if not is_value:
            squares = tl.sum(one * one, axis=1) + tl.sum(other * other, axis=1)
            if REST_BLOCK > 0:
                squares += tl.sum(rest * rest, axis=1)
            scale = tl.rsqrt(squares / SIZE + tl.where(is_query, query_eps, key_eps))[:, None]
            weight = query_weight if is_query else key_weight
            offset = tl.where(is_query, query_offset, key_offset)
            one *= scale * _factor(weight, turned, offset, SIZE)
            other *= scale * _factor(weight, other_columns, offset, SIZE)
            if REST_BLOCK > 0:
                rest *= scale * _factor(weight, rest_columns, offset, SIZE)
    one, other = one * cosine - other * sine, other * cosine + one * sine
    block, in_block = slot // block_size, slot % block_size
    cached = ((heads * block_size + in_block) * SIZE)[:, None]
    if is_query:
        start = ((token * num_heads + heads) * SIZE)[:, None]
        _write(query, start + turned[None, :], one, in_half, 1.0)
        _write(query, start + other_columns[None, :], other, in_half, 1.0)
        if REST_BLOCK > 0:
            _write(query, start + rest_columns[None, :], rest, in_rest, 1.0)
    elif is_value:
        start = block * value_stride + cached
        _write(values, start + turned[None, :], one, in_half, value_inverse_scale)
        _write(values, start + other_columns[None, :], other, in_half, value_inverse_scale)
        if REST_BLOCK > 0:
            _write(values, start + rest_columns[None, :], rest, in_rest, value_inverse_scale)
    else:
        start = block * key_stride + cached
        _write(keys, start + turned[None, :], one, in_half, key_inverse_scale)
        _write(keys, start + other_columns[None, :], other, in_half, key_inverse_scale)
        if REST_BLOCK > 0:
            _write(keys, start + rest_columns[None, :], rest, in_rest, key_inverse_scale)

"""What stands around the products of latent attention (MLA): from a token's compressed numbers to its queries' and to the cache.

A token's keys and values are one latent vector and a rotary part that all heads share: these are cached, and nothing else.
"""

import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernel_api import Norm, RotaryTable

_HEADS = 4
"""Heads of a program."""


def latent_prologue(
    product: torch.Tensor,
    bias: torch.Tensor | None,
    norms: tuple[Norm | None, Norm],
    rotary: RotaryTable,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    low: torch.Tensor | None,
    *,
    interleaved: bool,
) -> None:
    """From rows of ``product`` ``[tokens, query numbers + latent + rotary size]``, with ``bias``: norm queries of low rank, where
    there are ``low`` ones ``[tokens, rank]`` to write them to, and the latent (``norms``: of these), turn the rotary part by
    ``positions`` (int32 ``[tokens]``), and write latent and rotary part to ``slots`` (int64 ``[tokens]``) of ``cache`` ``[blocks,
    1, block_size, latent + rotary size]``. Nothing is written for a slot of -1.

    ``interleaved``: numbers 2i and 2i + 1 turn together; they are cached as if i and i + half did. Blocks of the cache may lie
    apart; all else is contiguous. Computed in float32. ValueError for other shapes or strides.
    """
    (tokens, width), (_, _, block_size, size) = product.shape, cache.shape
    half, latent = rotary.cosines.shape[1], norms[1].weight.shape[0]
    first = width - size
    if size != latent + 2 * half or first < 0 or (low is not None and low.shape != (tokens, first)):
        shapes = f"a cache of {list(cache.shape)}, a latent of {latent}, {2 * half} that turn"
        raise ValueError(f"a product of {list(product.shape)} for {shapes}")
    if (low is None) != (norms[0] is None) or positions.shape != (tokens,) or slots.shape != (tokens,):
        raise ValueError(
            f"positions {list(positions.shape)} and slots {list(slots.shape)} of {tokens} tokens, or norms"
        )
    _check_strides(product, positions, slots, rotary, low, cache[0])
    if not tokens:
        return
    query, key = norms
    _latent_prologue[(tokens,)](
        product, product if bias is None else bias, product if query is None else query.weight, key.weight,
        rotary.cosines, rotary.sines, positions, slots, cache, product if low is None else low,
        width, first, block_size, cache.stride(0), 0.0 if query is None else query.eps, key.eps,
        LATENT=latent, HALF=half, BIAS=bias is not None, LOW=0 if low is None else first, INTERLEAVED=interleaved,
        LOW_BLOCK=triton.next_power_of_2(max(1, first)), LATENT_BLOCK=triton.next_power_of_2(latent),
        HALF_BLOCK=triton.next_power_of_2(half), num_warps=4,
    )  # fmt: skip


def turn_queries(
    product: torch.Tensor,
    rotary: RotaryTable,
    positions: torch.Tensor,
    slots: torch.Tensor,
    query: torch.Tensor,
    *,
    interleaved: bool,
) -> None:
    """Turn the last numbers of each head of ``product`` ``[tokens, heads, head size]``, whose tokens may lie apart, by
    ``positions``, as ``latent_prologue`` does, and write them behind the latent of ``query`` ``[tokens, heads, latent + rotary
    size]``. Nothing is written for a slot of -1. ValueError for other shapes or strides.
    """
    (tokens, heads, size), half = product.shape, rotary.cosines.shape[1]
    if query.shape[:2] != (tokens, heads) or min(size, query.shape[2]) < 2 * half:
        raise ValueError(
            f"a product of {list(product.shape)} for queries {list(query.shape)}, {2 * half} of which turn"
        )
    if positions.shape != (tokens,) or slots.shape != (tokens,):
        raise ValueError(f"positions {list(positions.shape)} and slots {list(slots.shape)} of {tokens} tokens")
    _check_strides(query, positions, slots, rotary, None, product[0] if tokens else product)
    if not tokens:
        return
    _turn_queries[(tokens, triton.cdiv(heads, _HEADS))](
        product, rotary.cosines, rotary.sines, positions, slots, query, heads, product.stride(0), query.shape[2],
        SIZE=size, HALF=half, INTERLEAVED=interleaved, HEADS=_HEADS, HALF_BLOCK=triton.next_power_of_2(half), num_warps=2,
    )  # fmt: skip


def _check_strides(
    whole: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rotary: RotaryTable,
    low: torch.Tensor | None,
    part: torch.Tensor,
) -> None:
    tensors = (whole, positions, slots, rotary.cosines, rotary.sines, part, *(() if low is None else (low,)))
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(
            "products, queries, positions, slots, rotary tables and blocks of the cache must be contiguous"
        )


@triton.jit
def _normed(row, bias, weight, columns, inside, eps, SIZE: tl.constexpr, BIAS: tl.constexpr):
    value = tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    return value * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _latent_prologue(
    product, bias, query_weight, key_weight, cosines, sines, positions, slots, cache, low,
    width, first, block_size, stride, query_eps, key_eps,
    LATENT: tl.constexpr, HALF: tl.constexpr, BIAS: tl.constexpr, LOW: tl.constexpr, INTERLEAVED: tl.constexpr,
    LOW_BLOCK: tl.constexpr, LATENT_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    row = product + token * width
    if LOW > 0:
        columns = tl.arange(0, LOW_BLOCK)
        inside = columns < LOW
        value = _normed(row, bias, query_weight, columns, inside, query_eps, LOW, BIAS)
        tl.store(low + token * LOW + columns, value.to(low.dtype.element_ty), mask=inside)
    place = cache + slot // block_size * stride + slot % block_size * (LATENT + 2 * HALF)
    columns = tl.arange(0, LATENT_BLOCK)
    inside = columns < LATENT
    value = _normed(row + first, bias + first, key_weight, columns, inside, key_eps, LATENT, BIAS)
    tl.store(place + columns, value.to(cache.dtype.element_ty), mask=inside)
    turned = tl.arange(0, HALF_BLOCK)
    there = turned < HALF
    one_columns = first + LATENT + (turned * 2 if INTERLEAVED else turned)
    other_columns = one_columns + (1 if INTERLEAVED else HALF)
    one = tl.load(row + one_columns, mask=there, other=0.0).to(tl.float32)
    other = tl.load(row + other_columns, mask=there, other=0.0).to(tl.float32)
    if BIAS:
        one += tl.load(bias + one_columns, mask=there, other=0.0).to(tl.float32)
        other += tl.load(bias + other_columns, mask=there, other=0.0).to(tl.float32)
    at = tl.load(positions + token).to(tl.int64) * HALF + turned
    cosine = tl.load(cosines + at, mask=there, other=1.0)
    sine = tl.load(sines + at, mask=there, other=0.0)
    place += LATENT + turned
    tl.store(place, (one * cosine - other * sine).to(cache.dtype.element_ty), mask=there)
    tl.store(place + HALF, (other * cosine + one * sine).to(cache.dtype.element_ty), mask=there)


@triton.jit
def _turn_queries(
    product, cosines, sines, positions, slots, query, num_heads, stride, width,
    SIZE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    if tl.load(slots + token) < 0:
        return
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    turned = tl.arange(0, HALF_BLOCK)
    there = turned < HALF
    inside = (heads < num_heads)[:, None] & there[None, :]
    columns = SIZE - 2 * HALF + (turned * 2 if INTERLEAVED else turned)
    source = product + token * stride + heads[:, None] * SIZE + columns[None, :]
    one = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source + (1 if INTERLEAVED else HALF), mask=inside, other=0.0).to(tl.float32)
    at = tl.load(positions + token).to(tl.int64) * HALF + turned
    cosine = tl.load(cosines + at, mask=there, other=1.0)[None, :]
    sine = tl.load(sines + at, mask=there, other=0.0)[None, :]
    target = query + ((token * num_heads + heads) * width + width - 2 * HALF)[:, None] + turned[None, :]
    tl.store(target, (one * cosine - other * sine).to(query.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (other * cosine + one * sine).to(query.dtype.element_ty), mask=inside)

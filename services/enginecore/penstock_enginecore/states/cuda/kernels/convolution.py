"""Causal convolution over each channel. The inputs of tokens before a step come from rings (inputs after the last span)
and tails (last inputs before the end of that span).

A program computes a block of channels for a block of tokens, which may belong to different requests. If a request has
several tokens in a step, storing its inputs can overwrite rows of the ring that other programs still read. Therefore a
second kernel, ``keep_inputs``, stores these inputs. A request with one token writes a row that no program reads, so the
first kernel writes this row.
"""

import torch
import triton
import triton.language as tl

from penstock_enginecore.states.cuda.indices import StateIndices
from penstock_enginecore.states.memory import StateLayer

TOKENS = 16
CHANNELS = 64
WARPS = 4
SPAN = tl.constexpr(16)
LARGEST = tl.constexpr(3.4028234663852886e38)
"""Largest finite float32. A number counts as finite if its magnitude is at most this number."""


def convolve(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    layer: StateLayer,
    indices: StateIndices,
    *,
    activated: bool,
) -> None:
    """Compute a layer's convolution for all requests, and store the new inputs in rings and tails.

    Sums are float32, rounded to the dtype of ``weight``. In layers that have a convolution but no recurrent state, the
    tails are checked for NaN and infinity.

    Args:
        inputs: ``[tokens, channels]``, with any strides.
        weight: ``[channels, kernel]``, contiguous.
        bias: ``[channels]`` in the dtype of ``weight``, or None.
        out: ``[tokens, channels]``, contiguous.
        layer: Memory for the states of the layer.
        indices: Indices of the states of the step's requests.
        activated: Whether to apply SiLU to the sums.

    Raises:
        ValueError: A shape or layout is not supported.
    """
    tokens, channels = inputs.shape
    kernel = weight.shape[1]
    if out.shape != inputs.shape or weight.shape[0] != channels or layer.spec.channels != channels:
        raise ValueError(
            f"inputs have shape {list(inputs.shape)}, outputs {list(out.shape)} and weights {list(weight.shape)}, but the "
            f"layer has {layer.spec.channels} channels"
        )
    if not (out.is_contiguous() and weight.is_contiguous() and (bias is None or bias.is_contiguous())):
        raise ValueError("outputs, weights and bias of a convolution must be contiguous")
    if not tokens:
        return
    grid = triton.cdiv(tokens, TOKENS), triton.cdiv(channels, CHANNELS)
    of_requests = (indices.firsts, indices.starts, indices.counts, indices.rings, indices.slots)
    length = layer.inputs.shape[1]
    common = {"TOKENS": TOKENS, "CHANNELS": CHANNELS, "num_warps": WARPS}
    convolve_tokens[grid](
        inputs, weight, weight if bias is None else bias, out, layer.tails, layer.inputs,
        indices.owners, indices.writes, *of_requests, indices.broken,
        tokens, channels, length, *inputs.stride(),
        BIASED=bias is not None, ACTIVATED=activated, CHECKS=layer.closed is None, KERNEL=kernel, **common,
    )  # fmt: skip
    if not indices.decodes:
        keep_inputs[grid](
            inputs, layer.inputs, indices.owners, *of_requests[:4], tokens, channels, length, *inputs.stride(), **common
        )


@triton.jit(do_not_specialize=["tokens"])
def convolve_tokens(
    inputs, weight, bias, out, tails, kept, owners, writes, firsts, starts, counts, rings, slots, broken,
    tokens, channels, length, row_stride, channel_stride,
    BIASED: tl.constexpr, ACTIVATED: tl.constexpr, CHECKS: tl.constexpr, KERNEL: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute the convolution for a block of tokens and channels. Also writes the tails that belong to written states,
    and the new inputs of requests with one token.
    """
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (c < channels)[None, :]
    owner = tl.load(owners + t, mask=t < tokens, other=-1)
    owned = owner >= 0
    request = tl.maximum(owner, 0)
    start = tl.load(starts + request, mask=owned, other=0)
    position = start + t - tl.load(firsts + request, mask=owned, other=0)
    base = start // SPAN * SPAN
    ring = tl.load(rings + request, mask=owned, other=0).to(tl.int64)
    slot = tl.load(slots + request, mask=owned, other=0).to(tl.int64)
    target = tl.load(writes + t, mask=owned, other=-1).to(tl.int64)
    stored = (target >= 0)[:, None] & inside
    alone = owned & (tl.load(counts + request, mask=owned, other=0) == 1)
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    infinite = tl.zeros((TOKENS, CHANNELS), tl.int32)
    for tap in tl.static_range(KERNEL):
        at = position + (tap - KERNEL + 1)
        new = owned & (at >= start)
        in_ring = owned & (at < start) & (at >= base)
        in_tail = owned & (at < base)
        row = (t + (tap - KERNEL + 1)).to(tl.int64)
        value = tl.load(
            inputs + row[:, None] * row_stride + c[None, :].to(tl.int64) * channel_stride,
            mask=new[:, None] & inside, other=0.0,
        ).to(tl.float32)  # fmt: skip
        place = ring * length + tl.maximum(at, 0) % length
        of_ring = tl.load(kept + place[:, None] * channels + c[None, :], mask=in_ring[:, None] & inside, other=0.0)
        place = slot * (KERNEL - 1) + (at - base + KERNEL - 1)
        of_tail = tl.load(tails + place[:, None] * channels + c[None, :], mask=in_tail[:, None] & inside, other=0.0)
        value += of_ring.to(tl.float32) + of_tail.to(tl.float32)
        if tap > 0:
            place = target * (KERNEL - 1) + (tap - 1)
            tl.store(tails + place[:, None] * channels + c[None, :], value.to(tails.dtype.element_ty), mask=stored)
            if CHECKS:
                infinite = tl.where(stored & ~(tl.abs(value) <= LARGEST), 1, infinite)
        if tap == KERNEL - 1:
            place = ring * length + position % length
            tl.store(
                kept + place[:, None] * channels + c[None, :], value.to(kept.dtype.element_ty),
                mask=alone[:, None] & inside,
            )  # fmt: skip
        factor = tl.load(weight + c * KERNEL + tap, mask=c < channels, other=0.0).to(tl.float32)
        total += value.to(weight.dtype.element_ty).to(tl.float32) * factor[None, :]
    if BIASED:
        total += tl.load(bias + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
    result = total.to(weight.dtype.element_ty)
    if ACTIVATED:
        wide = result.to(tl.float32)
        result = (wide / (1.0 + tl.exp(-wide))).to(weight.dtype.element_ty)
    place = t.to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & inside)
    if CHECKS:
        tl.store(broken + request, 1, mask=tl.max(infinite, 1) > 0)


@triton.jit(do_not_specialize=["tokens"])
def keep_inputs(
    inputs, kept, owners, firsts, starts, counts, rings, tokens, channels, length, row_stride, channel_stride,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Store the last inputs of each request with several tokens in the request's ring."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    owner = tl.load(owners + t, mask=t < tokens, other=-1)
    owned = owner >= 0
    request = tl.maximum(owner, 0)
    start = tl.load(starts + request, mask=owned, other=0)
    count = tl.load(counts + request, mask=owned, other=0)
    position = start + t - tl.load(firsts + request, mask=owned, other=0)
    ring = tl.load(rings + request, mask=owned, other=0).to(tl.int64)
    mask = (owned & (count > 1) & (position >= start + count - SPAN))[:, None] & (c < channels)[None, :]
    value = tl.load(
        inputs + t.to(tl.int64)[:, None] * row_stride + c[None, :].to(tl.int64) * channel_stride, mask=mask, other=0.0
    )
    place = ring * length + position % length
    tl.store(kept + place[:, None] * channels + c[None, :], value.to(kept.dtype.element_ty), mask=mask)

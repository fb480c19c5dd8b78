"""Kernels of a mixture of experts around the grouped matrix products: the choice of experts, the order of rows by
expert, and the weighted sum of a token's experts.

A pair is a token and one of its experts. The index of a pair is ``token * top_k + i`` for the token's expert ``i``.
Every result has a fixed order of sums, and depends only on the token's own values.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernel_api import Routing, WeightedRows

_BLOCK = 1024
_LEAST_SUM = 1e-20
"""Added to a sum of weights before weights are divided by the sum, as in DeepSeek-V3. Only the sum 0 changes."""


def route(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    starts: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor,
    chosen: torch.Tensor,
) -> None:
    """Choose the experts of each token. If scores are equal, the expert with the lower index wins.

    A padding token gets the expert ``experts``, which does not exist. So do the missing choices of a token whose scores
    are not numbers; its weights are then NaN. All tensors are contiguous.

    Args:
        logits: ``[tokens, experts]``, output of the router.
        correction: float32 ``[experts]``, added to the scores for the choice alone, or None.
        starts: int32 ``[requests + 1]``; the last element is the number of tokens without padding.
        routing: How scores are computed and experts chosen.
        weights: float32 ``[tokens, top_k]``. Receives the weights of the chosen experts.
        chosen: int32 ``[tokens, top_k]``. Receives the chosen experts, the best expert first.

    Raises:
        ValueError: Shapes or strides are not supported.
    """
    tokens, experts = logits.shape
    if weights.shape != (tokens, routing.top_k) or chosen.shape != weights.shape:
        raise ValueError(
            f"shapes do not match: logits {list(logits.shape)}, weights {list(weights.shape)}, chosen "
            f"{list(chosen.shape)}, {routing.top_k} experts per token"
        )
    check_routing(routing, correction, experts)
    check_strides(logits, starts, weights, chosen)
    if not tokens:
        return
    constants = constants_of(routing, experts)
    _route[(tokens,)](
        logits, correction, starts, weights, chosen, len(starts) - 1, experts, routing.scale, **constants,
        num_warps=max(1, min(4, constants["EXPERTS"] // 256)),
    )  # fmt: skip


def constants_of(routing: Routing, experts: int) -> dict[str, Any]:
    """Return the compile-time constants of the choice among ``experts`` experts."""
    return {
        "TOP_K": routing.top_k, "SIGMOID": routing.sigmoid, "RENORMALIZE": routing.renormalize,
        "GROUPS": routing.groups, "KEPT": routing.kept, "GROUP_SIZE": experts // routing.groups,
        "COUNTED": routing.counted, "LEAST_SUM": _LEAST_SUM, "EXPERTS": max(16, triton.next_power_of_2(experts)),
        "CHOICES": triton.next_power_of_2(routing.top_k), "GROUPS_PADDED": triton.next_power_of_2(routing.groups),
    }  # fmt: skip


def check_routing(routing: Routing, correction: torch.Tensor | None, experts: int) -> None:
    """Raise ValueError if ``routing`` or the correction does not fit the number of experts."""
    if (correction is not None and correction.shape != (experts,)) or experts % routing.groups:
        raise ValueError(
            f"the correction has a wrong shape, or {experts} experts have no {routing.groups} equal groups"
        )


def align(chosen: torch.Tensor, ends: torch.Tensor, order: torch.Tensor) -> None:
    """Order the pairs by expert. Pairs of one expert stay in the order of tokens, and pairs without an expert are last.

    Args:
        chosen: int32 ``[tokens, top_k]``, each at least 0. Pairs whose expert is ``experts`` have no expert. All
            tensors are contiguous.
        ends: int32 ``[experts]``. Receives the end of each expert's rows.
        order: int32 ``[tokens * top_k]``. Receives the index of the pair of each row.

    Raises:
        ValueError: Shapes or strides are not supported.
    """
    if order.shape != (chosen.numel(),):
        raise ValueError(f"shapes do not match: chosen {list(chosen.shape)}, order {list(order.shape)}")
    check_strides(chosen, ends, order)
    # One more program orders the pairs without an expert.
    block = min(_BLOCK, max(16, triton.next_power_of_2(chosen.numel())))
    _align[(len(ends) + 1,)](chosen, ends, order, chosen.numel(), len(ends), BLOCK=block)


def weighted_sum(x: WeightedRows, out: torch.Tensor) -> None:
    """Multiply each token's rows by their weights, and write the sum over the token's rows to ``out`` ``[tokens,
    width]``. The order of the sum is fixed. ``add_rms_norm`` computes the same sum before a norm.

    Raises:
        ValueError: Shapes or strides are not supported.
    """
    x.check()
    tokens, width = x.shape
    if out.shape != x.shape:
        raise ValueError(f"the sum has shape {list(x.shape)}, but the output has shape {list(out.shape)}")
    check_strides(out)
    if not tokens:
        return
    _weighted_rows[(tokens, triton.cdiv(width, _BLOCK))](
        x.rows, x.weights, x.shared, out, width, TOP_K=x.weights.shape[1], BLOCK=_BLOCK
    )


def check_strides(*tensors: torch.Tensor) -> None:
    """Raise ValueError if a tensor is not contiguous."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("all tensors of a mixture of experts must be contiguous")


@triton.jit(do_not_specialize=["requests"])
def _route(
    logits, correction, starts, weights, chosen, requests, experts, scale,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    GROUP_SIZE: tl.constexpr, COUNTED: tl.constexpr, LEAST_SUM: tl.constexpr, EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr, GROUPS_PADDED: tl.constexpr,
):  # fmt: skip
    """Choose the experts of one token."""
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    index = tl.arange(0, EXPERTS)[None, :]
    value = tl.load(logits + token[:, None] * experts + index, mask=index < experts, other=0.0).to(tl.float32)
    choose(
        value, correction, starts, weights, chosen, token, token >= 0, requests, experts, scale, TOP_K, SIGMOID,
        RENORMALIZE, GROUPS, KEPT, GROUP_SIZE, COUNTED, LEAST_SUM, 1, EXPERTS, CHOICES, GROUPS_PADDED,
    )  # fmt: skip


@triton.jit
def choose(
    value, correction, starts, weights, chosen, token, there, requests, experts, scale,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    GROUP_SIZE: tl.constexpr, COUNTED: tl.constexpr, LEAST_SUM: tl.constexpr, TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr, CHOICES: tl.constexpr, GROUPS_PADDED: tl.constexpr,
):  # fmt: skip
    """Choose the experts of ``TOKENS`` tokens from the logits ``value`` ``[TOKENS, EXPERTS]``, and store the results of
    the tokens for which ``there`` is true.

    Logits of experts that do not exist are ignored. ``COUNTED`` is the number of best scores, 1 or 2, whose sum is the
    score of a group.
    """
    index = tl.arange(0, EXPERTS)[None, :]
    value = tl.where(index < experts, value, float("-inf"))
    if SIGMOID:
        scores = tl.sigmoid(value)
    else:
        powers = tl.exp(value - tl.max(value, 1)[:, None])
        scores = powers / tl.sum(powers, 1)[:, None]
    ranked = scores
    if correction is not None:
        ranked += tl.load(correction + index, mask=index < experts, other=0.0).to(tl.float32)
    free = tl.broadcast_to(index < experts, (TOKENS, EXPERTS))
    if KEPT < GROUPS:
        ranked = _of_best_groups(ranked, free, index, GROUPS, KEPT, GROUP_SIZE, COUNTED, TOKENS, EXPERTS, GROUPS_PADDED)
    choice = tl.arange(0, CHOICES)[None, :]
    found = tl.zeros((TOKENS, CHOICES), tl.int32)
    factors = tl.zeros((TOKENS, CHOICES), tl.float32)
    for i in range(TOP_K):
        first = _best(ranked, free, index, EXPERTS)
        factor = tl.sum(tl.where(index == first, scores, 0.0), 1)[:, None]
        factor = tl.where(first < EXPERTS, factor, float("nan"))
        found = tl.where(choice == i, tl.minimum(first, experts), found)
        factors = tl.where(choice == i, factor, factors)
        free = free & (index != first)
    if RENORMALIZE:
        factors = factors / (tl.sum(factors, 1)[:, None] + LEAST_SUM)
    found = tl.where((token < tl.load(starts + requests))[:, None], found, experts)
    place = token[:, None] * TOP_K + choice
    stored = there[:, None] & (choice < TOP_K)
    tl.store(weights + place, factors * scale, mask=stored)
    tl.store(chosen + place, found, mask=stored)


@triton.jit
def _best(values, free, index, SIZE: tl.constexpr):
    """Return for each row the lowest index of the largest value among those with ``free``, or ``SIZE`` if no value is a
    number. All shapes are ``[rows, columns]``, and the result has one column.
    """
    best = tl.max(tl.where(free, values, float("-inf")), 1)[:, None]
    return tl.min(tl.where(free & (values == best), index, SIZE), 1)[:, None]


@triton.jit
def _of_best_groups(
    ranked, known, index, GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUP_SIZE: tl.constexpr, COUNTED: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, GROUPS_PADDED: tl.constexpr,
):  # fmt: skip
    """Return ``ranked`` with minus infinity for experts outside the ``KEPT`` best groups of their token."""
    group = index // GROUP_SIZE
    nth = tl.arange(0, GROUPS_PADDED)[None, :]
    of_groups = tl.full((TOKENS, GROUPS_PADDED), float("-inf"), tl.float32)
    for i in range(GROUPS):
        own = known & (group == i)
        total = tl.max(tl.where(own, ranked, float("-inf")), 1)[:, None]
        if COUNTED == 2:
            others = own & (index != _best(ranked, own, index, EXPERTS))
            total += tl.max(tl.where(others, ranked, float("-inf")), 1)[:, None]
        of_groups = tl.where(nth == i, total, of_groups)
    left = tl.broadcast_to(nth < GROUPS, (TOKENS, GROUPS_PADDED))
    kept = tl.zeros((TOKENS, EXPERTS), tl.int1)
    for _ in range(KEPT):
        first = _best(of_groups, left, nth, GROUPS_PADDED)
        kept = kept | (group == first)
        left = left & (nth != first)
    return tl.where(kept, ranked, float("-inf"))


@triton.jit(do_not_specialize=["pairs"])
def _align(chosen, ends, order, pairs, experts, BLOCK: tl.constexpr):
    """Order the pairs of one expert. The pairs of experts with a lower index come before."""
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, BLOCK):
        ids = tl.load(chosen + start + index, mask=start + index < pairs, other=experts + 1)
        lower += (ids < expert).to(tl.int32)
    place = tl.sum(lower, 0)
    for start in range(0, pairs, BLOCK):
        ids = tl.load(chosen + start + index, mask=start + index < pairs, other=experts + 1)
        own = (ids == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(own, 0) - 1, start + index, mask=ids == expert)
        place += tl.sum(own, 0)
    if expert < experts:
        tl.store(ends + expert, place)


@triton.jit
def summed(x, weights, shared, token, columns, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Return the elements ``columns`` ``[BLOCK]`` of one token's weighted sum, as float32. The loop is unrolled, so that
    the loads of all rows overlap.
    """
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        weight = tl.load(weights + token * TOP_K + i)
        row = x + (token * TOP_K + i) * width
        total += weight * tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
    if shared is not None:
        total += tl.load(shared + token * width + columns, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def _weighted_rows(x, weights, shared, out, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Compute ``BLOCK`` elements of one token's weighted sum."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = summed(x, weights, shared, token, columns, width, TOP_K, BLOCK)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)

"""Router of a mixture of experts for few tokens, in one kernel: the router's product, the choice of experts, and the
order of rows by expert.

Programs divide the experts and the columns of the product. The program that finishes last in a block of tokens adds the
parts of each logit in order, and chooses the experts of the tokens. The program that does this last for the step orders
the pairs. Programs count themselves with atomics, so that a program knows that it is the last, and no program waits for
another. The results do not depend on which program is the last. The number of parts depends only on the shape of the
weight, so the results of a token do not depend on other tokens.
"""

import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernel_api import MAX_ASSIGNED_PAIRS, MAX_ASSIGNED_TOKENS, Routing
from penstock_enginecore.forward.cuda.kernels.mixture import check_routing, check_strides, choose, constants_of

_TOKENS, _EXPERTS, _COLUMNS = 16, 32, 128
"""Size of a program's tile: tokens, experts, and columns per iteration."""
_MOST_PARTS = 8
_FEW_PAIRS = 128
COUNTERS = MAX_ASSIGNED_TOKENS // _TOKENS + 1
"""Number of counters: one for each block of tokens, and one for the step."""


def assign(
    x: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    starts: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor,
    ends: torch.Tensor,
    order: torch.Tensor,
    counters: torch.Tensor,
) -> None:
    """Choose the experts of each token, and order the pairs by expert, like ``route`` and ``align`` after a product.

    Sums of the product are float32. Unless ``routing.float32`` is true, logits are rounded to the dtype of ``x``.

    Args:
        x: ``[tokens, in_features]``, at most ``MAX_ASSIGNED_TOKENS`` tokens. All tensors are contiguous.
        router: ``[experts, in_features]``, weight of the router.
        bias: ``[experts]``, added to the product, or None.
        correction: See ``route``.
        starts: See ``route``.
        routing: How scores are computed and experts chosen.
        weights: float32 ``[tokens, top_k]``. Receives the weights of the chosen experts.
        ends: int32 ``[experts]``. Receives the end of each expert's rows.
        order: int32 ``[tokens * top_k]``. Receives the index of the pair of each row.
        counters: int32 ``[COUNTERS]``, all 0, and again 0 afterwards.

    Raises:
        ValueError: Shapes or strides are not supported.
    """
    (tokens, in_features), experts = x.shape, len(router)
    pairs = tokens * routing.top_k
    if (
        router.shape != (experts, in_features)
        or (bias is not None and bias.shape != (experts,))
        or weights.shape != (tokens, routing.top_k)
        or ends.shape != (experts,)
        or order.shape != (pairs,)
        or counters.shape != (COUNTERS,)
    ):
        shapes = {"input": x, "router": router, "weights": weights, "ends": ends, "order": order, "counters": counters}
        raise ValueError("shapes do not match: " + ", ".join(f"{key} {list(one.shape)}" for key, one in shapes.items()))
    if tokens > MAX_ASSIGNED_TOKENS or pairs > MAX_ASSIGNED_PAIRS:
        raise ValueError(
            f"{tokens} tokens with {routing.top_k} experts each are more than {MAX_ASSIGNED_TOKENS} tokens or "
            f"{MAX_ASSIGNED_PAIRS} pairs"
        )
    check_routing(routing, correction, experts)
    check_strides(x, router, starts, weights, ends, order, counters, *([] if bias is None else [bias]))
    if not tokens:
        ends.zero_()
        return
    constants = constants_of(routing, experts)
    part, parts = _parts(in_features)
    logits = x.new_empty(parts, tokens, experts, dtype=torch.float32)
    chosen = x.new_empty(pairs, dtype=torch.int32)
    _assign[triton.cdiv(tokens, _TOKENS), triton.cdiv(experts, _EXPERTS), parts](
        x, router, bias, correction, starts, logits, chosen, counters, weights, ends, order, tokens, len(starts) - 1,
        experts, in_features, routing.scale, ROUNDS=not routing.float32, PART=part, PARTS=parts, TOKENS=_TOKENS,
        BLOCK_N=_EXPERTS, BLOCK_K=_COLUMNS, PAIRS=_FEW_PAIRS if pairs <= _FEW_PAIRS else MAX_ASSIGNED_PAIRS,
        STEP_COUNTER=COUNTERS - 1, **constants, num_warps=4 if constants["EXPERTS"] <= _FEW_EXPERTS else 8,
    )  # fmt: skip


_FEW_EXPERTS = 128


def _parts(in_features: int) -> tuple[int, int]:
    """Return the number of columns of a part of the product, and the number of parts."""
    blocks = triton.cdiv(in_features, _COLUMNS)
    part = triton.cdiv(blocks, _MOST_PARTS) * _COLUMNS
    return part, triton.cdiv(in_features, part)


@triton.jit(do_not_specialize=["tokens", "requests"])
def _assign(
    x, router, bias, correction, starts, logits, chosen, counters, weights, ends, order, tokens, requests, experts,
    in_features, scale,
    ROUNDS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PAIRS: tl.constexpr, STEP_COUNTER: tl.constexpr, TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    GROUP_SIZE: tl.constexpr, COUNTED: tl.constexpr, LEAST_SUM: tl.constexpr, EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr, GROUPS_PADDED: tl.constexpr,
):  # fmt: skip
    """Compute one part of the logits of a block of tokens and experts. The last programs do the rest."""
    block = tl.program_id(0)
    token = block * TOKENS + tl.arange(0, TOKENS)
    there = token < tokens
    expert = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(2)
    total = _part_of_logits(
        x, router, tl.minimum(token, tokens - 1), tl.minimum(expert, experts - 1), part * PART,
        tl.minimum(part * PART + PART, in_features), in_features, TOKENS, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    place = (part * tokens + token[:, None]) * experts + expert[None, :]
    tl.store(logits + place, total, mask=there[:, None] & (expert < experts)[None, :])
    if _is_last(counters + block, tl.num_programs(1) * PARTS):
        index = tl.arange(0, EXPERTS)[None, :]
        inside = there[:, None] & (index < experts)
        value = tl.zeros((TOKENS, EXPERTS), tl.float32)
        for i in tl.range(0, PARTS, loop_unroll_factor=4):  # loads of four parts overlap
            value += tl.load(logits + (i * tokens + token[:, None]) * experts + index, mask=inside, other=0.0)
        if bias is not None:
            value += tl.load(bias + index, mask=index < experts, other=0.0).to(tl.float32)
        if ROUNDS:
            value = value.to(x.dtype.element_ty).to(tl.float32)
        choose(
            value, correction, starts, weights, chosen, token, there, requests, experts, scale, TOP_K, SIGMOID,
            RENORMALIZE, GROUPS, KEPT, GROUP_SIZE, COUNTED, LEAST_SUM, TOKENS, EXPERTS, CHOICES, GROUPS_PADDED,
        )  # fmt: skip
        if _is_last(counters + STEP_COUNTER, tl.num_programs(0)):
            _order(chosen, ends, order, tokens * TOP_K, experts, EXPERTS, PAIRS)


@triton.jit
def _part_of_logits(
    x, router, token, expert, begin, end, in_features,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the products of ``token`` ``[TOKENS]`` and ``expert`` ``[BLOCK_N]`` over the columns from ``begin`` to
    ``end``.
    """
    k = tl.arange(0, BLOCK_K)
    left_tile = x + token[:, None].to(tl.int64) * in_features + k[None, :]
    right_tile = router + expert[None, :].to(tl.int64) * in_features + k[:, None]
    total = tl.zeros((TOKENS, BLOCK_N), tl.float32)
    for start in range(begin, end, BLOCK_K):
        inside = start + k < end
        left = tl.load(left_tile + start, mask=inside[None, :], other=0.0)
        right = tl.load(right_tile + start, mask=inside[:, None], other=0.0)
        if x.dtype.element_ty != router.dtype.element_ty:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def _is_last(counter, programs):
    """Count this program, and return whether it is the last of ``programs``. Then all threads of this program see all
    values that the counted programs have stored before, and the counter is 0 again.
    """
    # The barrier orders the stores of all threads before the atomic, which one thread executes.
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _order(chosen, ends, order, pairs, experts, EXPERTS: tl.constexpr, PAIRS: tl.constexpr):
    """Order up to ``PAIRS`` pairs like ``_align``. The row of a pair is the number of pairs that come before it."""
    pair, index = tl.arange(0, PAIRS), tl.arange(0, EXPERTS)
    key = tl.load(chosen + pair, mask=pair < pairs, other=0) * PAIRS + pair
    row = tl.zeros((PAIRS,), tl.int32)
    end = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, pairs, 16):
        other = start + tl.arange(0, 16)
        of_other = tl.load(chosen + other, mask=other < pairs, other=experts + 1)
        row += tl.sum(((of_other * PAIRS + other)[None, :] < key[:, None]).to(tl.int32), 1)
        end += tl.sum((of_other[None, :] <= index[:, None]).to(tl.int32), 1)
    tl.store(order + row, pair, mask=pair < pairs)
    tl.store(ends + index, end, mask=index < experts)

"""Attention over a latent cache (MLA). For each token the cache has one vector that all heads use as key and value. The
rotary part of the vector is used only as key.

Callers pass queries that are projected to the latent space, and project the outputs back from this space. A program
reads the latent once for all its heads, as in DeepSeek-V2 (2024). The keys of requests with few new tokens are split
into pieces, and the results of the pieces are merged, as in ``attention.py``.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernel_api import GroupInputs, Norm, RotaryTable, Scratch
from penstock_enginecore.forward.cuda.kernels.attention import (
    LONGEST_SPLIT,
    accumulate,
    key_pieces,
    merge_pieces,
    piece_size,
    programs,
)
from penstock_enginecore.forward.cuda.kernels.configurations import MIN_BLOCK_SIZE, Latent, device_name, latent_tiles
from penstock_enginecore.forward.cuda.kernels.dependent_launch import pdl_options, wait_for_inputs
from penstock_enginecore.forward.cuda.kernels.work import find

# Operations between the matrix products of latent attention (MLA): they turn a token's compressed elements into its
# queries and its entry in the cache.
#
# The cache has one latent vector per token, and a rotary part that all heads use.

_HEADS = 4
"""Number of heads per program."""


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
    pdl: bool = False,
) -> None:
    """Apply the norms of the low-rank queries and of the latent, and rotate the rotary part. Then write the latent and
    the rotary part into the cache.

    The computation is float32. Nothing is written for a token whose slot is -1. Blocks of the cache may be strided;
    other tensors are contiguous.

    Args:
        product: ``[tokens, query elements + latent + rotary size]``, the output of the layer's first matrix product.
        bias: Bias of that matrix product, or None.
        norms: Norm of the low-rank queries, and norm of the latent. The first norm is None for a model without low-rank
            queries.
        rotary: Cosines and sines of the rotary positions.
        positions: int32 ``[tokens]``.
        slots: int64 ``[tokens]``, slots of the cache.
        cache: ``[blocks, 1, block_size, latent + rotary size]``.
        low: ``[tokens, rank]``, receives the low-rank queries, or None for a model without low-rank queries.
        interleaved: Whether elements 2i and 2i + 1 are rotated together. The cache stores these two elements at i and i
            + half.
        pdl: Whether to launch the kernel before the previous kernel has ended; see ``dependent_launch.py``.

    Raises:
        ValueError: Shapes or strides are not supported.
    """
    (tokens, width), (_, _, block_size, size) = product.shape, cache.shape
    half, latent = rotary.cosines.shape[1], norms[1].size
    first = width - size
    if size != latent + 2 * half or first < 0 or (low is not None and low.shape != (tokens, first)):
        shapes = f"a cache of {list(cache.shape)}, a latent of {latent}, {2 * half} rotated elements"
        raise ValueError(f"the product has shape {list(product.shape)}, which does not match {shapes}")
    if (low is None) != (norms[0] is None) or positions.shape != (tokens,) or slots.shape != (tokens,):
        raise ValueError(
            f"`positions` has shape {list(positions.shape)} and `slots` has shape {list(slots.shape)} for {tokens} tokens, "
            "or only one of `low` and the norm of low-rank queries is given"
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
        HALF_BLOCK=triton.next_power_of_2(half), num_warps=4, **pdl_options(pdl=pdl),
    )  # fmt: skip


def turn_queries(
    product: torch.Tensor,
    rotary: RotaryTable,
    positions: torch.Tensor,
    slots: torch.Tensor,
    query: torch.Tensor,
    *,
    interleaved: bool,
    pdl: bool = False,
) -> None:
    """Rotate the last elements of each query head in ``product``, and write the rotated elements after the latent part
    of ``query``; see ``latent_prologue``.

    ``product`` is ``[tokens, heads, head size]``, where tokens may be strided. ``query`` is ``[tokens, heads, latent +
    rotary size]``. Nothing is written for a token whose slot is -1. ``pdl`` selects dependent launch, see
    ``dependent_launch.py``. Raises ValueError for other shapes or strides.
    """
    (tokens, heads, size), half = product.shape, rotary.cosines.shape[1]
    if query.shape[:2] != (tokens, heads) or min(size, query.shape[2]) < 2 * half:
        raise ValueError(
            f"the product has shape {list(product.shape)}, the queries {list(query.shape)}, with {2 * half} rotated elements"
        )
    if positions.shape != (tokens,) or slots.shape != (tokens,):
        raise ValueError(
            f"positions have shape {list(positions.shape)} and slots {list(slots.shape)} for {tokens} tokens"
        )
    _check_strides(query, positions, slots, rotary, None, product[0] if tokens else product)
    if not tokens:
        return
    _turn_queries[(tokens, triton.cdiv(heads, _HEADS))](
        product, rotary.cosines, rotary.sines, positions, slots, query, heads, product.stride(0), query.shape[2],
        SIZE=size, HALF=half, INTERLEAVED=interleaved, HEADS=_HEADS, HALF_BLOCK=triton.next_power_of_2(half), num_warps=2,
        **pdl_options(pdl=pdl),
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
    LOW_BLOCK: tl.constexpr, LATENT_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    turned = tl.arange(0, HALF_BLOCK)
    there = turned < HALF
    at = tl.load(positions + token).to(tl.int64) * HALF + turned
    cosine = tl.load(cosines + at, mask=there & (slot >= 0), other=1.0)
    sine = tl.load(sines + at, mask=there & (slot >= 0), other=0.0)
    wait_for_inputs(PDL)
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
    one_columns = first + LATENT + (turned * 2 if INTERLEAVED else turned)
    other_columns = one_columns + (1 if INTERLEAVED else HALF)
    one = tl.load(row + one_columns, mask=there, other=0.0).to(tl.float32)
    other = tl.load(row + other_columns, mask=there, other=0.0).to(tl.float32)
    if BIAS:
        one += tl.load(bias + one_columns, mask=there, other=0.0).to(tl.float32)
        other += tl.load(bias + other_columns, mask=there, other=0.0).to(tl.float32)
    place += LATENT + turned
    tl.store(place, (one * cosine - other * sine).to(cache.dtype.element_ty), mask=there)
    tl.store(place + HALF, (other * cosine + one * sine).to(cache.dtype.element_ty), mask=there)


@triton.jit
def _turn_queries(
    product, cosines, sines, positions, slots, query, num_heads, stride, width,
    SIZE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    turned = tl.arange(0, HALF_BLOCK)
    there = turned < HALF
    at = tl.load(positions + token).to(tl.int64) * HALF + turned
    cosine = tl.load(cosines + at, mask=there & (slot >= 0), other=1.0)[None, :]
    sine = tl.load(sines + at, mask=there & (slot >= 0), other=0.0)[None, :]
    wait_for_inputs(PDL)
    if slot < 0:
        return
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = (heads < num_heads)[:, None] & there[None, :]
    columns = SIZE - 2 * HALF + (turned * 2 if INTERLEAVED else turned)
    source = product + token * stride + heads[:, None] * SIZE + columns[None, :]
    one = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source + (1 if INTERLEAVED else HALF), mask=inside, other=0.0).to(tl.float32)
    target = query + ((token * num_heads + heads) * width + width - 2 * HALF)[:, None] + turned[None, :]
    tl.store(target, (one * cosine - other * sine).to(query.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (other * cosine + one * sine).to(query.dtype.element_ty), mask=inside)


MAX_LATENT, MAX_ROTARY = 512, 64
"""Largest latent size and largest rotary size that the kernel's tiles support."""
_PIECES = 512
"""Maximum number of pieces into which the keys of one decode are split, over all heads. The size of the scratch memory
depends on this number.
"""
_MERGED_AT_ONCE = 16


def latent_pieces(heads: int) -> int:
    """Return the maximum number of pieces per head into which the keys of one decode are split."""
    return max(1, _PIECES // int(triton.next_power_of_2(heads)))


def attend_latent(
    query: torch.Tensor,
    cache: torch.Tensor,
    group: GroupInputs,
    scaling: float,
    out: torch.Tensor,
    scratch: Scratch,
    *,
    invariant: bool = False,
    pdl: bool = False,
) -> None:
    """Compute causal attention over the latent cache. Padding rows of ``out`` are unchanged.

    Args:
        query: ``[tokens, heads, latent + rotary size]``.
        cache: ``[blocks, 1, block_size, latent + rotary size]``.
        group: Positions of the step's tokens in the KV cache.
        scaling: Factor of the attention scores.
        out: ``[tokens, heads, latent]``.
        scratch: Memory for the intermediate results of ``latent_pieces`` pieces of keys per query.
        invariant: Whether to split no keys. Then a token's result is bit-identical in a decode and in a prompt.
        pdl: Whether to launch kernels before the previous kernel has ended; see ``dependent_launch.py``.

    Raises:
        ValueError: Layout or alignment of a tensor is not supported.
    """
    _check(query, cache, out, group, scratch)
    heads, requests = query.shape[1], len(group.seq_lens)
    rows = int(triton.next_power_of_2(heads))
    tiled = partial(latent_tiles, itemsize=cache.element_size(), device=device_name(cache.device), invariant=invariant)
    # Prompts use the largest tiles. If the model has few heads, a tile contains several queries.
    large = tiled(1 << 30)
    longest = 0 if invariant else 1 if group.decodes_only else LONGEST_SPLIT
    split = tiled(rows) if longest == 1 else large
    launch = partial(_launch, query, cache, group, scaling, out, scratch, longest=longest, piece=split.piece, pdl=pdl)
    if longest > 0:
        pieces = latent_pieces(heads)
        parts = min(pieces, triton.cdiv(group.block_table.shape[1] * cache.shape[2], split.piece))
        queries = requests if longest == 1 else min(len(query), len(scratch.total))
        launch(split, (requests if longest == 1 else requests + len(query)) * parts, splits=True)
        merge_pieces[(queries, heads)](
            scratch.sums, scratch.largest, scratch.total, group.query_start_loc, group.seq_lens, None, out,
            requests, len(scratch.total), 1.0, HEADS=heads, SIZE_V=out.shape[2],
            PADDED_V=max(16, triton.next_power_of_2(out.shape[2])), WINDOW=0, ATTENTION_CHUNK=0,
            REQUESTS=max(16, triton.next_power_of_2(requests)), PIECE=split.piece, MAX_PIECES=pieces, LONGEST=longest,
            FEWEST=1, AT_ONCE=_MERGED_AT_ONCE, num_warps=4, **pdl_options(pdl=pdl),
        )  # fmt: skip
    if longest != 1:
        launch(large, len(query) // (large.rows // min(rows, large.rows)) + requests, splits=False)


def _launch(
    query: torch.Tensor,
    cache: torch.Tensor,
    group: GroupInputs,
    scaling: float,
    out: torch.Tensor,
    scratch: Scratch,
    tiles: Latent,
    items: int,
    *,
    splits: bool,
    longest: int,
    piece: int,
    pdl: bool,
) -> None:
    """Launch the kernel for requests whose keys are split, or for the other requests. ``items`` is the maximum number
    of work items (pieces of keys, or tiles of queries) for each tile of heads.
    """
    heads, latent, requests = query.shape[1], out.shape[2], len(group.seq_lens)
    head_rows = min(int(triton.next_power_of_2(heads)), tiles.rows)
    constants: dict[str, Any] = {
        "HEADS": heads, "LATENT": latent, "ROTARY": query.shape[2] - latent,
        "PADDED": max(16, triton.next_power_of_2(latent)),
        "PADDED_ROTARY": max(16, triton.next_power_of_2(query.shape[2] - latent)), "BLOCK_SIZE": cache.shape[2],
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "REQUESTS": max(16, triton.next_power_of_2(requests)), "ROWS": tiles.rows, "HEAD_ROWS": head_rows,
        "BLOCK_N": tiles.block_n, "SPLITS": splits, "PIECE": piece, "MAX_PIECES": latent_pieces(heads),
        "LONGEST": longest,
    }  # fmt: skip
    count = min(items * triton.cdiv(heads, head_rows), programs(query.device))
    latent_attention[(count,)](
        query, cache, group.block_table, group.query_start_loc, group.seq_lens, out,
        scratch.sums, scratch.largest, scratch.total,
        requests, len(scratch.total), group.block_table.stride(0), cache.stride(0), scaling,
        **constants, num_warps=tiles.warps, num_stages=tiles.stages, **pdl_options(pdl=pdl),
    )  # fmt: skip


def _check(query: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, group: GroupInputs, scratch: Scratch) -> None:
    tokens, heads, size = query.shape
    if cache.shape[1] != 1 or cache.shape[3] != size or out.shape[:2] != (tokens, heads) or out.shape[2] >= size:
        raise ValueError(
            f"shapes do not match: queries {list(query.shape)}, cache {list(cache.shape)}, output {list(out.shape)}"
        )
    if out.shape[2] > MAX_LATENT or size - out.shape[2] > MAX_ROTARY:
        raise ValueError(
            f"each token has a latent of {out.shape[2]} elements and {size - out.shape[2]} rotated elements; the limits are "
            f"{MAX_LATENT} elements of the latent and {MAX_ROTARY} rotated elements"
        )
    if not (query.is_contiguous() and out.is_contiguous() and cache[0].is_contiguous()):
        raise ValueError("queries, outputs and blocks of the cache of attention must be contiguous")
    if cache.shape[2] < MIN_BLOCK_SIZE:
        raise ValueError(
            f"Triton attention needs blocks of at least {MIN_BLOCK_SIZE} tokens, but blocks have {cache.shape[2]}"
        )
    if cache.stride(0) % 16 or cache.data_ptr() % 16:
        raise ValueError(
            f"the address {cache.data_ptr()} and block stride {cache.stride(0)} of the cache must be multiples of 16"
        )
    requests, pieces, of_heads = scratch.largest.shape
    if requests < len(group.seq_lens) or (pieces, of_heads) != (latent_pieces(heads), heads):
        raise ValueError(
            f"the scratch memory has space for {requests} requests of {of_heads} heads, but the step has "
            f"{len(group.seq_lens)} requests of {heads} heads"
        )


@triton.jit
def load_latents(
    cache, table, stride, positions, there,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Load ``SIZE`` elements, starting at element ``FIRST``, of the cache rows at ``positions``. Masked rows, and
    columns beyond ``SIZE``, are zeros.
    """
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    rows = blocks * stride + positions % BLOCK_SIZE * WIDTH + FIRST
    numbers = tl.arange(0, PADDED)
    mask = there[:, None] & (numbers < SIZE)[None, :]
    return tl.load(cache + rows[:, None] + numbers[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_requests", "capacity"])
def latent_attention(
    query, cache, block_table, query_start_loc, seq_lens, out, sums_out, largest_out, total_out,
    num_requests, capacity, table_stride, stride, scaling,
    HEADS: tl.constexpr, LATENT: tl.constexpr, ROTARY: tl.constexpr, PADDED: tl.constexpr, PADDED_ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PRECISION: tl.constexpr, REQUESTS: tl.constexpr, ROWS: tl.constexpr,
    HEAD_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PIECE: tl.constexpr, MAX_PIECES: tl.constexpr,
    LONGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute attention in tiles of ``ROWS`` rows. If ``SPLITS`` is true, compute the requests whose keys are split,
    otherwise the other requests; see ``key_pieces``.

    Row i of a tile is query ``i // HEAD_ROWS`` and head ``i % HEAD_ROWS`` of the tile's heads. If ``SPLITS`` is true, a
    tile attends to one piece of the keys. The softmax statistics and weighted sums of the piece are stored, and another
    kernel merges them.
    """
    WIDTH: tl.constexpr = LATENT + ROTARY
    QUERIES: tl.constexpr = ROWS // HEAD_ROWS
    HEAD_TILES: tl.constexpr = (HEADS + HEAD_ROWS - 1) // HEAD_ROWS
    requests = tl.arange(0, REQUESTS)
    known = requests < num_requests
    begins = tl.load(query_start_loc + requests, mask=known, other=0)
    ends = tl.load(query_start_loc + requests + 1, mask=known, other=0)
    new = ends - begins
    counts = tl.cdiv(new, QUERIES)
    if LONGEST > 0:
        lengths = tl.load(seq_lens + requests, mask=known, other=0)
        split, pieces, rows_upto = key_pieces(new, lengths, capacity, 0, 0, PIECE, MAX_PIECES, LONGEST)
        counts = tl.where(split, pieces * counts, 0) if SPLITS else tl.where(split, 0, counts)
    upto = tl.cumsum(counts, 0)
    num_items = tl.sum(counts, 0) * HEAD_TILES
    rows = tl.arange(0, ROWS)
    numbers = tl.arange(0, PADDED)
    turned = tl.arange(0, PADDED_ROTARY)
    wait_for_inputs(PDL)
    for nth in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item = num_items - 1 - nth  # start with the last tiles, which have the most keys
        request, part = find(counts, upto, requests, item // HEAD_TILES)
        first_query = tl.load(query_start_loc + request)
        num_queries = tl.load(query_start_loc + request + 1) - first_query
        length = tl.load(seq_lens + request)
        begin = part * 0
        piece = part * 0
        tile = part
        if SPLITS:
            num_tiles = tl.cdiv(num_queries, QUERIES)
            piece = part // num_tiles
            tile = part % num_tiles
        queries = tile * QUERIES + rows // HEAD_ROWS
        end = length - num_queries + tl.minimum((tile + 1) * QUERIES, num_queries)
        if SPLITS:
            size = piece_size(length, PIECE, MAX_PIECES)
            begin = piece * size
            end = tl.minimum(begin + size, end)
        heads = item % HEAD_TILES * HEAD_ROWS + rows % HEAD_ROWS
        mine = (heads < HEADS) & (queries < num_queries)
        at = length - num_queries + queries
        place = (first_query + queries).to(tl.int64) * HEADS + heads
        q = tl.load(
            query + place[:, None] * WIDTH + numbers[None, :],
            mask=mine[:, None] & (numbers < LATENT)[None, :],
            other=0.0,
        )
        q_turned = tl.load(
            query + place[:, None] * WIDTH + LATENT + turned[None, :],
            mask=mine[:, None] & (turned < ROTARY)[None, :],
            other=0.0,
        )
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, PADDED], tl.float32)
        table = block_table + request.to(tl.int64) * table_stride
        for start in range(begin, end, BLOCK_N):
            positions = start + tl.arange(0, BLOCK_N)
            seen = positions < end
            latent = load_latents(cache, table, stride, positions, seen, BLOCK_SIZE, WIDTH, 0, LATENT, PADDED)
            k = load_latents(cache, table, stride, positions, seen, BLOCK_SIZE, WIDTH, LATENT, ROTARY, PADDED_ROTARY)
            dots = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
            dots = tl.dot(q_turned, tl.trans(k), dots, input_precision=PRECISION) * scaling
            # This condition also masks keys at or after ``end`` in all rows that are stored, because pieces are
            # multiples of BLOCK_N.
            weighed = tl.where(positions[None, :] <= at[:, None], dots * 1.4426950408889634, float("-inf"))
            largest, total, sums = accumulate(weighed, largest, total, sums, latent, PRECISION)
        inside = mine[:, None] & (numbers < LATENT)[None, :]
        if SPLITS:
            row = request
            if LONGEST > 1:
                row = tl.sum(tl.where(requests == request, rows_upto - new, 0), 0)
            place = ((row + queries).to(tl.int64) * MAX_PIECES + piece) * HEADS + heads
            tl.store(largest_out + place, largest, mask=mine)
            tl.store(total_out + place, total, mask=mine)
            tl.store(sums_out + place[:, None] * LATENT + numbers[None, :], sums, mask=inside)
        else:
            # Load the index of the first query again here. Otherwise this index would occupy registers during the loop
            # over keys.
            place = (tl.load(query_start_loc + request, volatile=True) + queries).to(tl.int64) * HEADS + heads
            result = sums / tl.where(mine, total, 1.0)[:, None]
            tl.store(out + place[:, None] * LATENT + numbers[None, :], result.to(out.dtype.element_ty), mask=inside)

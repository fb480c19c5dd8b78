"""Paged attention in Triton.

Requests with one new token and requests with several new tokens use different kernels, which are launched one after the
other. The launch grids depend only on padded sizes, and each program finds its work in tensors on the device. Therefore
CUDA graphs can capture the kernels.

A request with one new token is a decode. The keys of a decode are split into pieces at positions that depend only on
the request's length, as in FlashDecoding (Dao et al., 2023). The results of the pieces are merged in order. Therefore
the result of a decode is bit-identical alone and in a batch. Elements of an fp8 cache are converted to the queries'
dtype without loss before they are multiplied. Therefore all sums are float32, and no second level of sums is needed.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.attention.kv_cache import UNSCALED, KVScales
from penstock_enginecore.forward.cuda.kernel_api import GroupInputs
from penstock_enginecore.forward.cuda.kernels.configurations import (
    MIN_BLOCK_SIZE,
    AttentionTiles,
    attention_tiles,
    device_name,
)

# Functions that several attention kernels use: assignment of work to programs, visible keys, and a running softmax over
# the keys.


@triton.jit
def first_key(position, WINDOW: tl.constexpr, ATTENTION_CHUNK: tl.constexpr):
    """Return the first position that a query at ``position`` attends to. A ``WINDOW`` or ``ATTENTION_CHUNK`` of 0 means
    that the model has no sliding window or no attention chunks.
    """
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position - WINDOW + 1)
    if ATTENTION_CHUNK > 0:
        first = tl.maximum(first, position // ATTENTION_CHUNK * ATTENTION_CHUNK)
    return first


@triton.jit
def find(counts, upto, indices, piece):
    """Return the index of the owner (for example the request) of ``piece``, and the index of ``piece`` among this
    owner's pieces.

    Owner i has ``counts[i]`` consecutive pieces. ``upto`` has the running sums of ``counts``.
    """
    owner = tl.sum((upto <= piece).to(tl.int32), 0)
    return owner, piece - tl.sum(tl.where(indices < owner, counts, 0), 0)


@triton.jit
def load_pages(
    cache, table, stride, head, positions, there,
    BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Load the rows at ``positions`` of one head from the paged cache, as ``[positions, PADDED]``. Rows whose ``there``
    is false are not read.

    Rows that are not read, and columns beyond ``SIZE``, are zeros.
    """
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    rows = blocks * stride + (head * BLOCK_SIZE + positions % BLOCK_SIZE) * SIZE
    numbers = tl.arange(0, PADDED)
    mask = there[:, None] & (numbers < SIZE)[None, :]
    return tl.load(cache + rows[:, None] + numbers[None, :], mask=mask, other=0.0)


@triton.jit
def scores(query, keys, scaling, visible, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Return attention scores for a softmax with base 2: the softmax weight of a key is ``2 ** score``. Keys that are
    not ``visible`` get -inf.
    """
    dots = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scaling
    if SOFTCAP > 0:
        small = tl.exp(tl.abs(dots) * (-2.0 / SOFTCAP))  # never overflows
        capped = SOFTCAP * (1.0 - small) / (1.0 + small)
        dots = tl.where(dots < 0, -capped, capped)
    return tl.where(visible, dots * 1.4426950408889634, float("-inf"))


@triton.jit
def accumulate(weighed, largest, total, sums, values, PRECISION: tl.constexpr):
    """Add keys to a running softmax: the largest score so far, the total of the weights, and the weighted sums of the
    values.

    Fully masked keys leave a row's accumulator bit-identical. Therefore the first tile may begin before the first
    visible key.
    """
    new = tl.maximum(largest, tl.max(weighed, 1))
    base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(weighed - base[:, None])
    shrink = tl.exp2(largest - base)
    sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision=PRECISION)
    return new, total * shrink + tl.sum(weights, 1), sums


# Attention of requests with one new token. The keys of a request are split into pieces. One program computes each
# piece, then the results are merged.


@triton.jit
def piece_size(length, PIECE: tl.constexpr, MAX_PIECES: tl.constexpr):
    """Return the number of keys in each piece: the smallest multiple of ``PIECE`` that splits ``length`` keys into at
    most ``MAX_PIECES`` pieces.
    """
    return tl.maximum(tl.cdiv(tl.cdiv(length, PIECE), MAX_PIECES), 1) * PIECE


@triton.jit(do_not_specialize=["num_requests"])
def decode_pieces(
    query, keys, values, block_table, query_start_loc, seq_lens, sums_out, largest_out, total_out,
    num_requests, table_stride, key_stride, value_stride, scaling,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_V: tl.constexpr,
    PADDED: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    ATTENTION_CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, REQUESTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PIECE: tl.constexpr, MAX_PIECES: tl.constexpr,
):  # fmt: skip
    """Compute the softmax statistics and the weighted sums of values of each piece of keys, for the query heads of one
    KV head. The number of query heads is padded to ``ROWS``.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    requests = tl.arange(0, REQUESTS)
    there = requests < num_requests
    begins = tl.load(query_start_loc + requests, mask=there, other=0)
    ends = tl.load(query_start_loc + requests + 1, mask=there, other=0)
    lengths = tl.where(ends - begins == 1, tl.load(seq_lens + requests, mask=there, other=0), 0)
    sizes = piece_size(lengths, PIECE, MAX_PIECES)
    counts = tl.cdiv(lengths, sizes) - first_key(lengths - 1, WINDOW, ATTENTION_CHUNK) // sizes
    upto = tl.cumsum(counts, 0)
    rows = tl.arange(0, ROWS)
    numbers = tl.arange(0, PADDED)
    for item in range(tl.program_id(0), tl.sum(counts, 0) * KV_HEADS, tl.num_programs(0)):
        head = item % KV_HEADS
        request, nth = find(counts, upto, requests, item // KV_HEADS)
        length = tl.load(seq_lens + request)
        token = tl.load(query_start_loc + request).to(tl.int64)
        first = first_key(length - 1, WINDOW, ATTENTION_CHUNK)
        size = piece_size(length, PIECE, MAX_PIECES)
        piece = first // size + nth
        heads = head * GROUP + rows
        mine = rows < GROUP
        q = tl.load(
            query + (token * HEADS + heads)[:, None] * SIZE + numbers[None, :],
            mask=mine[:, None] & (numbers < SIZE)[None, :],
            other=0.0,
        )
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, PADDED_V], tl.float32)
        end = tl.minimum((piece + 1) * size, length)
        table = block_table + request.to(tl.int64) * table_stride
        for begin in range(tl.maximum(piece * size, first // BLOCK_N * BLOCK_N), end, BLOCK_N):
            positions = begin + tl.arange(0, BLOCK_N)
            visible = (positions >= first) & (positions < end)
            k = load_pages(keys, table, key_stride, head, positions, visible, BLOCK_SIZE, SIZE, PADDED).to(q.dtype)
            weighed = scores(q, k, scaling, visible[None, :], SOFTCAP, PRECISION)
            v = load_pages(values, table, value_stride, head, positions, visible, BLOCK_SIZE, SIZE_V, PADDED_V)
            largest, total, sums = accumulate(weighed, largest, total, sums, v.to(q.dtype), PRECISION)
        place = (request.to(tl.int64) * MAX_PIECES + piece) * HEADS + heads
        sizes_v = tl.arange(0, PADDED_V)
        tl.store(largest_out + place, largest, mask=mine)
        tl.store(total_out + place, total, mask=mine)
        tl.store(
            sums_out + place[:, None] * SIZE_V + sizes_v[None, :],
            sums,
            mask=mine[:, None] & (sizes_v < SIZE_V)[None, :],
        )


@triton.jit
def merge_pieces(
    sums_in, largest_in, total_in, query_start_loc, seq_lens, sinks, out, value_scale,
    HEADS: tl.constexpr, SIZE_V: tl.constexpr, PADDED_V: tl.constexpr, WINDOW: tl.constexpr,
    ATTENTION_CHUNK: tl.constexpr, PIECE: tl.constexpr, MAX_PIECES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merge the results of the pieces of keys of one head of one request, in order of position."""
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.load(query_start_loc + request).to(tl.int64)
    length = tl.load(seq_lens + request)
    if (tl.load(query_start_loc + request + 1) - token == 1) & (length > 0):
        size = piece_size(length, PIECE, MAX_PIECES)
        numbers = tl.arange(0, PADDED_V)
        largest = tl.full([], float("-inf"), tl.float32)
        total = tl.zeros([], tl.float32)
        if sinks is not None:
            largest = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            total += 1.0
        sums = tl.zeros([PADDED_V], tl.float32)
        first = first_key(length - 1, WINDOW, ATTENTION_CHUNK) // size
        last = tl.cdiv(length, size)
        for begin in range(first // AT_ONCE * AT_ONCE, last, AT_ONCE):
            pieces = begin + tl.arange(0, AT_ONCE)
            written = (pieces >= first) & (pieces < last)
            place = (request * MAX_PIECES + pieces) * HEADS + head
            of_piece = tl.load(largest_in + place, mask=written, other=float("-inf"))
            new = tl.maximum(largest, tl.max(of_piece, 0))
            base = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp2(of_piece - base)
            shrink = tl.exp2(largest - base)
            totals = tl.load(total_in + place, mask=written, other=0.0)
            parts = tl.load(
                sums_in + place[:, None] * SIZE_V + numbers[None, :],
                mask=written[:, None] & (numbers < SIZE_V)[None, :],
                other=0.0,
            )
            total = total * shrink + tl.sum(totals * weights, 0)
            sums = sums * shrink + tl.sum(parts * weights[:, None], 0)
            largest = new
        result = sums / total * value_scale
        place = out + (token * HEADS + head) * SIZE_V + numbers
        tl.store(place, result.to(out.dtype.element_ty), mask=numbers < SIZE_V)


# Attention of requests with several new tokens. For each of its queries, a tile contains all query heads of one KV
# head.


@triton.jit(do_not_specialize=["num_requests"])
def prefill_tiles(
    query, keys, values, block_table, query_start_loc, seq_lens, sinks, key_ends, out,
    num_requests, table_stride, key_stride, value_stride, scaling, value_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_V: tl.constexpr,
    PADDED: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    ATTENTION_CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, REQUESTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FEWEST: tl.constexpr,
):  # fmt: skip
    """Compute attention in tiles of ``BLOCK_M`` rows, for requests with at least ``FEWEST`` new tokens.

    Row i of a tile is query ``i // group`` and head ``i % group``, where ``group`` is the number of query heads per KV
    head. The last rows may be padding.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    requests = tl.arange(0, REQUESTS)
    there = requests < num_requests
    begins = tl.load(query_start_loc + requests, mask=there, other=0)
    ends = tl.load(query_start_loc + requests + 1, mask=there, other=0)
    counts = tl.where(ends - begins >= FEWEST, tl.cdiv(ends - begins, QUERIES), 0)
    upto = tl.cumsum(counts, 0)
    num_items = tl.sum(counts, 0) * KV_HEADS
    rows = tl.arange(0, BLOCK_M)
    numbers = tl.arange(0, PADDED)
    sizes_v = tl.arange(0, PADDED_V)
    for nth in range(tl.program_id(0), num_items, tl.num_programs(0)):
        item = num_items - 1 - nth  # start with the last tiles, which have the most keys
        head = item % KV_HEADS
        request, tile = find(counts, upto, requests, item // KV_HEADS)
        begin = tl.load(query_start_loc + request)
        num_queries = tl.load(query_start_loc + request + 1) - begin
        before = tl.load(seq_lens + request) - num_queries
        queries = tile * QUERIES + rows // GROUP
        mine = (rows < QUERIES * GROUP) & (queries < num_queries)
        heads = head * GROUP + rows % GROUP
        place = (begin + queries).to(tl.int64) * HEADS + heads
        q = tl.load(
            query + place[:, None] * SIZE + numbers[None, :],
            mask=mine[:, None] & (numbers < SIZE)[None, :],
            other=0.0,
        )
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if sinks is not None:
            largest = tl.load(sinks + heads, mask=mine, other=0.0).to(tl.float32) * 1.4426950408889634
            total += 1.0
        sums = tl.zeros([BLOCK_M, PADDED_V], tl.float32)
        at = before + queries
        first_of_row = first_key(at, WINDOW, ATTENTION_CHUNK)
        first = first_key(before + tile * QUERIES, WINDOW, ATTENTION_CHUNK)
        end = before + tl.minimum((tile + 1) * QUERIES, num_queries)
        end_of_row = at + 1
        if key_ends is not None:
            end_of_row = tl.load(key_ends + begin + queries, mask=mine, other=0)
            end = tl.max(end_of_row, 0)
        table = block_table + request.to(tl.int64) * table_stride
        for start in range(first // BLOCK_N * BLOCK_N, end, BLOCK_N):
            positions = start + tl.arange(0, BLOCK_N)
            seen = (positions >= first) & (positions < end)
            visible = (positions[None, :] < end_of_row[:, None]) & (positions[None, :] >= first_of_row[:, None])
            visible &= mine[:, None] & seen[None, :]
            k = load_pages(keys, table, key_stride, head, positions, seen, BLOCK_SIZE, SIZE, PADDED).to(q.dtype)
            weighed = scores(q, k, scaling, visible, SOFTCAP, PRECISION)
            v = load_pages(values, table, value_stride, head, positions, seen, BLOCK_SIZE, SIZE_V, PADDED_V)
            largest, total, sums = accumulate(weighed, largest, total, sums, v.to(q.dtype), PRECISION)
        result = sums / tl.where(mine, total, 1.0)[:, None] * value_scale
        tl.store(
            out + place[:, None] * SIZE_V + sizes_v[None, :],
            result.to(out.dtype.element_ty),
            mask=mine[:, None] & (sizes_v < SIZE_V)[None, :],
        )


_ITEMS_PER_REQUEST = 256
"""Approximate number of pieces into which the keys of one long decode are split, over all KV heads. The number is
slightly larger than the number of multiprocessors of a GPU.
"""
_PROGRAMS_PER_PROCESSOR = 2
_INTERPRETED_PROGRAMS = 4
_MERGED_AT_ONCE = 16


def pieces_per_request(kv_heads: int) -> int:
    """Return the maximum number of pieces per KV head into which the keys of one decode are split."""
    return max(16, int(triton.next_power_of_2(_ITEMS_PER_REQUEST // kv_heads)))


@dataclass(frozen=True, slots=True)
class Scratch:
    """Intermediate results, float32, for each piece of keys of each decode.

    Attributes:
        sums: ``[requests, pieces, heads, head size]``, weighted sums of the values.
        largest: ``[requests, pieces, heads]``, the largest attention scores.
        total: ``[requests, pieces, heads]``, sums of the softmax weights.
    """

    sums: torch.Tensor
    largest: torch.Tensor
    total: torch.Tensor

    @classmethod
    def allocate(cls, requests: int, pieces: int, heads: int, head_size_v: int, device: torch.device) -> "Scratch":
        """Return scratch memory for steps of up to ``requests`` requests, with at most ``pieces`` pieces of keys per
        request.
        """
        shape = (requests, pieces, heads)
        sums = torch.empty(*shape, head_size_v, dtype=torch.float32, device=device)
        return cls(sums, *torch.empty(2, *shape, dtype=torch.float32, device=device))


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    group: GroupInputs,
    params: AttentionParams,
    scratch: Scratch,
    scales: KVScales = UNSCALED,
    *,
    decodes_only: bool = False,
    invariant: bool = False,
) -> None:
    """Compute causal attention over a paged KV cache into ``out``. Padding rows of ``out`` are unchanged.

    Args:
        query: ``[tokens, heads, head size]``.
        keys: ``[blocks, kv_heads, block_size, head size]``.
        values: ``[blocks, kv_heads, block_size, head_size_v]``.
        out: ``[tokens, heads, head_size_v]``.
        group: Positions of the step's tokens in the KV cache.
        params: Scaling, window and other parameters.
        scratch: Memory for intermediate results.
        scales: Scales of an fp8 cache.
        decodes_only: Whether each request has at most one new token, so that the kernel for longer requests need not be
            launched.
        invariant: Whether to compute requests with one new token with the kernel for several new tokens. Then a token's
            result is bit-identical in a decode and in a prompt.

    Raises:
        ValueError: Layout or alignment of a tensor is not supported.
    """
    _check(query, keys, values, out, group, scratch)
    largest = max(triton.next_power_of_2(query.shape[2]), triton.next_power_of_2(out.shape[2]))
    tiles = attention_tiles(largest, keys.element_size(), device_name(keys.device))
    if invariant:
        _prefill(query, keys, values, out, group, params, scales, tiles, fewest=1)
        return
    _decode(query, keys, values, out, group, params, scratch, scales, tiles)
    if not decodes_only:
        _prefill(query, keys, values, out, group, params, scales, tiles, fewest=2)


def _decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    group: GroupInputs,
    params: AttentionParams,
    scratch: Scratch,
    scales: KVScales,
    tiles: AttentionTiles,
) -> None:
    heads, kv_heads, requests = query.shape[1], keys.shape[1], len(group.seq_lens)
    constants = _constants(query, keys, out, params)
    pieces = pieces_per_request(kv_heads)
    longest = group.block_table.shape[1] * keys.shape[2]
    items = requests * min(pieces, triton.cdiv(longest, tiles.decode.piece)) * kv_heads
    decode_pieces[(min(items, programs(query.device)),)](
        query, keys, values, group.block_table, group.query_start_loc, group.seq_lens,
        scratch.sums, scratch.largest, scratch.total,
        requests, group.block_table.stride(0), keys.stride(0), values.stride(0), params.scaling * scales.key,
        **constants, REQUESTS=max(16, triton.next_power_of_2(requests)),
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)), BLOCK_N=tiles.decode.block_n,
        PIECE=tiles.decode.piece, MAX_PIECES=pieces, num_warps=tiles.decode.warps, num_stages=tiles.decode.stages,
    )  # fmt: skip
    shared = ("HEADS", "SIZE_V", "PADDED_V", "WINDOW", "ATTENTION_CHUNK")
    merge_pieces[(requests, heads)](
        scratch.sums, scratch.largest, scratch.total, group.query_start_loc, group.seq_lens, params.sinks, out, scales.value,
        **{name: constants[name] for name in shared}, PIECE=tiles.decode.piece, MAX_PIECES=pieces,
        AT_ONCE=_MERGED_AT_ONCE, num_warps=4,
    )  # fmt: skip


def _prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    group: GroupInputs,
    params: AttentionParams,
    scales: KVScales,
    tiles: AttentionTiles,
    *,
    fewest: int,
) -> None:
    """Launch the kernel for requests with at least ``fewest`` new tokens."""
    kv_heads, requests = keys.shape[1], len(group.seq_lens)
    group_size = query.shape[1] // kv_heads
    block_m = max(tiles.prefill.block_m, triton.next_power_of_2(group_size))
    items = (len(query) // (block_m // group_size) + requests) * kv_heads
    prefill_tiles[(min(items, programs(query.device)),)](
        query, keys, values, group.block_table, group.query_start_loc, group.seq_lens, params.sinks, group.key_ends, out,
        requests, group.block_table.stride(0), keys.stride(0), values.stride(0), params.scaling * scales.key, scales.value,
        **_constants(query, keys, out, params), REQUESTS=max(16, triton.next_power_of_2(requests)),
        BLOCK_M=block_m, BLOCK_N=tiles.prefill.block_n, FEWEST=fewest,
        num_warps=tiles.prefill.warps, num_stages=tiles.prefill.stages,
    )  # fmt: skip


def _constants(query: torch.Tensor, keys: torch.Tensor, out: torch.Tensor, params: AttentionParams) -> dict[str, Any]:
    """Return the compile-time constants of an attention kernel."""
    size, size_v = query.shape[2], out.shape[2]
    return {
        "HEADS": query.shape[1],
        "KV_HEADS": keys.shape[1],
        "SIZE": size,
        "SIZE_V": size_v,
        "PADDED": max(16, triton.next_power_of_2(size)),
        "PADDED_V": max(16, triton.next_power_of_2(size_v)),
        "BLOCK_SIZE": keys.shape[2],
        "WINDOW": params.sliding_window or 0,
        "ATTENTION_CHUNK": params.attention_chunk or 0,
        "SOFTCAP": params.softcap or 0.0,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }


def programs(device: torch.device) -> int:
    """Return the number of programs among which a launch divides the work."""
    if device.type == "cpu":
        return _INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * _PROGRAMS_PER_PROCESSOR


def _check(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    group: GroupInputs,
    scratch: Scratch,
) -> None:
    """Raise ValueError if the layout of a tensor is not supported. Triton pipelines copies only if it knows that
    addresses and strides are multiples of 16.
    """
    if not (query.is_contiguous() and out.is_contiguous()):
        raise ValueError("queries and outputs of attention must be contiguous")
    if query.shape[1] % keys.shape[1]:
        raise ValueError(
            f"the number of query heads, {query.shape[1]}, is not a multiple of the number of KV heads, {keys.shape[1]}"
        )
    if keys.shape[2] < MIN_BLOCK_SIZE:
        raise ValueError(
            f"Triton attention needs blocks of at least {MIN_BLOCK_SIZE} tokens, but blocks have {keys.shape[2]}"
        )
    for name, cache in (("keys", keys), ("values", values)):
        if not cache[0].is_contiguous():
            raise ValueError(f"the {name} of a block must be contiguous")
        if cache.stride(0) % 16 or cache.data_ptr() % 16:
            raise ValueError(
                f"the address {cache.data_ptr()} and block stride {cache.stride(0)} of {name} must be multiples of 16"
            )
    requests, _, heads = scratch.largest.shape
    if requests < len(group.seq_lens) or heads != query.shape[1] or scratch.sums.shape[3] != out.shape[2]:
        raise ValueError(
            f"the scratch memory has space for {requests} requests of {heads} heads with values of size "
            f"{scratch.sums.shape[3]}, but the step has {len(group.seq_lens)} requests of {query.shape[1]} heads with "
            f"values of size {out.shape[2]}"
        )

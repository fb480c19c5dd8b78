"""Paged attention in Triton.

The launch grids depend only on padded sizes, and each program finds its work in tensors on the device. Therefore CUDA
graphs can capture the kernels.

Two kernels divide the requests of a step. ``split_keys`` computes requests with one new token, and requests with a few
new tokens behind many keys. It splits the keys of a request into pieces, as in FlashDecoding (Dao et al., 2023), and
``merge_pieces`` merges the results of the pieces in order. ``prefill_tiles`` computes all other requests, one tile of
queries per program. ``key_pieces`` decides from the lengths of the requests which kernel computes a request. Elements
of an fp8 cache are converted to the queries' dtype without loss before they are multiplied. Therefore all sums are
float32, and no second level of sums is needed.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.attention.kv_cache import UNSCALED, KVScales
from penstock_enginecore.forward.cuda.kernel_api import GroupInputs, Scratch
from penstock_enginecore.forward.cuda.kernels.configurations import (
    MIN_BLOCK_SIZE,
    AttentionTiles,
    attention_tiles,
    device_name,
)
from penstock_enginecore.forward.cuda.kernels.dependent_launch import pdl_options, wait_for_inputs
from penstock_enginecore.forward.cuda.kernels.work import find, load_lengths

# Functions that several attention kernels use: visible keys, and a running softmax over the keys.


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


# Attention over split keys. One program computes each piece of the keys of a request, then the results are merged.


@triton.jit
def piece_size(length, PIECE: tl.constexpr, MAX_PIECES: tl.constexpr):
    """Return the number of keys in each piece: the smallest multiple of ``PIECE`` that splits ``length`` keys into at
    most ``MAX_PIECES`` pieces.
    """
    return tl.maximum(tl.cdiv(tl.cdiv(length, PIECE), MAX_PIECES), 1) * PIECE


@triton.jit
def first_piece(position, WINDOW: tl.constexpr, ATTENTION_CHUNK: tl.constexpr):
    """Return where the pieces of a request begin whose first new token is at ``position``: at a multiple of any tile."""
    return first_key(position, WINDOW, ATTENTION_CHUNK) // 128 * 128


@triton.jit
def key_pieces(
    new, lengths, capacity,
    WINDOW: tl.constexpr, ATTENTION_CHUNK: tl.constexpr, PIECE: tl.constexpr, MAX_PIECES: tl.constexpr,
    LONGEST: tl.constexpr,
):  # fmt: skip
    """Return for each request whether its keys are split, its number of pieces, and the row of the scratch memory after
    its last row.

    The keys of a request with one new token are split. The keys of a request with at most ``LONGEST`` new tokens are
    split if they make several pieces and the request's rows fit into ``capacity`` rows. If ``LONGEST`` is 0, no keys
    are split. If it is 1, the row of a request is its index plus 1.
    """
    begins = first_piece(lengths - new, WINDOW, ATTENTION_CHUNK)
    pieces = tl.cdiv(lengths - begins, piece_size(lengths - begins, PIECE, MAX_PIECES))
    split = (new > 0) & (new <= LONGEST) & ((new == 1) | (pieces > 1))
    upto = tl.cumsum(tl.where(split, new, 0), 0)
    return split & (upto <= capacity), pieces, upto


@triton.jit(do_not_specialize=["num_requests", "capacity"])
def split_keys(
    query, keys, values, block_table, query_start_loc, seq_lens, sinks, key_ends, sums_out, largest_out, total_out, out,
    num_requests, capacity, table_stride, key_stride, value_stride, scaling, value_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_V: tl.constexpr,
    PADDED: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    ATTENTION_CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, REQUESTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PIECE: tl.constexpr, MAX_PIECES: tl.constexpr, LONGEST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute attention of each tile of queries to each piece of keys, for requests whose keys are split.

    Row i of a tile is query ``i // group`` and head ``i % group`` of one KV head, padded to ``ROWS`` rows. The result
    of a request with one piece is stored in ``out``. For other requests, the softmax statistics and the weighted sums
    of values of each piece are stored in the scratch memory.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = ROWS // GROUP if LONGEST > 1 else 1
    requests = tl.arange(0, REQUESTS)
    there = requests < num_requests
    _, new, lengths = load_lengths(query_start_loc, seq_lens, requests, there)
    wait_for_inputs(PDL)
    split, pieces, rows_upto = key_pieces(new, lengths, capacity, WINDOW, ATTENTION_CHUNK, PIECE, MAX_PIECES, LONGEST)
    counts = tl.where(split, pieces * tl.cdiv(new, QUERIES), 0)
    upto = tl.cumsum(counts, 0)
    rows = tl.arange(0, ROWS)
    numbers = tl.arange(0, PADDED)
    sizes_v = tl.arange(0, PADDED_V)
    for item in range(tl.program_id(0), tl.sum(counts, 0) * KV_HEADS, tl.num_programs(0)):
        head = item % KV_HEADS
        request, nth = find(counts, upto, requests, item // KV_HEADS)
        length = tl.load(seq_lens + request)
        token = tl.load(query_start_loc + request)
        piece = nth
        queries = 0
        before = length - 1
        first = first_key(before, WINDOW, ATTENTION_CHUNK)
        last = length
        heads = head * GROUP + rows
        mine = rows < GROUP
        if LONGEST > 1:
            num_queries = tl.load(query_start_loc + request + 1) - token
            num_tiles = tl.cdiv(num_queries, QUERIES)
            piece = nth // num_tiles
            tile = nth % num_tiles
            queries = tile * QUERIES + rows // GROUP
            before = length - num_queries
            first = first_key(before + tile * QUERIES, WINDOW, ATTENTION_CHUNK)
            last = before + tl.minimum((tile + 1) * QUERIES, num_queries)
            heads = head * GROUP + rows % GROUP
            mine = (rows < QUERIES * GROUP) & (queries < num_queries)
        begin = first_piece(before, WINDOW, ATTENTION_CHUNK)
        size = piece_size(length - begin, PIECE, MAX_PIECES)
        place = (token + queries).to(tl.int64) * HEADS + heads
        q = tl.load(
            query + place[:, None] * SIZE + numbers[None, :],
            mask=mine[:, None] & (numbers < SIZE)[None, :],
            other=0.0,
        )
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        alone = length - begin <= size
        if sinks is not None:
            sink = tl.load(sinks + heads, mask=mine, other=0.0).to(tl.float32) * 1.4426950408889634
            largest = tl.where(alone, sink, largest)
            total = tl.where(alone, total + 1.0, total)
        sums = tl.zeros([ROWS, PADDED_V], tl.float32)
        if LONGEST > 1:
            at = before + queries
            first_of_row = first_key(at, WINDOW, ATTENTION_CHUNK)
            end_of_row = at + 1
            if key_ends is not None:
                end_of_row = tl.load(key_ends + token + queries, mask=mine, other=0)
                last = tl.max(end_of_row, 0)
        end = tl.minimum(begin + (piece + 1) * size, last)
        table = block_table + request.to(tl.int64) * table_stride
        for start in range(tl.maximum(begin + piece * size, first // BLOCK_N * BLOCK_N), end, BLOCK_N):
            positions = start + tl.arange(0, BLOCK_N)
            seen = (positions >= first) & (positions < end)
            visible = seen[None, :]
            if LONGEST > 1:
                visible &= (positions[None, :] < end_of_row[:, None]) & (positions[None, :] >= first_of_row[:, None])
            k = load_pages(keys, table, key_stride, head, positions, seen, BLOCK_SIZE, SIZE, PADDED).to(q.dtype)
            weighed = scores(q, k, scaling, visible, SOFTCAP, PRECISION)
            v = load_pages(values, table, value_stride, head, positions, seen, BLOCK_SIZE, SIZE_V, PADDED_V)
            largest, total, sums = accumulate(weighed, largest, total, sums, v.to(q.dtype), PRECISION)
        inside = mine[:, None] & (sizes_v < SIZE_V)[None, :]
        if alone:
            result = sums / tl.where(mine, total, 1.0)[:, None] * value_scale
            tl.store(out + place[:, None] * SIZE_V + sizes_v[None, :], result.to(out.dtype.element_ty), mask=inside)
        else:
            row = request
            if LONGEST > 1:
                row = tl.sum(tl.where(requests == request, rows_upto - new, 0), 0)
            place = ((row + queries).to(tl.int64) * MAX_PIECES + piece) * HEADS + heads
            tl.store(largest_out + place, largest, mask=mine)
            tl.store(total_out + place, total, mask=mine)
            tl.store(sums_out + place[:, None] * SIZE_V + sizes_v[None, :], sums, mask=inside)


@triton.jit(do_not_specialize=["num_requests", "capacity"])
def merge_pieces(
    sums_in, largest_in, total_in, query_start_loc, seq_lens, sinks, out, num_requests, capacity, value_scale,
    HEADS: tl.constexpr, SIZE_V: tl.constexpr, PADDED_V: tl.constexpr, WINDOW: tl.constexpr,
    ATTENTION_CHUNK: tl.constexpr, REQUESTS: tl.constexpr, PIECE: tl.constexpr, MAX_PIECES: tl.constexpr,
    LONGEST: tl.constexpr, FEWEST: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the results of the pieces of one head and one row of the scratch memory, in order of position. Requests
    with fewer than ``FEWEST`` pieces are left alone.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    if LONGEST > 1:
        requests = tl.arange(0, REQUESTS)
        there = requests < num_requests
        begins, news, lengths = load_lengths(query_start_loc, seq_lens, requests, there)
        splits, counts, upto = key_pieces(news, lengths, capacity, WINDOW, ATTENTION_CHUNK, PIECE, MAX_PIECES, LONGEST)
        request = tl.sum((upto <= row).to(tl.int32), 0)
        own = requests == request
        pieces = tl.sum(tl.where(own & splits, counts, 0), 0)
        token = tl.sum(tl.where(own, begins + row - (upto - news), 0), 0)
    else:
        token = tl.load(query_start_loc + row)
        new = tl.load(query_start_loc + row + 1) - token
        length = tl.load(seq_lens + row)
        length -= first_piece(length - 1, WINDOW, ATTENTION_CHUNK)
        pieces = tl.where(new == 1, tl.cdiv(length, piece_size(length, PIECE, MAX_PIECES)), 0)
    wait_for_inputs(PDL)
    if pieces >= FEWEST:
        numbers = tl.arange(0, PADDED_V)
        largest = tl.full([], float("-inf"), tl.float32)
        total = tl.zeros([], tl.float32)
        if sinks is not None:
            largest = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            total += 1.0
        sums = tl.zeros([PADDED_V], tl.float32)
        for begin in range(0, pieces, AT_ONCE):
            places = begin + tl.arange(0, AT_ONCE)
            written = places < pieces
            place = (row.to(tl.int64) * MAX_PIECES + places) * HEADS + head
            of_piece = tl.load(largest_in + place, mask=written, other=float("-inf"))
            new_largest = tl.maximum(largest, tl.max(of_piece, 0))
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
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
            largest = new_largest
        result = sums / total * value_scale
        place = out + (token.to(tl.int64) * HEADS + head) * SIZE_V + numbers
        tl.store(place, result.to(out.dtype.element_ty), mask=numbers < SIZE_V)


# Attention of requests whose keys are not split. For each of its queries, a tile contains all query heads of one KV
# head.


@triton.jit(do_not_specialize=["num_requests", "capacity"])
def prefill_tiles(
    query, keys, values, block_table, query_start_loc, seq_lens, sinks, key_ends, out,
    num_requests, capacity, table_stride, key_stride, value_stride, scaling, value_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_V: tl.constexpr,
    PADDED: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    ATTENTION_CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, REQUESTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PIECE: tl.constexpr, MAX_PIECES: tl.constexpr, LONGEST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute attention in tiles of ``BLOCK_M`` rows, for requests whose keys are not split; see ``key_pieces``.

    Row i of a tile is query ``i // group`` and head ``i % group``, where ``group`` is the number of query heads per KV
    head. The last rows may be padding.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    requests = tl.arange(0, REQUESTS)
    there = requests < num_requests
    _, new, lengths = load_lengths(query_start_loc, seq_lens, requests, there)
    counts = tl.cdiv(new, QUERIES)
    if LONGEST > 0:
        split, _, _ = key_pieces(new, lengths, capacity, WINDOW, ATTENTION_CHUNK, PIECE, MAX_PIECES, LONGEST)
        counts = tl.where(split, 0, counts)
    upto = tl.cumsum(counts, 0)
    num_items = tl.sum(counts, 0) * KV_HEADS
    rows = tl.arange(0, BLOCK_M)
    numbers = tl.arange(0, PADDED)
    sizes_v = tl.arange(0, PADDED_V)
    wait_for_inputs(PDL)
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
"""Approximate number of pieces of the keys of one long decode, over all KV heads. A GPU has fewer multiprocessors."""
LONGEST_SPLIT = 128
"""Maximum number of new tokens of a request whose keys are split. More tokens make enough tiles to use a GPU."""
_SPLIT_ROWS = 32
"""Number of rows of a tile in steps that are not only decodes. Its number of keys is half that of a decode's tile."""
_MANY_ITEMS = 512
"""Number of requests times KV heads that use a GPU without splitting keys. This is about twice the number of programs."""
_LARGE_PIECE = 2048
"""Number of keys per piece for so many requests. Shorter pieces would fill the pipeline of loads again and again."""
_PROGRAMS_PER_PROCESSOR = 2
_INTERPRETED_PROGRAMS = 4
_MERGED_AT_ONCE = 16


def pieces_per_request(kv_heads: int) -> int:
    """Return the maximum number of pieces per KV head into which the keys of one decode are split."""
    return max(16, int(triton.next_power_of_2(_ITEMS_PER_REQUEST // kv_heads)))


def piece_of(piece: int, requests: int, kv_heads: int, *, decodes_only: bool) -> int:
    """Return the number of keys per piece for a step of ``requests`` requests, a power of two that includes padding.
    ``piece`` is the number for few requests.

    Steps that are not only decodes may have four times as many padded requests as requests.
    """
    items = requests * kv_heads // (1 if decodes_only else 4)
    return max(piece, _LARGE_PIECE) if items >= _MANY_ITEMS else piece


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
    invariant: bool = False,
    pdl: bool = False,
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
        invariant: Whether to split no keys. Then a token's result is bit-identical in a decode and in a prompt.
        pdl: Whether to launch kernels before the previous kernel has ended; see ``dependent_launch.py``.

    Raises:
        ValueError: Layout or alignment of a tensor is not supported.
    """
    _check(query, keys, values, out, group, scratch)
    largest = max(triton.next_power_of_2(query.shape[2]), triton.next_power_of_2(out.shape[2]))
    tiles = attention_tiles(largest, keys.element_size(), device_name(keys.device))
    longest = 0 if invariant else 1 if group.decodes_only else LONGEST_SPLIT
    call = _Call(query, keys, values, out, group, params, scratch, scales, tiles, longest, pdl)
    if longest > 0:
        call.split()
    if longest != 1:
        call.prefill()


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of one ``attend``. ``longest`` is the maximum number of new tokens of a request whose keys are split."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor
    group: GroupInputs
    params: AttentionParams
    scratch: Scratch
    scales: KVScales
    tiles: AttentionTiles
    longest: int
    pdl: bool

    def split(self) -> None:
        """Launch the kernels for requests whose keys are split."""
        group, scratch, decode = self.group, self.scratch, self.tiles.decode
        heads, kv_heads, requests = self.query.shape[1], self.keys.shape[1], len(group.seq_lens)
        constants = self._constants()
        pieces = min(constants["MAX_PIECES"], triton.cdiv(self._most_keys(), constants["PIECE"]))
        few, group_size = self.longest > 1, heads // kv_heads
        rows = max(_SPLIT_ROWS if few else 16, triton.next_power_of_2(group_size))
        block_n = max(16, decode.block_n // 2) if few else decode.block_n
        tiles = requests + (len(self.query) // (rows // group_size) if few else 0)
        queries = min(len(self.query), len(scratch.total)) if few else requests
        split_keys[(min(tiles * pieces * kv_heads, programs(self.query.device)),)](
            self.query, self.keys, self.values, group.block_table, group.query_start_loc, group.seq_lens,
            self.params.sinks, group.key_ends, scratch.sums, scratch.largest, scratch.total, self.out,
            *self._numbers(), **constants, ROWS=rows, BLOCK_N=block_n,
            num_warps=decode.warps, num_stages=decode.stages, **pdl_options(pdl=self.pdl),
        )  # fmt: skip
        if pieces == 1:
            return
        shared = (
            "HEADS", "SIZE_V", "PADDED_V", "WINDOW", "ATTENTION_CHUNK", "REQUESTS", "PIECE", "MAX_PIECES", "LONGEST",
        )  # fmt: skip
        merge_pieces[(queries, heads)](
            scratch.sums, scratch.largest, scratch.total, group.query_start_loc, group.seq_lens, self.params.sinks, self.out,
            requests, len(scratch.total), self.scales.value,
            **{name: constants[name] for name in shared}, FEWEST=2, AT_ONCE=_MERGED_AT_ONCE,
            num_warps=4, **pdl_options(pdl=self.pdl),
        )  # fmt: skip

    def prefill(self) -> None:
        """Launch the kernel for requests whose keys are not split."""
        group, prefill = self.group, self.tiles.prefill
        kv_heads, requests = self.keys.shape[1], len(group.seq_lens)
        group_size = self.query.shape[1] // kv_heads
        block_m = max(prefill.block_m, triton.next_power_of_2(group_size))
        items = (len(self.query) // (block_m // group_size) + requests) * kv_heads
        prefill_tiles[(min(items, programs(self.query.device)),)](
            self.query, self.keys, self.values, group.block_table, group.query_start_loc, group.seq_lens,
            self.params.sinks, group.key_ends, self.out, *self._numbers(), **self._constants(),
            BLOCK_M=block_m, BLOCK_N=prefill.block_n, num_warps=prefill.warps, num_stages=prefill.stages,
            **pdl_options(pdl=self.pdl),
        )  # fmt: skip

    def _most_keys(self) -> int:
        """Return the largest number of keys that a request with one new token can have from its first piece on."""
        most: int = self.group.block_table.shape[1] * self.keys.shape[2]
        limits = (self.params.sliding_window, self.params.attention_chunk) if self.longest == 1 else ()
        return min([most, *(limit + 127 for limit in limits if limit is not None)])

    def _numbers(self) -> tuple[int | float, ...]:
        """Return the arguments of a kernel that are numbers, in order."""
        strides = self.group.block_table.stride(0), self.keys.stride(0), self.values.stride(0)
        scales = self.params.scaling * self.scales.key, self.scales.value
        return len(self.group.seq_lens), len(self.scratch.total), *strides, *scales

    def _constants(self) -> dict[str, Any]:
        """Return the compile-time constants of an attention kernel."""
        query, params = self.query, self.params
        size, size_v, kv_heads = query.shape[2], self.out.shape[2], self.keys.shape[1]
        requests = int(triton.next_power_of_2(len(self.group.seq_lens)))
        return {
            "HEADS": query.shape[1], "KV_HEADS": kv_heads, "SIZE": size, "SIZE_V": size_v,
            "PADDED": max(16, triton.next_power_of_2(size)), "PADDED_V": max(16, triton.next_power_of_2(size_v)),
            "BLOCK_SIZE": self.keys.shape[2], "WINDOW": params.sliding_window or 0,
            "ATTENTION_CHUNK": params.attention_chunk or 0, "SOFTCAP": params.softcap or 0.0,
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32", "REQUESTS": max(16, requests),
            "PIECE": piece_of(self.tiles.decode.piece, requests, kv_heads, decodes_only=self.longest == 1),
            "MAX_PIECES": pieces_per_request(kv_heads), "LONGEST": self.longest,
        }  # fmt: skip


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

"""Attention of requests with one new token: keys in pieces at fixed positions, each the work of a program, and their merge."""

import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernels.attention_softmax import accumulate, find, first_key, load_pages, scores


@triton.jit
def piece_size(length, PIECE: tl.constexpr, MAX_PIECES: tl.constexpr):
    """Keys of a piece: ``PIECE``, or the multiple that cuts ``length`` keys into ``MAX_PIECES`` at most."""
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
    """Softmax statistics and weighted sums of each piece, for the query heads of one KV head: ``ROWS`` of them with padding."""
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
    """The output of one head of one request, of its pieces in the order of their positions."""
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

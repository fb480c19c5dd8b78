"""Attention of requests with several new tokens: tiles of queries, each with the query heads of one KV head side by side."""

import triton
import triton.language as tl

from penstock_enginecore.forward.cuda.kernels.attention_softmax import accumulate, find, first_key, load_pages, scores


@triton.jit(do_not_specialize=["num_requests"])
def prefill_tiles(
    query, keys, values, block_table, query_start_loc, seq_lens, sinks, key_ends, out,
    num_requests, table_stride, key_stride, value_stride, scaling, value_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_V: tl.constexpr,
    PADDED: tl.constexpr, PADDED_V: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    ATTENTION_CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, REQUESTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FEWEST: tl.constexpr,
):  # fmt: skip
    """Tiles of ``BLOCK_M`` rows, of which row i is query ``i // group`` and head ``i % group``; the last may be padding. Of
    requests with ``FEWEST`` new tokens or more.
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
        item = num_items - 1 - nth  # the last tiles of a prompt see the most keys: they begin first
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

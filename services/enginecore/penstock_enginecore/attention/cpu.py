"""Attention for CPUs, with torch's fused scaled dot product attention.

Requests with one new token (decodes) are computed in batches. Decodes are sorted by the number of their keys and
grouped into buckets of similar length. The keys of a bucket are gathered into one padded tensor. Query heads that share
a key head are placed along the query dimension.

Requests with several new tokens (prefills) are computed one by one. With a sliding window, only keys inside the window
are gathered. Chunked attention is split at the chunk boundaries. Each chunk is computed as ordinary attention over the
keys of the chunk. A request whose tokens attend to later keys gets its own mask.

The fused kernel adds the mask to scores and multiplies masked values by zero, which is wrong for infinite values and
NaN. Therefore a decode is padded with one of its own keys. A prefill with infinite values or NaN is computed without
the fused kernel, and masked values are left out of the sums.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from penstock_enginecore.attention.base import (
    AttentionMetadata,
    AttentionParams,
    IntArray,
    StepPlan,
    weighted_values,
)
from penstock_enginecore.attention.kv_cache import KVCache
from penstock_enginecore.attention.latent import LatentsByTorch
from penstock_enginecore.core.kv_cache.spec import first_key

_MAX_PADDING = 1.25
"""Maximum ratio between the numbers of keys of the longest and the shortest request in a bucket."""
_FREE_PADDING = 32
"""Number of keys by which a request in a bucket may always be longer than the bucket's shortest request, even beyond
``_MAX_PADDING``.

Computing this much padding takes less time than another kernel launch.
"""
_MAX_QUERIES = 512
"""Maximum number of queries in one call of the kernel for a prefill with a mask. It limits the number of rows of the
mask.
"""


@dataclass(frozen=True, slots=True)
class _DecodeBucket:
    """Decodes with similar numbers of keys, which are computed in one batch.

    Attributes:
        tokens: int64 ``[batch]``, indices of the requests' tokens in the flat batch.
        slots: int64 ``[batch * length]``, slots of each request's keys, padded with the slot of the request's last key.
        length: Number of keys of the longest request in the bucket.
        mask: bool ``[batch, 1, 1, length]``, false for padding, or None without padding.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    length: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Prefill of the tokens of one request with indices ``start`` to ``end`` in the flat batch.

    Attributes:
        num_keys: Total number of keys to which the queries attend.
        slots: Slots of these keys in order, including the keys of the new tokens. None if the keys are exactly those of
            the new tokens.
        seen: int64 ``[2, queries]``, the range of keys to which each query attends: first key and end. None for causal
            attention.
    """

    start: int
    end: int
    num_keys: int
    slots: torch.Tensor | None
    seen: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Work:
    decodes: list[_DecodeBucket]
    prefills: list[_Prefill]


class CPUAttention(LatentsByTorch):
    """Attention backend for CPUs that computes decodes in batches and prefills one by one. The docstring of the module
    describes the method.
    """

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        plan: StepPlan,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Compute attention. The work for a mask is planned when the first layer with this mask computes attention,
        because layers may have different masks.
        """
        mask = (params.sliding_window, params.attention_chunk)
        work = plan.by_mask.get(mask)
        if not isinstance(work, _Work):
            work = plan.by_mask[mask] = _plan(plan.metadata, *mask)
        output = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        for bucket in work.decodes:
            rows = _decode(query.index_select(0, bucket.tokens), cache, bucket, params)
            output.index_copy_(0, bucket.tokens, rows)
        for prefill in work.prefills:
            new = slice(prefill.start, prefill.end)
            keys, values = (key[new], value[new]) if prefill.slots is None else cache.gather(prefill.slots)
            output[new] = _prefill(query[new], keys, values, params, prefill.seen)
        return output


def _plan(metadata: AttentionMetadata, window: int | None, chunk: int | None) -> _Work:
    query_lens = np.diff(metadata.query_start_loc)
    prefills = [
        prefill for i in np.flatnonzero(query_lens > 1) for prefill in _plan_prefills(metadata, int(i), window, chunk)
    ]
    decodes = np.flatnonzero(query_lens == 1)
    lengths = metadata.seq_lens[decodes]
    if chunk is not None:
        lengths = (lengths - 1) % chunk + 1
    if window is not None:
        lengths = np.minimum(lengths, window)
    order = np.argsort(lengths, kind="stable")
    decodes, lengths = decodes[order], lengths[order]
    buckets = []
    first = 0
    while first < len(decodes):
        limit = max(lengths[first] * _MAX_PADDING, lengths[first] + _FREE_PADDING)
        last = int(np.searchsorted(lengths, limit, side="right"))
        buckets.append(_plan_bucket(metadata, decodes[first:last], lengths[first:last]))
        first = last
    return _Work(buckets, prefills)


def _plan_bucket(metadata: AttentionMetadata, requests: IntArray, lengths: IntArray) -> _DecodeBucket:
    longest = int(lengths[-1])
    offsets = np.arange(longest)
    ends = metadata.seq_lens[requests][:, None]
    positions = np.minimum(ends - lengths[:, None] + offsets, ends - 1)
    blocks = metadata.block_table[requests[:, None], positions // metadata.block_size].astype(np.int64)
    slots = blocks * metadata.block_size + positions % metadata.block_size
    mask = None
    if lengths[0] != longest:
        mask = torch.from_numpy(offsets < lengths[:, None])[:, None, None, :]
    tokens = torch.from_numpy(metadata.query_start_loc[requests])
    return _DecodeBucket(tokens, torch.from_numpy(slots.reshape(-1)), longest, mask)


def _plan_prefills(
    metadata: AttentionMetadata, request: int, window: int | None, chunk: int | None
) -> Iterator[_Prefill]:
    """Yield one or more prefills for the request's new tokens, split at the boundaries of attention chunks."""
    start, end = (int(x) for x in metadata.query_start_loc[request : request + 2])
    length = int(metadata.seq_lens[request])
    position = length - (end - start)
    if metadata.ends_for(window) is not None and (key_ends := metadata.spans(request)) is not None:
        yield _plan_spans(metadata, request, key_ends, window, chunk)
        return
    while position < length:
        chunk_start = 0 if chunk is None else position // chunk * chunk
        chunk_end = length if chunk is None else min(length, chunk_start + chunk)
        num_queries = chunk_end - position
        num_keys = chunk_end - chunk_start
        if window is not None:  # The first query attends to `window` keys, including its own key.
            num_keys = min(num_keys, num_queries + window - 1)
        slots = None
        if num_keys != num_queries:
            slots = torch.from_numpy(metadata.slots(request, chunk_end - num_keys, chunk_end))
        yield _Prefill(start, start + num_queries, num_keys, slots)
        start += num_queries
        position = chunk_end


def _plan_spans(
    metadata: AttentionMetadata, request: int, key_ends: IntArray, window: int | None, chunk: int | None
) -> _Prefill:
    """Return one prefill for all new tokens of the request. Token ``i`` attends to keys before position
    ``key_ends[i]``.
    """
    start, end = (int(x) for x in metadata.query_start_loc[request : request + 2])
    length = int(metadata.seq_lens[request])
    firsts = np.array([first_key(position, window, chunk) for position in range(length - (end - start), length)])
    first = int(firsts[0])
    slots = None
    if length - first != end - start:
        slots = torch.from_numpy(metadata.slots(request, first, length))
    return _Prefill(start, end, length - first, slots, torch.from_numpy(np.stack([firsts, key_ends]) - first))


def _decode(query: torch.Tensor, cache: KVCache, bucket: _DecodeBucket, params: AttentionParams) -> torch.Tensor:
    batch, num_heads, _ = query.shape
    keys, values = cache.gather(bucket.slots)
    keys = keys.view(batch, bucket.length, cache.num_kv_heads, -1).transpose(1, 2)
    values = values.view(batch, bucket.length, cache.num_kv_heads, -1).transpose(1, 2)
    groups = num_heads // cache.num_kv_heads
    folded = query.reshape(batch, cache.num_kv_heads, groups, -1)
    if params.softcap is None and params.sinks is None:
        output = F.scaled_dot_product_attention(folded, keys, values, attn_mask=bucket.mask, scale=params.scaling)
    else:
        sinks = None if params.sinks is None else params.sinks.view(1, cache.num_kv_heads, groups, 1)
        output = _weights(folded, keys, bucket.mask, sinks, params).to(values.dtype) @ values
    return output.reshape(batch, num_heads, -1)


def _prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    params: AttentionParams,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the result of attention for ``query`` ``[queries, heads, head_size]`` over ``keys`` ``[keys, kv_heads,
    head_size]``. The queries belong to the last tokens of ``keys``.

    ``seen`` is as in ``_Prefill``.
    """
    num_queries, num_heads, _ = query.shape
    num_keys, num_kv_heads, _ = keys.shape
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, keys, values))
    plain = params.softcap is None and params.sinks is None and _is_tame(query, keys, values, params.scaling)
    window = params.sliding_window
    if plain and seen is None and num_keys == num_queries and (window is None or window >= num_keys):
        output = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=params.scaling, enable_gqa=num_heads != num_kv_heads
        )
        return output[0].transpose(0, 1)
    outputs = []
    for first in range(0, num_queries, _MAX_QUERIES):
        rows = q[:, :, first : first + _MAX_QUERIES]
        if seen is None:
            mask = _causal_mask(rows.shape[2], num_keys, num_keys - num_queries + first, window)
        else:
            mask = _span_mask(seen[:, first : first + _MAX_QUERIES], num_keys)
        if plain:
            outputs.append(
                F.scaled_dot_product_attention(
                    rows, k, v, attn_mask=mask, scale=params.scaling, enable_gqa=num_heads != num_kv_heads
                )
            )
        else:
            groups = num_heads // num_kv_heads
            sinks = None if params.sinks is None else params.sinks.view(1, num_heads, 1, 1)
            weights = _weights(rows, k.repeat_interleave(groups, 1), mask, sinks, params)
            outputs.append(weighted_values(weights.to(v.dtype), v.repeat_interleave(groups, 1), mask))
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def _causal_mask(num_queries: int, num_keys: int, first_position: int, window: int | None) -> torch.Tensor:
    """Return the mask of keys that each query sees, bool ``[num_queries, num_keys]``. Query 0 belongs to the same token
    as key ``first_position``.
    """
    query_position = torch.arange(first_position, first_position + num_queries)[:, None]
    key_position = torch.arange(num_keys)[None, :]
    visible = key_position <= query_position
    if window is not None:
        visible &= key_position > query_position - window
    return visible


def _span_mask(seen: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Return the mask of keys that are in the range ``seen`` ``[2, queries]`` of each query, bool ``[queries,
    num_keys]``.
    """
    key_position = torch.arange(num_keys)[None, :]
    firsts, ends = seen[:, :, None]
    mask: torch.Tensor = (key_position >= firsts) & (key_position < ends)
    return mask


def _is_tame(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> bool:
    """Return whether all values are finite, and all scores are finite according to the Cauchy-Schwarz inequality. If
    they are, adding the mask to the scores is correct.
    """
    q, k, v = (torch.linalg.vector_norm(x, dtype=torch.float32) for x in (query, keys, values))
    return bool((q * k * scaling + v).isfinite())


def _weights(
    query: torch.Tensor,
    keys: torch.Tensor,
    visible: torch.Tensor | None,
    sinks: torch.Tensor | None,
    params: AttentionParams,
) -> torch.Tensor:
    """Return the softmax weights, float32 ``[batch, heads, queries, keys]``, for inputs ``[batch, heads, queries, head
    size]``.

    The function is used for soft caps, sinks, and scores or values that are not finite, because the fused kernel does
    not support them.
    """
    scores = (query @ keys.transpose(-1, -2)).float() * params.scaling
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
    return scores.softmax(dim=-1)[..., : keys.shape[2]]

"""Attention over a cache of latents (MLA), with torch, one request at a time, with float32 scores.

A slot of the cache has one row for all heads: the latent and the rotated part of the key. The row is the key, and its
first elements, the latent, are the value.
"""

import numpy as np
import torch

from penstock_enginecore.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionParams,
    IntArray,
    StepPlan,
    weighted_values,
)
from penstock_enginecore.attention.kv_cache import KVCache

_MAX_SCORES = 1 << 24
"""Maximum number of scores in memory at a time."""


class LatentsByTorch(AttentionBackend):
    """Base class of attention backends that compute attention over latents with this module."""

    keeps_latents = True

    def attend_latents(
        self, query: torch.Tensor, cache: KVCache, plan: StepPlan, params: AttentionParams, latent: int
    ) -> torch.Tensor:
        """Compute attention request by request; see ``AttentionBackend.attend_latents``."""
        return attend_latents(query, cache.keys, plan.metadata, params, latent)


def attend_latents(
    query: torch.Tensor, rows: torch.Tensor, metadata: AttentionMetadata, params: AttentionParams, latent: int
) -> torch.Tensor:
    """Return the result of causal attention of each request, ``[tokens, heads, latent]``, in the query's dtype.

    Args:
        query: ``[tokens, heads, width]``, projected into the latent space, then the rotated part.
        rows: Memory of the cache ``[slots, width]``.
        metadata: Positions and slots of the step's tokens.
        params: The scale of the scores. Windows, chunks, soft caps and sinks are not supported.
        latent: Number of elements of a latent.
    """
    output = query.new_empty(*query.shape[:2], latent)
    for request in range(metadata.num_requests):
        start, end = (int(x) for x in metadata.query_start_loc[request : request + 2])
        length = int(metadata.seq_lens[request])
        keys = rows[torch.from_numpy(metadata.slots(request, 0, length)).to(rows.device)].float()
        ends = metadata.spans(request)
        if ends is None:
            ends = np.arange(length - (end - start), length) + 1
        some = max(_MAX_SCORES // (length * query.shape[1]), 1)
        for first in range(0, end - start, some):
            part = slice(start + first, min(start + first + some, end))
            output[part] = _attend(query[part], keys, ends[first : first + some], params.scaling, latent)
    return output


def _attend(query: torch.Tensor, keys: torch.Tensor, ends: IntArray, scaling: float, latent: int) -> torch.Tensor:
    """Return the result for queries of one request. The keys of a query end before the position in ``ends``."""
    visible = torch.arange(len(keys))[None, :] < torch.from_numpy(np.ascontiguousarray(ends))[:, None]
    visible = visible.to(query.device)
    scores = torch.matmul(query.float().transpose(0, 1), keys.T) * scaling
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return weighted_values(weights, keys[:, :latent], visible).transpose(0, 1).to(query.dtype)

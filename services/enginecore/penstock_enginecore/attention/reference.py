"""Reference implementation of attention: short code that computes one request at a time, with float32 scores, on any
device.
"""

import torch

from penstock_enginecore.attention.base import AttentionParams, StepPlan, weighted_values
from penstock_enginecore.attention.kv_cache import KVCache
from penstock_enginecore.attention.latent import LatentsByTorch
from penstock_enginecore.core.kv_cache.spec import first_key


class ReferenceAttention(LatentsByTorch):
    """Attention backend that reads all keys and values from the cache and stores the complete matrix of scores."""

    keeps_float8 = True

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,  # noqa: ARG002 - read back from the cache
        value: torch.Tensor,  # noqa: ARG002
        cache: KVCache,
        plan: StepPlan,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Compute attention request by request, with all keys and values read from the cache."""
        metadata = plan.metadata
        outputs = []
        for i in range(metadata.num_requests):
            start, end = (int(x) for x in metadata.query_start_loc[i : i + 2])
            length = int(metadata.seq_lens[i])
            first = first_key(length - (end - start), params.sliding_window, params.attention_chunk)
            slots = torch.from_numpy(metadata.slots(i, first, length)).to(plan.device)
            keys, values = cache.gather(slots)
            ends = None if metadata.ends_for(params.sliding_window) is None else metadata.spans(i)
            key_ends = None if ends is None else torch.from_numpy(ends).to(plan.device)
            outputs.append(_attend_one(query[start:end], keys, values, first, params, key_ends))
        return torch.cat(outputs)


def _attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    params: AttentionParams,
    key_ends: torch.Tensor | None,
) -> torch.Tensor:
    """Return the result of attention for ``query`` over ``keys``.

    The queries belong to the last tokens of ``keys``. The first query has the position ``first``. ``key_ends`` is int64
    ``[queries]``, as in ``AttentionMetadata``.
    """
    num_queries, num_heads, _ = query.shape
    num_keys, num_kv_heads, _ = keys.shape
    keys = keys.repeat_interleave(num_heads // num_kv_heads, dim=1)
    values = values.repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys.float()) * params.scaling
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    key_position = torch.arange(first, first + num_keys, device=query.device)[None, :]
    query_position = key_position[0, num_keys - num_queries :, None]
    visible = key_position <= query_position if key_ends is None else key_position < key_ends[:, None]
    if params.sliding_window is not None:
        visible &= key_position > query_position - params.sliding_window
    if params.attention_chunk is not None:
        visible &= key_position >= query_position // params.attention_chunk * params.attention_chunk
    scores = scores.masked_fill(~visible, float("-inf"))
    if params.sinks is not None:
        sinks = params.sinks.float()[:, None, None].expand(num_heads, num_queries, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_keys]
    output = weighted_values(weights, values.float().transpose(0, 1), visible)
    return output.transpose(0, 1).to(query.dtype)

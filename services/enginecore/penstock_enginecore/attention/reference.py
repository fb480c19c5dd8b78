"""The oracle: attention in a few plain lines, one request at a time, scores in float32, on any device."""

import torch

from penstock_enginecore.attention.base import AttentionBackend, AttentionParams, KVCache, StepPlan


class ReferenceAttention(AttentionBackend):
    """Reads every key and value back from the cache and materializes the scores."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,  # noqa: ARG002 - read back from the cache
        value: torch.Tensor,  # noqa: ARG002
        cache: KVCache,
        plan: StepPlan,
        params: AttentionParams,
    ) -> torch.Tensor:
        """See ``AttentionBackend.attend``."""
        metadata = plan.metadata
        outputs = []
        for i in range(metadata.num_requests):
            start, end = metadata.query_start_loc[i : i + 2]
            slots = torch.from_numpy(metadata.slots(i, 0, int(metadata.seq_lens[i]))).to(plan.device)
            keys, values = cache.gather(slots)
            outputs.append(_attend_one(query[start:end], keys, values, params))
        return torch.cat(outputs)


def _attend_one(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    num_queries, num_heads, _ = query.shape
    num_keys, num_kv_heads, _ = keys.shape
    keys = keys.repeat_interleave(num_heads // num_kv_heads, dim=1)
    values = values.repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys.float()) * params.scaling
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    query_position = torch.arange(num_keys - num_queries, num_keys, device=query.device)[:, None]
    key_position = torch.arange(num_keys, device=query.device)[None, :]
    visible = key_position <= query_position
    if params.sliding_window is not None:
        visible &= key_position > query_position - params.sliding_window
    if params.chunk is not None:
        visible &= key_position >= query_position // params.chunk * params.chunk
    scores = scores.masked_fill(~visible, float("-inf"))
    if params.sinks is not None:
        sinks = params.sinks.float()[:, None, None].expand(num_heads, num_queries, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_keys]
    return torch.einsum("hqk,khd->qhd", weights, values.float()).to(query.dtype)

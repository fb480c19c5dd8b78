"""Which positions of a prompt are no tokens."""

import numpy as np

from penstock_common.types.media import EmbedRun, MultiModalFeature
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.core.scheduler.output import NewRequestData


def vector_positions(new: NewRequestData) -> IntArray | None:
    """Those at which vectors or embeddings of media stand, int64 ``[n]``; None where all are tokens."""
    if new.mm_features:
        return np.concatenate([embed_positions(feature) for feature in new.mm_features])
    embeds = new.prompt_embeds
    if embeds is None:
        return None
    is_token = np.frombuffer(embeds.is_token or bytes(embeds.num_tokens), dtype=np.bool_)
    return np.flatnonzero(~is_token)


def embed_positions(feature: MultiModalFeature) -> IntArray:
    """Of a feature's embeddings in the prompt, int64 ``[num_embeds]``."""
    runs = feature.embed_runs or (EmbedRun(0, feature.length),)
    starts = np.array([run.start for run in runs], dtype=np.int64) + feature.offset
    counts = np.array([run.count for run in runs], dtype=np.int64)
    before = np.cumsum(counts) - counts
    positions: IntArray = np.arange(int(counts.sum())) + np.repeat(starts - before, counts)
    return positions

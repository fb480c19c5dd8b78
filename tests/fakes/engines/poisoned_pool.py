"""An engine whose steps find NaN wherever their requests may not look."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionMetadata, StepPlan
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.model_runner import ModelRunner
from penstock_enginecore.models.attention_hook import LayerCaches


class PoisonedPool:
    """Fills the pool with NaN around every step, but for the slots that a query of the step sees, and puts back afterwards what
    was there: cached blocks stay good for the steps that see them. ``steps`` counts those that ran so.
    """

    def __init__(self, engine: EngineCore) -> None:
        self.steps = 0
        self._groups = engine.kv_cache_config.groups
        executor: Any = engine.executor
        self._runner: ModelRunner = executor._worker.runner
        self._forward = self._runner._forward
        self._runner._forward = self._poisoned  # type: ignore[method-assign]

    def _poisoned(
        self,
        token_ids: Any,
        positions: Any,
        rows: Any,
        attention: list[AttentionMetadata],
        layers: LayerCaches,
        vectors: Any = None,
    ) -> torch.Tensor:
        unseen = self._unseen(attention, len(next(iter(layers.values())).cache.keys))
        saved = []
        for layer in layers.values():
            cache = layer.cache
            parts = cache.keys, cache.values
            before = [part.clone() for part in parts]
            plan = StepPlan(replace(attention[0], slot_mapping=unseen), torch.device("cpu"))
            nan = (
                torch.full((len(unseen), cache.num_kv_heads, part.shape[1] // cache.num_kv_heads), torch.nan)
                for part in parts
            )
            self._runner._backend.write(cache, plan, *(x.to(cache.keys.dtype) for x in nan))
            for part, old in zip(parts, before, strict=True):
                saved.append((part, part.isnan() & ~old.isnan(), old))
        output = self._forward(token_ids, positions, rows, attention, layers, vectors)
        for part, place, old in saved:
            part[place] = old[place]
        self.steps += 1
        return output

    def _unseen(self, attention: list[AttentionMetadata], num_slots: int) -> Any:
        seen = [np.zeros(0, dtype=np.int64)]
        for group, metadata in zip(self._groups, attention, strict=True):
            for i, count in enumerate(np.diff(metadata.query_start_loc)):
                length = int(metadata.seq_lens[i])
                seen.append(metadata.slots(i, group.first_key(length - int(count)), length))
        return np.setdiff1d(np.arange(num_slots), np.concatenate(seen))

"""Engine whose KV cache has NaN at all positions that the requests of a step must not read."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionMetadata, StepPlan
from penstock_enginecore.attention.cpu import CPUAttention
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.generation.runner import GenerationRunner
from penstock_enginecore.forward.base import ForwardBatch, ForwardOutput
from penstock_enginecore.native.attention import NativeAttention
from penstock_enginecore.native.library import open_library


class PoisonedPool:
    """Fills the pool with NaN during every step, except for slots that a query of the step sees, and restores it
    afterwards.

    Cached blocks therefore stay valid for the steps that read them. ``steps`` counts these steps.
    """

    def __init__(self, engine: EngineCore) -> None:
        self.steps = 0
        self._groups = engine.kv_cache_config.groups
        self._writer = NativeAttention(open_library("auto", 1), CPUAttention())  # uses the layout of each cache
        executor: Any = engine.executor
        self._runner: GenerationRunner = executor._worker.runner
        self._run = self._runner._forward.run
        self._runner._forward.run = self._poisoned  # type: ignore[method-assign]

    def _poisoned(self, batch: ForwardBatch, rows: Any, **named: Any) -> ForwardOutput:
        layers = self._runner._caches
        of_group = self._unseen(batch.attention, len(next(iter(layers.values())).cache.keys))
        saved = []
        for layer in layers.values():
            cache, unseen = layer.cache, of_group[layer.group]
            # A layer's tiles may lie anywhere in memory that is wider than the layer.
            parts = [torch.empty(0).to(cache.keys).set_(part.untyped_storage()) for part in (cache.keys, cache.values)]
            before = [part.clone() for part in parts]
            plan = StepPlan(replace(batch.attention[0], slot_mapping=unseen), torch.device("cpu"))
            nan = (
                torch.full((len(unseen), cache.num_kv_heads, part.shape[1] // cache.num_kv_heads), torch.nan)
                for part in (cache.keys, cache.values)
            )
            self._writer.write(cache, plan, *(x.to(cache.keys.dtype) for x in nan))
            for part, old in zip(parts, before, strict=True):
                saved.append((part, part.isnan() & ~old.isnan(), old))
        output = self._run(batch, rows, **named)
        for part, place, old in saved:
            part[place] = old[place]
        self.steps += 1
        return output

    def _unseen(self, attention: Any, num_slots: int) -> list[Any]:
        """Return the unseen slots of each group, without the blocks of which another group sees slots. In these blocks,
        a layer of another width would write over seen slots.
        """
        seen = []
        metadata: AttentionMetadata
        for group, metadata in zip(self._groups, attention, strict=True):
            slots = [np.zeros(0, dtype=np.int64)]
            for i, count in enumerate(np.diff(metadata.query_start_loc)):
                length = int(metadata.seq_lens[i])
                slots.append(metadata.slots(i, group.first_key(length - int(count)), length))
            seen.append(np.concatenate(slots))
        size = attention[0].block_size
        whole = [np.unique(slots // size)[:, None] * size + np.arange(size) for slots in seen]
        left = []
        for own in range(len(seen)):
            others = [slots.reshape(-1) for i, slots in enumerate(whole) if i != own]
            left.append(np.setdiff1d(np.arange(num_slots), np.concatenate([seen[own], *others])))
        return left

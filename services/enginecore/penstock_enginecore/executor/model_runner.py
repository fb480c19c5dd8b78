"""Runs a step: lay out the inputs, forward pass, logits of the rows that sample, tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionMetadata, IntArray, KVCache, StepPlan, create_backend
from penstock_enginecore.core.kv_cache.grouping import PlaneWidth, plane_widths
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.scheduler.output import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.executor.input_batch import InputBatch, StepInputs
from penstock_enginecore.models.attention_hook import LayerCache, StepContext, use_context
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.models.support import ProbeContext, layer_specs
from penstock_enginecore.sample.sampler import SamplingInputs, sample


@dataclass(frozen=True, slots=True)
class _Pending:
    """A forward pass whose tokens are not sampled yet. ``logits`` ``[sampling requests, vocab]``."""

    inputs: StepInputs
    logits: torch.Tensor


class ModelRunner:
    """Holds the model, its KV cache and the persistent batch. One step at a time: ``execute``, then ``sample``."""

    def __init__(self, model: LoadedModel, device: torch.device, attention_backend: str) -> None:
        self._model = model
        self._device = device
        self._backend = create_backend(attention_backend, device)
        self._specs: dict[str, KVCacheSpec] = {}
        self._layers: dict[torch.nn.Module, LayerCache] = {}
        self._batch: InputBatch | None = None
        self._pending: _Pending | None = None

    @torch.inference_mode()
    def kv_cache_specs(self, block_size: int) -> dict[str, KVCacheSpec]:
        """What each attention layer asks of the KV cache, seen in a forward pass of a token. Raises ModelLoadError."""
        probe = ProbeContext()
        zero = np.zeros(1, dtype=np.int64)
        try:
            with use_context(probe):
                self._logits(zero, zero, zero)
        except Exception as e:
            name = type(self._model.module).__name__
            raise ModelLoadError(f"{name} is not supported: it fails on one token: {type(e).__name__}: {e}") from e
        self._specs = layer_specs(self._model.module, probe.calls, block_size)
        return self._specs

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the pool."""
        num_slots = config.num_blocks * config.block_size
        widths = plane_widths(self._specs, config.groups)
        planes = [self._new_plane(width, config.block_size, num_slots) for width in widths]
        # Layer i of every group lives in plane i.
        places = {name: (i, g) for g, group in enumerate(config.groups) for i, name in enumerate(group.layer_names)}
        self._layers = {
            module: LayerCache(_layer_cache(spec, *planes[places[name][0]]), group=places[name][1])
            for name, module, spec in self._attention_modules()
        }
        self._batch = InputBatch(
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            num_groups=len(config.groups),
            eos_token_ids=self._model.eos_token_ids,
        )

    @torch.inference_mode()
    def profile(self, num_tokens: int, num_seqs: int) -> None:
        """Run a step of the largest shapes on a throwaway cache: ``num_tokens`` new tokens, ``num_seqs`` of them
        sampled.
        """
        length = min(num_tokens, self._model.max_len)
        starts = np.append(np.arange(0, num_tokens, length), num_tokens)
        sequence = np.arange(num_tokens) // length
        positions = np.arange(num_tokens) % length
        # One block per sequence, block 0 being the null block.
        metadata = AttentionMetadata(
            query_start_loc=starts,
            seq_lens=np.diff(starts),
            block_table=np.arange(1, len(starts), dtype=np.int32)[:, None],
            slot_mapping=(sequence + 1) * length + positions,
            block_size=length,
        )
        layers = {
            module: LayerCache(_layer_cache(spec, *self._new_plane(spec, length, len(starts) * length)), group=0)
            for _, module, spec in self._attention_modules()
        }
        with use_context(StepContext(self._backend, layers, [StepPlan(metadata, self._device)])):
            logits = self._logits(np.zeros_like(positions), positions, np.arange(num_seqs) % num_tokens)
        half = np.full(num_seqs, 0.5)
        sample(logits, SamplingInputs(half, np.zeros(num_seqs, dtype=np.int64), half, half, half))

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> None:
        """Forward pass over the scheduled tokens. The logits wait for ``sample``."""
        if self._batch is None:
            raise RuntimeError("initialize_kv_cache must come before the first step")
        self._batch.update(step)
        if not step.num_scheduled_tokens:
            self._pending = None
            return
        inputs = self._batch.prepare(step.num_scheduled_tokens)
        context = StepContext(self._backend, self._layers, [StepPlan(m, self._device) for m in inputs.attention])
        with use_context(context):
            logits = self._logits(inputs.token_ids, inputs.positions, inputs.logits_indices)
        self._pending = _Pending(inputs, logits)

    @torch.inference_mode()
    def sample(self, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput:
        """Tokens of the step that ``execute`` ran."""
        pending, self._pending = self._pending, None
        if pending is None or self._batch is None:
            return ModelRunnerOutput()
        request_ids = pending.inputs.request_ids
        tokens: list[list[int]] = [[] for _ in request_ids]
        num_nans: dict[str, int] = {}
        sampling = pending.inputs.sampling_requests
        if len(sampling):
            sampling_ids = [request_ids[i] for i in sampling]
            sampled = sample(pending.logits, self._batch.sampling_inputs(sampling_ids))
            self._batch.append_tokens(sampling_ids, sampled.token_ids)
            for i, token in zip(sampling, sampled.token_ids.tolist(), strict=True):
                tokens[i].append(token)
            if sampled.num_nans is not None:
                num_nans = {r: n for r, n in zip(sampling_ids, sampled.num_nans.tolist(), strict=True) if n}
        return ModelRunnerOutput(request_ids=request_ids, sampled_token_ids=tokens, num_nans_in_logits=num_nans)

    def _attention_modules(self) -> Iterator[tuple[str, torch.nn.Module, KVCacheSpec]]:
        modules = dict(self._model.module.named_modules())
        for name, spec in self._specs.items():
            yield name, modules[name], spec

    def _new_plane(
        self, width: PlaneWidth | KVCacheSpec, block_size: int, num_slots: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[num_slots, key_width]`` and values ``[num_slots, value_width]``. Only the null block is cleared: other
        slots are written before they are read.
        """
        keys, values = (
            torch.empty(num_slots, numbers, dtype=self._model.dtype, device=self._device)
            for numbers in (width.key_width, width.value_width)
        )
        keys[:block_size] = 0
        values[:block_size] = 0
        return keys, values

    def _logits(self, token_ids: IntArray, positions: IntArray, indices: IntArray) -> torch.Tensor:
        """Logits ``[len(indices), vocab]`` at ``indices`` of the flat batch."""
        output = self._model.module(
            input_ids=self._to_device(token_ids)[None],
            position_ids=self._to_device(positions)[None],
            logits_to_keep=self._to_device(indices),
            use_cache=False,
        )
        return cast("torch.Tensor", output.logits[0])

    def _to_device(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _layer_cache(spec: KVCacheSpec, keys: torch.Tensor, values: torch.Tensor) -> KVCache:
    """A layer's view of its plane, which may be wider than the layer."""
    return KVCache(keys[:, : spec.key_width], values[:, : spec.value_width], spec.num_kv_heads)

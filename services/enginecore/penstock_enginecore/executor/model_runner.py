"""Runs a step: lay out the inputs, forward pass, logits of the rows that sample, tokens."""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from penstock_common.types.logprobs import Logprobs
from penstock_enginecore.attention.base import AttentionMetadata, IntArray, StepPlan, create_backend
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.scheduler.output import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.executor.input_batch import InputBatch, StepInputs
from penstock_enginecore.executor.kv_memory import KVMemory, LayerCaches, num_bytes
from penstock_enginecore.executor.prompt_vectors import PromptVectors, StepVectors
from penstock_enginecore.executor.scorer import OutputScores, PromptScorer
from penstock_enginecore.models.attention_hook import StepContext, use_context
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.head import Head
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.models.support import ProbeContext, layer_specs
from penstock_enginecore.sample.sampler import SamplingInputs, sample


@dataclass(frozen=True, slots=True)
class _Pending:
    """A forward pass whose tokens are not sampled yet. ``logits`` ``[sampling requests, vocab]``."""

    inputs: StepInputs
    logits: torch.Tensor
    prompt_logprobs: dict[str, Logprobs]


class ModelRunner:
    """Holds the model, its KV cache and the persistent batch. One step at a time: ``execute``, then ``sample``."""

    def __init__(self, model: LoadedModel, device: torch.device, attention_backend: str) -> None:
        self._model = model
        self._head = Head(model.module)
        self._prompt_scorer = PromptScorer(self._head, device, comes_apart=False)
        self._device = device
        self._backend = create_backend(attention_backend, device)
        self._specs: dict[str, KVCacheSpec] = {}
        self._layers: LayerCaches = {}
        self._batch: InputBatch | None = None
        self._embeds = PromptVectors(model.dtype, device)
        self._pending: _Pending | None = None

    @torch.inference_mode()
    def kv_cache_specs(self, block_size: int) -> dict[str, KVCacheSpec]:
        """What each attention layer asks of the KV cache, seen in a forward pass of a token. Raises ModelLoadError."""
        probe = ProbeContext()
        zero = np.zeros(1, dtype=np.int64)
        try:
            with use_context(probe), self._head.capture() as states:
                logits = self._logits(zero, zero, zero)
            comes_apart = self._head.reproduces(states, logits)
            self._prompt_scorer = PromptScorer(self._head, self._device, comes_apart=comes_apart)
        except Exception as e:
            name = type(self._model.module).__name__
            raise ModelLoadError(f"{name} is not supported: it fails on one token: {type(e).__name__}: {e}") from e
        self._specs = layer_specs(self._model.module, probe.calls, block_size)
        return self._specs

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the pool."""
        self._layers = self._memory().allocate(config)
        self._batch = InputBatch(
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            num_groups=len(config.groups),
            eos_token_ids=self._model.eos_token_ids,
        )

    def drop_kv_cache(self) -> None:
        """Free the pool and forget the requests, until ``initialize_kv_cache``."""
        self._layers = {}
        self._batch = None
        self._embeds = PromptVectors(self._model.dtype, self._device)

    @property
    def hidden_size(self) -> int:
        """Length of what the embedding layer gives for a token."""
        embedding: Any = self._model.module.get_input_embeddings()
        return int(embedding.weight.shape[1])

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the pool."""
        return num_bytes(self._layers)

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
        layers = self._memory().throwaway(length, len(starts))
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
        self._embeds.update(step)
        if not step.num_scheduled_tokens:
            self._pending = None
            return
        inputs = self._batch.prepare(step.num_scheduled_tokens)
        vectors = self._embeds.of(inputs)
        context = StepContext(self._backend, self._layers, [StepPlan(m, self._device) for m in inputs.attention])
        with use_context(context):
            logits, prompt_logprobs = self._prompt_scorer.run(
                lambda rows: self._logits(inputs.token_ids, inputs.positions, rows, vectors),
                inputs.logits_indices,
                self._batch.prompt_targets(inputs),
            )
        self._pending = _Pending(inputs, logits, prompt_logprobs)

    @torch.inference_mode()
    def sample(self, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput:
        """Tokens of the step that ``execute`` ran."""
        pending, self._pending = self._pending, None
        if pending is None or self._batch is None:
            return ModelRunnerOutput()
        request_ids = pending.inputs.request_ids
        tokens: list[list[int]] = [[] for _ in request_ids]
        num_nans: dict[str, int] = {}
        logprobs: dict[str, Logprobs] = {}
        sampling = pending.inputs.sampling_requests
        if len(sampling):
            sampling_ids = [request_ids[i] for i in sampling]
            inputs = self._batch.sampling_inputs(sampling_ids, grammar)
            scores = OutputScores.of(pending.logits, self._batch.logprobs(sampling_ids), overwritten=bool(inputs.rules))
            sampled = sample(pending.logits, inputs)
            self._batch.append_tokens(sampling_ids, sampled.token_ids)
            for i, token in zip(sampling, sampled.token_ids.tolist(), strict=True):
                tokens[i].append(token)
            logprobs = scores.logprobs(sampling_ids, sampled.token_ids)
            if sampled.num_nans is not None:
                num_nans = {r: n for r, n in zip(sampling_ids, sampled.num_nans.tolist(), strict=True) if n}
        return ModelRunnerOutput(
            request_ids=request_ids,
            sampled_token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=pending.prompt_logprobs,
            num_nans_in_logits=num_nans,
        )

    def _memory(self) -> KVMemory:
        return KVMemory(self._model.module, self._specs, self._model.dtype, self._device)

    def _logits(
        self, token_ids: IntArray, positions: IntArray, indices: IntArray, vectors: StepVectors | None = None
    ) -> torch.Tensor:
        """Logits ``[len(indices), vocab]`` at ``indices`` of the flat batch. ``vectors`` stand for some of its tokens."""
        inputs = {"input_ids": self._to_device(token_ids)[None]}
        if vectors is not None:
            embedded = self._model.module.get_input_embeddings()(inputs["input_ids"])
            embedded[0, vectors.places] = vectors.rows
            inputs = {"inputs_embeds": embedded}
        output = self._model.module(
            **inputs,
            position_ids=self._to_device(positions)[None],
            logits_to_keep=self._to_device(indices),
            use_cache=False,
        )
        return cast("torch.Tensor", output.logits[0])

    def _to_device(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

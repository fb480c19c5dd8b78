"""Runs a step: lay out the inputs, forward pass, logits of the rows that sample, tokens."""

from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
import torch

from penstock_common.types.logprobs import Logprobs
from penstock_enginecore.attention.base import AttentionMetadata, IntArray, StepPlan
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.scheduler.output import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.executor.input_batch import InputBatch, StepInputs
from penstock_enginecore.executor.kv_memory import KVMemory, num_bytes
from penstock_enginecore.executor.prompt_vectors import PromptVectors, StepVectors
from penstock_enginecore.executor.scorer import OutputScores, PromptScorer
from penstock_enginecore.models.attention_hook import AttentionCall, LayerCaches, StepContext, use_context
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.head import Head
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.models.support import ProbeContext, layer_specs
from penstock_enginecore.native.acceleration import (
    NO_KERNELS,
    Probe,
    accelerated_decoder,
    accelerated_linears,
    describe,
    open_kernels,
)
from penstock_enginecore.native.attention import NativeAttention
from penstock_enginecore.native.attention import backend as native_attention
from penstock_enginecore.native.decoder import NativeDecoder
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.linear import PackedLinears
from penstock_enginecore.native.sampler import NativeSampler
from penstock_enginecore.sample.sampler import SamplingInputs, sample


@dataclass(frozen=True, slots=True)
class _Pending:
    """A forward pass whose tokens are not sampled yet. ``logits`` ``[sampling requests, vocab]``."""

    inputs: StepInputs
    logits: torch.Tensor
    prompt_logprobs: dict[str, Logprobs]


class ModelRunner:
    """Holds the model, its KV cache and the persistent batch. One step at a time: ``execute``, then ``sample``."""

    def __init__(
        self,
        model: LoadedModel,
        device: torch.device,
        attention_backend: str,
        kernels: KernelsConfig = NO_KERNELS,
        num_threads: int = 1,
    ) -> None:
        self._model = model
        self._head = Head(model.module)
        self._prompt_scorer = PromptScorer(self._head, device, comes_apart=False)
        self._device = device
        self._dtype = model.dtype
        self._kernels = kernels
        self._library = open_kernels(kernels, device, num_threads)
        self._backend = native_attention(attention_backend, device, self._library if kernels.attention else None)
        self._attention_backend = attention_backend
        self._sampler = NativeSampler(self._library) if self._library is not None and kernels.sampler else None
        self._decoder: NativeDecoder | None = None
        self._linears: PackedLinears | None = None
        self._specs: dict[str, KVCacheSpec] = {}
        self._layers: LayerCaches = {}
        self._batch: InputBatch | None = None
        self._kv_cache: KVCacheConfig | None = None
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
        if self._library is not None and self._decoder is None and self._linears is None:
            self._accelerate(self._library, probe.calls, block_size)
        return self._specs

    def _accelerate(self, library: NativeLibrary, calls: list[AttentionCall], block_size: int) -> None:
        """Hand the model, or its linear layers, to the kernels."""
        module, probe = self._model.module, Probe.create(self._model.vocab_size)
        reference = create_backend("reference", self._device)

        def layers(dtype: torch.dtype = self._dtype) -> LayerCaches:
            return self._memory(dtype).throwaway(probe.metadata.block_size, probe.num_blocks)

        def logits() -> torch.Tensor:
            plan = StepPlan(probe.metadata, self._device)
            rows = np.arange(len(probe.token_ids))
            with use_context(StepContext(reference, layers(), [plan])):
                return self._logits(probe.token_ids, rows, rows)

        expected = logits()
        if self._kernels.decoder and self._attention_backend == "auto" and self._kernels.attention:
            self._decoder = accelerated_decoder(
                library,
                module,
                calls,
                block_size=block_size,
                max_len=self._model.max_len,
                probe=probe,
                expected=expected,
                caches=layers(torch.float32),
            )
        if self._decoder is not None:
            self._prompt_scorer = PromptScorer(self._decoder, self._device, comes_apart=True)
            self._dtype = torch.float32
            self._specs = {
                name: msgspec.structs.replace(spec, dtype_size=self._dtype.itemsize)
                for name, spec in self._specs.items()
            }
        elif self._kernels.linear:
            self._linears = accelerated_linears(library, module, logits, expected)

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the pool."""
        self._layers = self._memory(self._dtype).allocate(config)
        self._batch = self._empty_batch(config)
        self._kv_cache = config

    def _empty_batch(self, config: KVCacheConfig) -> InputBatch:
        return InputBatch(
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            num_groups=len(config.groups),
            eos_token_ids=self._model.eos_token_ids,
        )

    @torch.inference_mode()
    def recover(self) -> None:
        """See ``Executor.recover``."""
        self._pending = None
        self._embeds = PromptVectors(self._model.dtype, self._device)
        if self._kv_cache is not None:
            self._batch = self._empty_batch(self._kv_cache)
        probe = Probe.create(self._model.vocab_size)
        layers = self._memory(self._dtype).throwaway(probe.metadata.block_size, probe.num_blocks)
        positions = np.arange(len(probe.token_ids))
        logits = self._forward(probe.token_ids, positions, positions[-1:], [probe.metadata], layers)
        _sample_any(logits)

    def drop_kv_cache(self) -> None:
        """Free the pool and forget the requests, until ``initialize_kv_cache``."""
        self._layers = {}
        self._batch = self._kv_cache = None
        self._embeds = PromptVectors(self._model.dtype, self._device)

    @property
    def hidden_size(self) -> int:
        """Length of what the embedding layer gives for a token."""
        embedding: Any = self._model.module.get_input_embeddings()
        return int(embedding.weight.shape[1])

    @property
    def acceleration(self) -> str:
        """See ``describe``."""
        attention = isinstance(self._backend, NativeAttention)
        return describe(
            self._library, decoder=self._decoder, linear=self._linears, attention=attention, sampler=self._sampler
        )

    @property
    def packed_bytes(self) -> int:
        """Bytes of weights that the kernels have packed."""
        return sum(part.num_bytes for part in (self._decoder, self._linears) if part is not None)

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
        layers = self._memory(self._dtype).throwaway(length, len(starts))
        rows = np.arange(num_seqs) % num_tokens
        logits = self._forward(np.zeros_like(positions), positions, rows, [metadata], layers)
        _sample_any(logits)

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
        logits, prompt_logprobs = self._prompt_scorer.run(
            lambda rows: self._forward(
                inputs.token_ids, inputs.positions, rows, inputs.attention, self._layers, vectors
            ),
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
            sampled = sample(pending.logits, inputs, self._sampler)
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

    def _memory(self, dtype: torch.dtype) -> KVMemory:
        return KVMemory(self._model.module, self._specs, dtype, self._device)

    def _forward(
        self,
        token_ids: IntArray,
        positions: IntArray,
        rows: IntArray,
        attention: list[AttentionMetadata],
        layers: LayerCaches,
        vectors: StepVectors | None = None,
    ) -> torch.Tensor:
        """Logits ``[len(rows), vocab]`` at ``rows`` of the flat batch. ``vectors`` stand for some of its tokens."""
        if self._decoder is None:
            context = StepContext(self._backend, layers, [StepPlan(m, self._device) for m in attention])
            with use_context(context):
                return self._logits(token_ids, positions, rows, vectors)
        x = self._decoder.embed(token_ids)
        if vectors is not None:
            x[vectors.places] = vectors.rows.to(x.dtype)
        return self._decoder.run(x, positions, attention, layers, rows)

    def _logits(
        self, token_ids: IntArray, positions: IntArray, indices: IntArray, vectors: StepVectors | None = None
    ) -> torch.Tensor:
        """The same, by the model's own modules."""
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


def _sample_any(logits: torch.Tensor) -> None:
    """Draw a token from each row, of any seed."""
    half = np.full(len(logits), 0.5)
    sample(logits, SamplingInputs(half, np.zeros(len(logits), dtype=np.int64), half, half, half))

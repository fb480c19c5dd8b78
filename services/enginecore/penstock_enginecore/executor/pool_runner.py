"""Runs the steps of a model that is pooled: hidden states of the scheduled tokens, results of the prompts that end."""

import numpy as np
import torch

from penstock_common.types.pooling import PoolingParams, PoolingTask, Vectors
from penstock_common.types.request import NO_SAMPLING
from penstock_enginecore.attention.base import StepPlan
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.pooling_validation import PoolingLimits
from penstock_enginecore.core.scheduler.output import GrammarBitmask, ModelRunnerOutput, NewRequestData, SchedulerOutput
from penstock_enginecore.executor.kv_memory import KVMemory, num_bytes
from penstock_enginecore.executor.pool_batch import PoolBatch, PoolInputs, attention_metadata
from penstock_enginecore.models.attention_hook import AttentionContext, LayerCaches, StepContext, use_context
from penstock_enginecore.models.encoder import check_encoder_calls, encoder_inputs
from penstock_enginecore.models.encoder_attention import EncoderContext
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.support import ProbeContext, layer_specs
from penstock_enginecore.native.acceleration import NO_KERNELS, Probe, accelerated_linears, describe, open_kernels
from penstock_enginecore.native.attention import NativeAttention
from penstock_enginecore.native.attention import backend as native_attention
from penstock_enginecore.native.linear import PackedLinears
from penstock_enginecore.pooling.embedder import PoolingModel
from penstock_enginecore.pooling.pooler import Pooler


class PoolRunner:
    """Holds the model, its KV cache unless it is an encoder, and the prompts that are being computed.

    One step at a time: ``execute``, then ``sample``, which samples nothing and hands out results.
    """

    def __init__(
        self,
        model: PoolingModel,
        device: torch.device,
        attention_backend: str,
        kernels: KernelsConfig = NO_KERNELS,
        num_threads: int = 1,
    ) -> None:
        self._model = model
        self._device = device
        self._kernels = kernels
        self._library = open_kernels(kernels, device, num_threads)
        self._linears: PackedLinears | None = None
        self._backend = native_attention(attention_backend, device, self._library if kernels.attention else None)
        self._pooler = Pooler(model)
        self._batch = PoolBatch()
        self._specs: dict[str, KVCacheSpec] = {}
        self._block_size = 0
        self._layers: LayerCaches = {}
        self._num_groups = 0
        self._done = ModelRunnerOutput()

    @property
    def limits(self) -> PoolingLimits:
        """What requests may ask for."""
        return self._pooler.limits

    @torch.inference_mode()
    def kv_cache_specs(self, block_size: int) -> dict[str, KVCacheSpec]:
        """What each attention layer asks of the KV cache, seen in a forward pass of a token; nothing for an encoder.

        Raises ModelLoadError.
        """
        probe = ProbeContext()
        zero = np.zeros(1, dtype=np.int64)
        inputs = PoolInputs(chunks=[], token_ids=zero, positions=zero, token_types=zero, query_start_loc=np.arange(2))
        try:
            hidden = self._hidden(inputs, probe)
            if self._model.head is not None:
                self._model.head(torch.zeros(1, dtype=torch.int64, device=self._device), hidden)
        except Exception as e:
            name = type(self._model.module).__name__
            raise ModelLoadError(f"{name} is not supported: it fails on one token: {type(e).__name__}: {e}") from e
        if self._model.is_encoder:
            check_encoder_calls(self._model.module, probe.calls)
        else:
            self._specs = layer_specs(self._model.module, probe.calls, block_size)
        if self._library is not None and self._kernels.linear and self._linears is None:
            self._linears = accelerated_linears(
                self._library, self._model.module, self._probe_states, self._probe_states()
            )
        return self._specs

    def _probe_states(self) -> torch.Tensor:
        """Hidden states of a few tokens."""
        probe = Probe.create(self._model.module.config.vocab_size)
        count = len(probe.token_ids)
        inputs = PoolInputs(
            chunks=[],
            token_ids=probe.token_ids,
            positions=np.arange(count),
            token_types=np.zeros(count, dtype=np.int64),
            query_start_loc=np.array([0, count]),
        )
        if self._model.is_encoder:
            return self._hidden(inputs, EncoderContext(inputs.query_start_loc, self._device))
        layers = self._memory().throwaway(probe.metadata.block_size, probe.num_blocks)
        backend = create_backend("reference", self._device)
        return self._hidden(inputs, StepContext(backend, layers, [StepPlan(probe.metadata, self._device)]))

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the pool."""
        self._block_size = config.block_size
        self._num_groups = len(config.groups)
        self._layers = self._memory().allocate(config)

    def drop_kv_cache(self) -> None:
        """Free the pool and forget the requests, until ``initialize_kv_cache``."""
        self._layers = {}
        self._batch = PoolBatch()

    @torch.inference_mode()
    def recover(self) -> None:
        """See ``Executor.recover``."""
        self._batch = PoolBatch()
        self._done = ModelRunnerOutput()
        self._probe_states()

    @property
    def acceleration(self) -> str:
        """See ``describe``."""
        attention = isinstance(self._backend, NativeAttention) and not self._model.is_encoder
        return describe(self._library, linear=self._linears, attention=attention)

    @property
    def packed_bytes(self) -> int:
        """Bytes of weights that the kernels have packed."""
        return 0 if self._linears is None else self._linears.num_bytes

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the pool."""
        return num_bytes(self._layers)

    @torch.inference_mode()
    def profile(self, num_tokens: int) -> None:
        """Run a step of ``num_tokens`` new tokens on a throwaway cache. An encoder has no cache to leave room for."""
        if self._model.is_encoder:
            return
        length = min(num_tokens, self._model.max_len)
        lengths = [length] * (num_tokens // length) + ([num_tokens % length] if num_tokens % length else [])
        new = [
            NewRequestData(
                request_id=str(i),
                token_ids=[0] * n,
                num_prompt_tokens=n,
                num_computed_tokens=0,
                block_ids=([i + 1],),  # block 0 is the null block
                sampling_params=NO_SAMPLING,
                pooling_params=PoolingParams(task=PoolingTask.EMBED),
            )
            for i, n in enumerate(lengths)
        ]
        self._block_size, self._num_groups = length, 1
        self._layers = self._memory().throwaway(length, len(new) + 1)
        batch = PoolBatch()
        batch.update(SchedulerOutput(new_requests=new))
        inputs = batch.prepare({r.request_id: len(r.token_ids) for r in new})
        self._hidden(inputs, self._context(inputs))
        self._layers = {}

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> None:
        """Forward pass over the scheduled tokens, and the results of prompts that end. They wait for ``sample``."""
        self._batch.update(step)
        self._done = ModelRunnerOutput()
        if not step.num_scheduled_tokens:
            return
        inputs = self._batch.prepare(step.num_scheduled_tokens)
        hidden = self._hidden(inputs, self._context(inputs))
        request_ids = list(step.num_scheduled_tokens)
        self._done = ModelRunnerOutput(
            request_ids=request_ids,
            sampled_token_ids=[[] for _ in request_ids],
            pooled=self._pool(inputs, hidden),
        )

    def sample(self, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput:
        """Results of the step that ``execute`` ran. RuntimeError for a grammar: nothing is sampled."""
        if grammar is not None:
            raise RuntimeError("a pooling engine samples nothing, so no request can be constrained")
        done, self._done = self._done, ModelRunnerOutput()
        return done

    def _pool(self, inputs: PoolInputs, hidden: torch.Tensor) -> dict[str, Vectors]:
        """Gather the step's hidden states ``[tokens, hidden size]``; results of the prompts that are complete."""
        pooled = {}
        starts = inputs.query_start_loc
        for chunk, start, end in zip(inputs.chunks, starts[:-1], starts[1:], strict=True):
            request = chunk.request
            if request.gathered is None:
                request.gathered = self._pooler.begin(request.params)
            token_ids = torch.from_numpy(inputs.token_ids[start:end]).to(self._device)
            request.gathered.add(token_ids, hidden[start:end])
            if chunk.is_last:
                pooled[request.key] = self._pooler.finish(request.params, request.gathered)
        return pooled

    def _context(self, inputs: PoolInputs) -> AttentionContext:
        if self._model.is_encoder:
            return EncoderContext(inputs.query_start_loc, self._device)
        metadata = [attention_metadata(inputs, group, self._block_size) for group in range(self._num_groups)]
        return StepContext(self._backend, self._layers, [StepPlan(m, self._device) for m in metadata])

    def _hidden(self, inputs: PoolInputs, context: AttentionContext) -> torch.Tensor:
        """Hidden states ``[tokens, hidden size]`` after the last layer's norm."""
        arguments = {"input_ids": torch.from_numpy(inputs.token_ids)[None]}
        if self._model.is_encoder:
            arguments |= encoder_inputs(self._model.module.config, inputs.positions, inputs.token_types)
        else:
            arguments["position_ids"] = torch.from_numpy(inputs.positions)[None]
        on_device = {name: tensor.to(self._device) for name, tensor in arguments.items()}
        with use_context(context):
            output = self._model.module(**on_device, **({} if self._model.is_encoder else {"use_cache": False}))
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _memory(self) -> KVMemory:
        return KVMemory(self._model.module, self._specs, self._model.dtype, self._device)

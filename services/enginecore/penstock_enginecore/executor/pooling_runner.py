"""Runner of a pooling model. The runner computes hidden states of the scheduled tokens, and from them the results of
completed prompts.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from penstock_common.types.request import PoolingParams, Vectors
from penstock_enginecore.attention.base import AttentionMetadata, IntArray
from penstock_enginecore.attention.kv_cache import LayerCaches
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.scheduler.output import (
    DraftTokenIds,
    GrammarBitmask,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from penstock_enginecore.core.worker_stats import GraphStats
from penstock_enginecore.executor.broken_states import BrokenStates
from penstock_enginecore.executor.device import step_tokens
from penstock_enginecore.executor.generation.media import Placed, StepMedia, row_bytes
from penstock_enginecore.executor.generation.prompt_embeds import vector_positions
from penstock_enginecore.forward.backbone import BackboneBatch, probe_states
from penstock_enginecore.forward.build import BuiltBackbone
from penstock_enginecore.forward.dummy_inputs import Probe, block_size_of
from penstock_enginecore.lora.adapter import AdaptedForward, ordered_by_adapter, segments_of
from penstock_enginecore.media.towers import Towers
from penstock_enginecore.pooling.embedder import PoolingModel
from penstock_enginecore.pooling.pooler import Accumulator, Pooler
from penstock_enginecore.states.base import StateMetadata
from penstock_enginecore.states.memory import StateLayers, num_bytes
from penstock_enginecore.worker.device_thread import begin_copy

# State of pooling requests. The tokens of a prompt never change. Only the prompt's blocks and its number of computed
# tokens change.


@dataclass(slots=True)
class PoolingRequest:
    """State of a pooling request's prompt from its first step to its last step.

    Attributes:
        token_types: 1 for each token of the second text of a pair, otherwise 0.
        num_attended: Number of leading tokens to which the tokens attend.
        digest: Digest of the request's LoRA adapter, or empty if the request has no adapter.
    """

    key: str
    params: PoolingParams
    token_ids: IntArray
    token_types: IntArray
    num_attended: int
    block_ids: list[list[int]]
    num_computed: int
    digest: bytes = b""
    gathered: Accumulator | None = None

    @classmethod
    def of(cls, new: NewRequestData) -> "PoolingRequest":
        """Create the worker's state of a new request. Raises ValueError for a request that generates tokens."""
        if new.pooling_params is None:
            raise ValueError(
                f"request {new.request_id!r} has no pooling_params, but this engine serves a pooling model"
            )
        token_types = np.zeros(len(new.token_ids), dtype=np.int64)
        if new.second_text_start is not None:
            token_types[new.second_text_start :] = 1
        token_ids = np.array(new.token_ids, dtype=np.int64)
        if (vectors := vector_positions(new)) is not None:
            token_ids[vectors] = 0
        return cls(
            key=new.request_id,
            params=new.pooling_params,
            token_ids=token_ids,
            token_types=token_types,
            num_attended=len(token_ids) if new.unattended_start is None else new.unattended_start,
            block_ids=[list(ids) for ids in new.block_ids],
            num_computed=new.num_computed_tokens,
            digest=b"" if new.lora is None else new.lora.digest,
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start`` to ``end`` of a prompt, which this step computes."""

    request: PoolingRequest
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the chunk completes the prompt."""
        return self.end == len(self.request.token_ids)


@dataclass(frozen=True, slots=True)
class PoolingInputs:
    """Inputs of a step: the parts of prompts that the step computes, and the flat arrays ``batch`` that join their
    tokens in the same order.
    """

    chunks: list[Chunk]
    batch: BackboneBatch


class PoolingBatch:
    """State of the requests in the batch, by request ID.

    Args:
        num_groups: Number of KV cache groups, 0 for an encoder.
        block_size: Number of tokens per KV cache block.
    """

    def __init__(self, num_groups: int, block_size: int) -> None:
        self._num_groups = num_groups
        self._block_size = block_size
        self._requests: dict[str, PoolingRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def update(self, step: SchedulerOutput) -> None:
        """Apply the changes that the scheduler reports for a step: finished requests, new requests, and added KV
        blocks.
        """
        for key in (*step.finished_request_ids, *step.preempted_request_ids):
            self._requests.pop(key, None)  # ignore requests that never ran in this batch
        for new in step.new_requests:
            self._requests[new.request_id] = PoolingRequest.of(new)
        cached = step.cached_requests
        for key, num_computed, blocks in zip(
            cached.request_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            request = self._requests[key]
            request.num_computed = num_computed
            for known, added in zip(request.block_ids, blocks or ([] for _ in request.block_ids), strict=True):
                known.extend(added)

    def prepare(self, num_scheduled_tokens: dict[str, int]) -> PoolingInputs:
        """Return the inputs of a step for the scheduled tokens, in the order of ``num_scheduled_tokens``.

        If some requests have LoRA adapters, requests with the same adapter are adjacent.
        """
        digests = {key: self._requests[key].digest for key in num_scheduled_tokens}
        chunks = []
        for key in ordered_by_adapter(num_scheduled_tokens, digests):
            request = self._requests[key]
            chunks.append(Chunk(request, request.num_computed, request.num_computed + num_scheduled_tokens[key]))
        query_start_loc = np.cumsum([0, *(c.end - c.start for c in chunks)])
        batch = BackboneBatch(
            token_ids=np.concatenate([c.request.token_ids[c.start : c.end] for c in chunks]),
            positions=np.concatenate([np.arange(c.start, c.end) for c in chunks]),
            token_types=np.concatenate([c.request.token_types[c.start : c.end] for c in chunks]),
            query_start_loc=query_start_loc,
            num_attended=np.array([c.request.num_attended for c in chunks], dtype=np.int64),
            attention=[_metadata(chunks, query_start_loc, g, self._block_size) for g in range(self._num_groups)],
            segments=segments_of([c.request.key for c in chunks], digests, query_start_loc),
        )
        return PoolingInputs(chunks, batch)


def _metadata(chunks: list[Chunk], query_start_loc: IntArray, group: int, block_size: int) -> AttentionMetadata:
    """Return the attention metadata of the step's tokens for one KV cache group."""
    tables = [c.request.block_ids[group] for c in chunks]
    block_table: npt.NDArray[np.int32] = np.zeros((len(chunks), max(map(len, tables))), dtype=np.int32)
    slots = []
    for row, (chunk, table) in enumerate(zip(chunks, tables, strict=True)):
        block_table[row, : len(table)] = table
        positions = np.arange(chunk.start, chunk.end)
        slots.append(block_table[row, positions // block_size].astype(np.int64) * block_size + positions % block_size)
    return AttentionMetadata(
        query_start_loc=query_start_loc,
        seq_lens=np.array([chunk.end for chunk in chunks], dtype=np.int64),
        block_table=block_table,
        slot_mapping=np.concatenate(slots),
        block_size=block_size,
    )


class PoolingRunner:
    """``ModelRunner`` of a pooling model. ``sample`` returns pooling results instead of sampled tokens.

    Encoder models have no KV cache.
    """

    def __init__(self, model: PoolingModel, built: BuiltBackbone) -> None:
        self._model = model
        self._backbone = built.backbone
        self.adapted: AdaptedForward | None = built.backbone
        self.computing = built.computing
        self.graph_capture = None
        self.experts = None
        self._pooler = Pooler(model)
        encoder, device = model.encoder, self._backbone.device
        self._media = None if encoder is None else StepMedia(encoder, model.dtype, device)
        self._caches: LayerCaches = {}
        self._state_layers: StateLayers = {}
        self._batch = self._empty_batch(None)
        self._kv_cache: KVCacheConfig | None = None
        self._done = ModelRunnerOutput()

    @property
    def info(self) -> ModelInfo:
        """Properties of the model. Pooling models do not support prompt embeddings."""
        return ModelInfo(
            max_len=self._model.max_len,
            vocab_size=self._model.vocab_size,
            eos_token_ids=self._model.eos_token_ids,
            dtype=str(self._model.precision).removeprefix("torch."),
            pooling=self._pooler.limits,
            step_tokens=step_tokens(self._backbone.device),
            supports_chunked_prefill=not self._model.is_encoder,
            media=() if self._model.encoder is None else tuple(self._model.encoder.media),
            embed_bytes=row_bytes(self._model.encoder, self._model.dtype),
            states=self._backbone.states.needs,
        )

    @property
    def specs(self) -> dict[str, KVCacheSpec]:
        """KV cache specs of the layers. The dictionary is empty for an encoder."""
        return self._backbone.specs

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of the weights of the layers, and of vision and audio encoders."""
        return self._backbone.weight_bytes + Towers(self._model.encoder).weight_bytes

    @property
    def caches(self) -> LayerCaches:
        """The allocated KV cache."""
        return self._caches

    @property
    def state_layers(self) -> StateLayers:
        """The allocated memory for the states of recurrent layers."""
        return self._state_layers

    @property
    def state_bytes(self) -> int:
        """Size in bytes of the memory for the states of recurrent layers."""
        return num_bytes(self._state_layers)

    @property
    def graphs(self) -> GraphStats:
        """Statistics of CUDA graphs. All numbers are 0, because pooling models replay no steps."""
        return GraphStats()

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self._caches = self._backbone.memory.allocate(config)
        self._backbone.bind(self._caches)
        self._state_layers = {} if config.states is None else self._backbone.states.allocate(config.states)
        self._backbone.bind_states(self._state_layers)
        self._kv_cache = config
        self._forget()

    def drop_kv_cache(self) -> None:
        self._caches, self._state_layers = {}, {}
        self._backbone.bind({})
        self._backbone.bind_states({})
        self._kv_cache = None
        self._forget()

    @torch.inference_mode()
    def recover(self) -> None:
        """Forget every request, and test the device by computing a few tokens with a temporary KV cache. Raises the
        error if the test fails.
        """
        self._forget()
        self._probe(Probe.prompt(self._model.vocab_size))

    @torch.inference_mode()
    def execute_dummy_batch(self) -> None:
        """Compute a few dummy tokens with a temporary KV cache."""
        self._probe(Probe.prompt(self._model.vocab_size))

    @torch.inference_mode()
    def profile(self, num_tokens: int, num_seqs: int) -> None:  # noqa: ARG002 - nothing is sampled
        """Run prompts of the model's maximum length, so that the caller can measure the peak memory. Encoders skip this
        run, because their engine does not need to size a KV cache.
        """
        if not self._model.is_encoder:
            probe = Probe.largest(num_tokens, self._model.max_len, block_size_of(self.specs))
            if self._media is None:
                self._probe(probe)
            else:
                self._media.cached.profile(lambda: self._probe(probe))

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> None:
        """Run a forward pass over the scheduled tokens. Computes the results of completed prompts, and stores these
        results for ``sample``.
        """
        self._batch.update(step)
        failures = {} if self._media is None else self._media.update(step)
        self._done = ModelRunnerOutput(encoder_failures=failures)
        if not step.num_scheduled_tokens:
            return
        inputs = self._batch.prepare(step.num_scheduled_tokens)
        request_ids = [chunk.request.key for chunk in inputs.chunks]
        states = None
        if self._state_layers:
            starts = np.array([chunk.start for chunk in inputs.chunks])
            states = StateMetadata.of(request_ids, inputs.batch.query_start_loc, starts, step.states)
        hidden = self._backbone.run(replace(self._with_media(inputs), states=states))
        broken = BrokenStates.of(request_ids, states, begin_copy)
        self._done = ModelRunnerOutput(
            request_ids=request_ids,
            sampled_token_ids=[[] for _ in request_ids],
            pooled=self._pool(inputs, hidden),
            encoder_failures=failures,
            num_nans_in_logits=dict.fromkeys(broken.wait(), 1),
        )

    def sample(self, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput:
        """Return the results of the step that ``execute`` ran. Raises RuntimeError if ``grammar`` is given, because
        nothing is sampled.
        """
        if grammar is not None:
            raise RuntimeError("a pooling model samples no tokens, so no request can have a grammar")
        done, self._done = self._done, ModelRunnerOutput()
        return done

    def draft(self) -> DraftTokenIds:
        """Return no drafts, because pooling models have no drafter."""
        return DraftTokenIds()

    def step_seconds(self, num_tokens: int, passes: int) -> float:  # noqa: ARG002 - as of all runners
        """Return 0, because step times are needed only for drafting and pooling models have no drafter."""
        return 0.0

    def to(self, device: torch.device) -> None:
        """Move the layers, the head, and the vision and audio encoders to ``device``."""
        self._backbone.release_adapters()
        for module in self._model.modules():
            module.to(device)

    def _with_media(self, inputs: PoolingInputs) -> BackboneBatch:
        """Return the batch of a step with the step's media embeddings added. A batch without media is returned
        unchanged.
        """
        batch, media = inputs.batch, self._media
        if not media:
            return batch
        request_ids = [chunk.request.key for chunk in inputs.chunks]
        placed = Placed(request_ids, batch.query_start_loc, batch.positions)
        attention = media.attention(placed, batch.attention)
        batch = replace(batch, attention=attention, rope_positions=media.rope_positions(placed))
        vectors = media.vectors(placed)
        if vectors is None:
            return batch
        embedded, deepstack = vectors.into(self._backbone.embed(batch.token_ids))
        return replace(batch, embedded=embedded, deepstack=deepstack, replaced=vectors.indices)

    def _forget(self) -> None:
        self._batch = self._empty_batch(self._kv_cache)
        self._done = ModelRunnerOutput()
        if self._media is not None:
            self._media.forget()

    def _pool(self, inputs: PoolingInputs, hidden: torch.Tensor) -> dict[str, Vectors]:
        """Collect ``hidden``, the step's hidden states ``[tokens, hidden size]``. Returns the results of completed
        prompts.
        """
        pooled = {}
        starts = inputs.batch.query_start_loc
        for chunk, start, end in zip(inputs.chunks, starts[:-1], starts[1:], strict=True):
            request = chunk.request
            if request.gathered is None:
                request.gathered = self._pooler.begin(request.params)
            token_ids = torch.from_numpy(inputs.batch.token_ids[start:end]).to(self._backbone.device)
            request.gathered.add(token_ids, hidden[start:end])
            if chunk.is_last:
                with self._backbone.classifying(request.digest):
                    pooled[request.key] = self._pooler.finish(request.params, request.gathered)
        return pooled

    def _probe(self, probe: Probe) -> None:
        try:
            probe_states(self._backbone, probe)
        finally:
            self._backbone.bind(self._caches)
            self._backbone.bind_states(self._state_layers)

    def _empty_batch(self, config: KVCacheConfig | None) -> PoolingBatch:
        """Create an empty batch, with the KV cache groups of ``config`` if the model has a KV cache."""
        if config is None or self._model.is_encoder:
            return PoolingBatch(num_groups=0, block_size=1)
        return PoolingBatch(len(config.groups), config.block_size)

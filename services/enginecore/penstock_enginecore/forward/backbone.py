"""Forward pass of a pooling model: the layers of the model without its head. Pooling uses the hidden states of the last
layer.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionBackend, AttentionMetadata, IntArray
from penstock_enginecore.attention.kv_cache import LayerCaches
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.forward.cuda.adapters import SlotModules
from penstock_enginecore.forward.dummy_inputs import Probe, alone_states, throwaway
from penstock_enginecore.forward.modules import (
    NO_ROWS,
    caches_by_module,
    deepstack_inputs,
    module_bytes,
    position_inputs,
    unsupported,
)
from penstock_enginecore.lora.adapter import AdaptedModules, LoraAdapter, LoraSegment, TakeAdapter, pooling_layer
from penstock_enginecore.models.attention_hook import AttentionCall, AttentionContext, StepContext, use_context
from penstock_enginecore.models.encoder import EncoderContext, check_encoder_calls, encoder_inputs
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.layer_embeddings import has_layer_embeddings, layer_inputs
from penstock_enginecore.models.sharing import donor_names
from penstock_enginecore.models.state_hook import StateProbe, state_specs
from penstock_enginecore.models.support import ProbeContext, layer_specs
from penstock_enginecore.pooling.embedder import PoolingModel
from penstock_enginecore.states.base import StateMetadata, use_states
from penstock_enginecore.states.bound import BoundStates, HostStateKernels
from penstock_enginecore.states.core.spec import StateSpec
from penstock_enginecore.states.cuda.context import StateKernels
from penstock_enginecore.states.memory import StateLayers, StateMemory

_FIRST: IntArray = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class BackboneBatch:
    """Tokens of a step, in flat arrays on the host that join the tokens of all prompts. Integer arrays are int64
    ``[tokens]``.

    Attributes:
        token_ids: Ids of the tokens.
        positions: Positions of the tokens in their prompts.
        token_types: For encoder models, 1 for tokens of the second text of a pair, otherwise 0.
        query_start_loc: int64 ``[prompts + 1]``: index of the first token of each prompt, and the number of tokens.
        num_attended: For encoder models, int64 ``[prompts]``: number of leading tokens of each prompt to which its tokens
            attend. None: the tokens of a prompt attend to each other.
        attention: Attention metadata of each KV cache group.
        segments: Ranges of tokens with LoRA adapters.
        embedded: Media input of decoders, as in ``ForwardBatch``.
        rope_positions: Media input of decoders, as in ``ForwardBatch``.
        deepstack: Media input of decoders, as in ``ForwardBatch``.
        states: States of each prompt, for a model with recurrent layers.
        replaced: Media input of decoders, as in ``ForwardBatch``.
    """

    token_ids: IntArray
    positions: IntArray
    token_types: IntArray
    query_start_loc: IntArray
    num_attended: IntArray | None = None
    attention: Sequence[AttentionMetadata] = ()
    segments: Sequence[LoraSegment] = ()
    embedded: torch.Tensor | None = None
    rope_positions: IntArray | None = None
    deepstack: torch.Tensor | None = None
    states: StateMetadata | None = None
    replaced: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class BackboneSpecs:
    """Memory needs of a model's layers, by module name.

    Attributes:
        attention: KV cache needs. Empty for an encoder, which has no KV cache.
        states: Specs of recurrent layers.
        donors: Names of layers whose keys and values another layer shares, as in ``ProbedModel``.
        calls: Attention calls of an encoder's layers, in order.
    """

    attention: dict[str, KVCacheSpec]
    states: dict[str, StateSpec]
    donors: Mapping[str, str] = field(default_factory=dict)
    calls: Sequence[AttentionCall] = ()


class Backbone:
    """Embedding and layers of a model on its device, computed by the modules of transformers.

    Steps run one at a time, with gradients off. Decoder models need ``bind`` before the first step.

    Args:
        specs: Memory needs of the layers.
        backend: Computes attention.
        packed_bytes: Size in bytes of packed weights that modules hold in addition to their parameters.
        cache_dtype: The dtype of the KV cache, or None for the model's dtype.
        adapted: Computes LoRA adapters in device slots, or None to compute them with torch.
        state_kernels: Kernels of recurrent layers, or None to compute them with torch.
        from_start: Compute recurrences token by token, for prompts that begin in the step.
        host_state_kernels: Kernels of recurrent layers on the host, or None.
        encoder: Computes the hidden states of an encoder in place of the modules, or None.
    """

    def __init__(
        self,
        model: PoolingModel,
        specs: BackboneSpecs,
        backend: AttentionBackend,
        device: torch.device,
        packed_bytes: int = 0,
        cache_dtype: torch.dtype | None = None,
        adapted: SlotModules | None = None,
        state_kernels: StateKernels | None = None,
        *,
        from_start: bool = False,
        host_state_kernels: HostStateKernels | None = None,
        encoder: Callable[[BackboneBatch], torch.Tensor] | None = None,
    ) -> None:
        self.device = device
        self._encoder = encoder
        self.specs = specs.attention
        self.memory = backend.memory(specs.attention, cache_dtype or model.dtype, device)
        self._states = BoundStates(
            model.module,
            specs.states,
            model.dtype,
            device,
            state_kernels,
            from_start=from_start,
            on_host=host_state_kernels,
        )
        self._model = model
        self._donors = specs.donors
        self._backend = backend
        self._packed_bytes = packed_bytes
        self._slots = adapted
        self._adapted = AdaptedModules(model.module, pooling_layer(model.module))
        self.bind({})

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of the model's parameters and packed weights."""
        return module_bytes(self._model.module) + self._packed_bytes

    def bind(self, caches: LayerCaches) -> None:
        self._caches = caches_by_module(self._model.module, caches, self._donors)

    @property
    def states(self) -> StateMemory:
        """Allocator of the states of recurrent layers."""
        return self._states.memory

    def bind_states(self, layers: StateLayers) -> None:
        """Keep recurrent states in the memory ``layers`` from now on. An empty dictionary drops the references to the
        current memory.
        """
        self._states.bind(layers)

    def embed(self, token_ids: IntArray) -> torch.Tensor:
        """Return the embeddings of a decoder as a new tensor ``[tokens, hidden size]``. The caller may overwrite rows
        with media embeddings.
        """
        embedding = self._model.module.get_input_embeddings()
        embedded: torch.Tensor = embedding(torch.from_numpy(token_ids)[None].to(self.device))[0]
        return embedded.clone()

    def run(self, batch: BackboneBatch) -> torch.Tensor:
        """Return hidden states ``[tokens, hidden size]`` after the last layer's norm."""
        if self._encoder is not None:
            return self._encoder(batch)
        context: AttentionContext
        if self._model.is_encoder:
            context = EncoderContext(batch.query_start_loc, self.device, batch.num_attended)
        else:
            plans = [self._backend.plan(metadata, self.device) for metadata in batch.attention]
            context = StepContext(self._backend, self._caches, plans)
        with use_states(self._states.context(batch.states, len(batch.token_ids))), self._adding(batch):
            return hidden_states(self._model, batch, context, self.device)

    def _adding(self, batch: BackboneBatch) -> AbstractContextManager[None]:
        """Return a context in which the modules add the outputs of the LoRA adapters of ``batch`` to their own outputs."""
        if self._slots is None:
            return self._adapted.step(batch.segments, NO_ROWS)
        self._slots.allocate()
        return self._slots.step(batch.segments, NO_ROWS, len(batch.token_ids))

    def classifying(self, digest: bytes) -> AbstractContextManager[None]:
        """Return a context in which the model's head must be called for a prompt that uses the LoRA adapter ``digest``.
        An empty digest means no adapter.
        """
        segments = [LoraSegment(digest, 0, 1)] if digest else []
        if self._slots is None:
            return self._adapted.step(segments, _FIRST)
        return self._slots.step(segments, _FIRST, 0)

    def release_adapters(self) -> None:
        """Free the device memory of LoRA adapters. The next step allocates the memory again."""
        if self._slots is not None:
            self._slots.release()

    def prepare_adapter(self, adapter: LoraAdapter) -> TakeAdapter:
        """Prepare a LoRA adapter for the modules that the adapter changes; see ``AdaptedForward``."""
        return (self._slots or self._adapted).prepare(adapter)

    def add_adapter(self, adapter: LoraAdapter) -> None:
        """Add a LoRA adapter to all modules that the adapter changes. Call this method only between steps."""
        self.prepare_adapter(adapter)()

    def remove_adapter(self, digest: bytes) -> None:
        """Remove a LoRA adapter from all modules."""
        (self._slots or self._adapted).remove(digest)


def probe_specs(model: PoolingModel, device: torch.device, block_size: int) -> BackboneSpecs:
    """Run one token through the layers and classification head of ``model`` and return the memory needs of its layers.

    Raises ModelLoadError if the model is not supported.
    """
    context, states = ProbeContext(), StateProbe()
    try:
        zero: IntArray = np.zeros(1, dtype=np.int64)
        with use_states(states):
            hidden = hidden_states(model, BackboneBatch(zero, zero, zero, np.arange(2)), context, device)
        if model.head is not None:
            model.head(torch.zeros(1, dtype=torch.int64, device=device), hidden)
    except Exception as e:
        raise ModelLoadError(unsupported(model.module, e)) from e
    if not model.is_encoder:
        attention = layer_specs(model.module, context.calls, block_size)
        donors = donor_names(model.module, context.calls)
        return BackboneSpecs(attention, state_specs(model.module, states), donors)
    check_encoder_calls(model.module, context.calls)
    return BackboneSpecs({}, {}, calls=context.calls)


def probe_states(backbone: Backbone, probe: Probe) -> torch.Tensor:
    """Return the hidden states ``[tokens, hidden size]`` of ``probe``. Afterwards ``backbone`` has no KV cache and no
    memory for states.
    """
    metadata = probe.metadata
    batch = BackboneBatch(
        token_ids=probe.token_ids,
        positions=probe.positions,
        token_types=np.zeros_like(probe.token_ids),
        query_start_loc=metadata.query_start_loc,
        attention=[metadata],
        states=alone_states(backbone, metadata),
    )
    with throwaway(backbone, metadata.block_size, probe.num_blocks, metadata.num_requests):
        return backbone.run(batch)


def hidden_states(
    model: PoolingModel, batch: BackboneBatch, context: AttentionContext, device: torch.device
) -> torch.Tensor:
    """Return the hidden states ``[tokens, hidden size]`` of ``batch``. The modules send their attention calls to
    ``context``.
    """
    arguments: dict[str, Any] = {}
    if model.is_encoder:
        inputs = encoder_inputs(model.module.config, batch.positions, batch.token_types)
    else:
        positions = batch.positions if batch.rope_positions is None else batch.rope_positions
        inputs = position_inputs(torch.from_numpy(positions))
        arguments = {"use_cache": False, **deepstack_inputs(batch.deepstack)}
    if batch.embedded is None:
        inputs = {"input_ids": torch.from_numpy(batch.token_ids)[None], **inputs}
    else:
        inputs = {"inputs_embeds": batch.embedded[None], **inputs}
        base: Any = model.module.base_model
        if not model.is_encoder and has_layer_embeddings(base):
            token_ids = torch.from_numpy(batch.token_ids.copy()).to(device)
            inputs |= layer_inputs(base, token_ids, batch.replaced)
    with use_context(context):
        output = model.module(**{name: tensor.to(device) for name, tensor in inputs.items()}, **arguments)
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden

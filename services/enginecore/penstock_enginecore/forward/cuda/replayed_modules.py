"""Forward pass that runs transformers' own modules and replays whole steps as CUDA graphs."""

import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from penstock_enginecore.attention.base import IntArray, StepPlan
from penstock_enginecore.attention.kv_cache import LayerCache, LayerCaches
from penstock_enginecore.core.worker_stats import GraphStats
from penstock_enginecore.forward.base import ForwardBatch, ForwardOutput
from penstock_enginecore.forward.cuda.adapters import SlotModules
from penstock_enginecore.forward.cuda.attention import TritonAttention
from penstock_enginecore.forward.cuda.buffers import (
    CAPTURED,
    CacheShape,
    HostSlots,
    InputBuffers,
    KeptHidden,
    StepInputs,
    StepShape,
    shape_of,
)
from penstock_enginecore.forward.cuda.graphs import Padded, StepGraphs
from penstock_enginecore.forward.cuda.sampler import TokenFeedback
from penstock_enginecore.forward.cuda.states import StateBuffers
from penstock_enginecore.forward.dummy_inputs import NUM_TOKENS
from penstock_enginecore.forward.modules import (
    KeptStates,
    ModulesForward,
    ProbedModel,
    caches_by_module,
    module_outputs,
)
from penstock_enginecore.lora.adapter import LoraAdapter, TakeAdapter
from penstock_enginecore.models.attention_hook import StepContext, use_context
from penstock_enginecore.models.loader import LoadedModel, first_line
from penstock_enginecore.states.base import use_states
from penstock_enginecore.states.cuda.context import StateKernels
from penstock_enginecore.states.cuda.indices import StateIndices, is_decode
from penstock_enginecore.states.memory import StateLayers, StateMemory

if TYPE_CHECKING:  # Triton is imported only if there is a device for its kernels
    from penstock_enginecore.forward.cuda.kernels.sample import TokenSampler


class ReplayedModules:
    """``ForwardPass`` that captures and replays steps of the model's modules.

    Steps of padded shapes use tensors that never move. ``graphs`` captures the first step of each shape.
    ``ModulesForward`` runs steps that are too large, have embeddings or ``key_ends``, have prompts that a library
    computes, or set ``keep_states``. After a failed capture, ``ModulesForward`` runs the steps of the same shape. If no
    capture has succeeded, ``failure`` names the module that failed. If ``adapted`` is given, steps with LoRA adapters
    have separate graphs. If ``adapted`` is None, ``ModulesForward`` runs steps with adapters.

    A model with recurrent layers needs ``state_kernels``. Decode steps of such a model have separate graphs, because
    decode steps launch fewer kernels than steps with prompts. Padding requests have no tokens, so they need no
    recurrent state.
    """

    replays = True

    def __init__(
        self,
        probed: ProbedModel,
        attention: TritonAttention,
        graphs: StepGraphs,
        adapted: SlotModules | None = None,
        state_kernels: StateKernels | None = None,
    ) -> None:
        self.device = probed.device
        self._modules = ModulesForward(probed, attention, adapted=adapted, state_kernels=state_kernels)
        self._state_buffers = StateBuffers(CAPTURED, self.device) if probed.states else None
        self._adapted = adapted
        self.separate_head = probed.separate_head
        self.specs = probed.specs
        self.memory = self._modules.memory
        self._module = probed.model.module
        self._donors = probed.donors
        self._sections = probed.demands.sections
        self._dtype = probed.model.dtype
        self._max_len = max(probed.model.max_len, NUM_TOKENS)
        self._attention = attention
        self._graphs = graphs
        self._feedback = TokenFeedback(self.device)
        self._caches: Mapping[torch.nn.Module, LayerCache] = {}
        self._shape: CacheShape | None = None
        self._buffers: InputBuffers | None = None
        self._logits: torch.Tensor | None = None
        self._kept: KeptHidden | None = None

    @property
    def replays_adapters(self) -> bool:
        """Whether steps with LoRA adapters are replayed too."""
        return self._adapted is not None

    @property
    def failure(self) -> str:
        """Reason why no steps are replayed, or empty if steps are replayed."""
        return self._graphs.failure

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of the modules' weights."""
        return self._modules.weight_bytes

    def graph_stats(self) -> GraphStats:
        """Return statistics of replayed steps. Thread-safe."""
        return self._graphs.stats

    def choose_by(self, kernels: "TokenSampler") -> None:
        """Sample the tokens of steps of padded shapes with ``kernels``, inside the replayed graphs."""
        self._graphs.clear()
        self._feedback = TokenFeedback(self.device, kernels)

    def bind(self, caches: LayerCaches) -> None:
        """Use the KV caches ``caches`` from now on, and drop the graphs that were captured with other KV caches."""
        self._graphs.clear()
        self._modules.bind(caches)
        self._caches = caches_by_module(self._module, caches, self._donors)
        if not caches:
            return
        layers = list(caches.values())
        block_size = layers[0].cache.keys.shape[2]
        shape = CacheShape(1 + max(layer.group for layer in layers), -(-self._max_len // block_size))
        if shape != self._shape:
            self._shape, self._buffers = shape, None
            self._buffers = self._allocate(shape)

    @property
    def states(self) -> StateMemory:
        """Allocator of memory for the states of recurrent layers."""
        return self._modules.states

    def bind_states(self, layers: StateLayers) -> None:
        """Keep recurrent states in the memory ``layers`` from now on, and drop the graphs that were captured with other
        memory.
        """
        self._graphs.clear()
        self._modules.bind_states(layers)

    def embed(self, token_ids: IntArray) -> torch.Tensor:
        """Return embeddings; see ``ModulesForward.embed``."""
        return self._modules.embed(token_ids)

    def keep_hidden(self, layers: Sequence[int]) -> None:
        """Make ``run`` return the hidden states of these layers, in the form that the model outputs."""
        self._graphs.clear()
        self._modules.keep_hidden(layers)
        width, dtype = self._module.config.hidden_size, self._dtype
        self._kept = KeptHidden(layers, width, dtype, self.device) if layers else None

    def run(self, batch: ForwardBatch, rows: IntArray, *, keep_states: bool = False) -> ForwardOutput:
        """Compute a step. The next step overwrites the logits of a replayed step.

        Raises RuntimeError if no KV cache is bound, or if the step has no states and the model has recurrent layers.
        """
        if self._buffers is None or not self._caches:
            raise RuntimeError("bind must be called before the first step")
        num_tokens = len(batch.token_ids)
        shape = shape_of(batch, rows)
        adapted = len(batch.segments) > 0
        sees_behind = any(metadata.key_ends is not None for metadata in batch.attention)
        has_media = batch.embedded is not None or sees_behind
        library = self._attention.library
        if library is not None:
            library.reserve(batch.attention, self.device)
        has_prompts = library is not None and library.has_prompts(batch.attention)
        apart = keep_states or has_media or has_prompts or (adapted and self._adapted is None)
        if apart or shape.is_large or self._graphs.refuses(self._key(batch, shape)):
            self._graphs.count_launched()
            return self._modules.run(batch, rows, keep_states=keep_states)
        if self._feedback.moves(batch):
            self._graphs.clear()
        inputs, indices, key = self._buffers.of(shape), self._indices(batch, shape), self._key(batch, shape)
        self._buffers.load(batch, rows, shape, self._feedback.nobody)
        padded = Padded(shape.tokens, shape.tokens - num_tokens, shape.requests - len(rows))
        if adapted and self._adapted is not None:
            launch = functools.partial(self._launch_adapted, self._adapted, inputs, shape, indices)
            with self._adapted.tiles(batch.segments, rows, shape):
                logits = self._graphs.run(key, launch, padded)
        else:
            launch = functools.partial(self._launch, inputs, shape, indices)
            logits = self._graphs.run(key, launch, padded)
        if indices is not None and batch.states is not None:
            batch.states.flags.append(indices.broken[: len(batch.states.sequences)].clone())
        kept = None if self._kept is None else self._kept.of(num_tokens)
        return ForwardOutput(logits[: len(rows)], launched=self._feedback.launched(batch, shape), hidden=kept)

    def head(self, states: KeptStates, rows: torch.Tensor) -> torch.Tensor:
        """Return logits; see ``ModulesForward.head``."""
        return self._modules.head(states, rows)

    def prepare_adapter(self, adapter: LoraAdapter) -> TakeAdapter:
        """Prepare an adapter; see ``ModulesForward.prepare_adapter``."""
        return self._modules.prepare_adapter(adapter)

    def add_adapter(self, adapter: LoraAdapter) -> None:
        """Add a LoRA adapter. Call this method only between steps."""
        self._modules.add_adapter(adapter)

    def remove_adapter(self, digest: bytes) -> None:
        """Remove a LoRA adapter."""
        self._modules.remove_adapter(digest)

    def to(self, device: torch.device) -> None:
        """Move all modules of the model to ``device``. Buffers of steps are freed, and allocated again when a KV cache
        is bound.
        """
        self._graphs.clear()
        self._shape = self._buffers = self._logits = None
        if self._attention.library is not None:
            self._attention.library.release()
        self._modules.to(device)

    def weights(self) -> list[torch.Tensor]:
        """Return the parameters and buffers of the model's modules."""
        return self._modules.weights()

    def read(self, model: LoadedModel) -> None:
        """Copy the weights of ``model``; see ``ModulesForward.read``."""
        self._modules.read(model)

    def _key(self, batch: ForwardBatch, shape: StepShape) -> Hashable:
        """Return the key of the graph for a step: its padded shape, and the properties that need separate graphs."""
        adapters = ("adapters",) if len(batch.segments) else ()
        decodes = () if self._state_buffers is None or batch.states is None else (is_decode(batch.states),)
        return (shape, *adapters, *decodes) if adapters or decodes else shape

    def _indices(self, batch: ForwardBatch, shape: StepShape) -> StateIndices | None:
        """Start copying the indices of the memory slots of a step's recurrent states to the device. Returns None for a
        model without recurrent layers.
        """
        if self._state_buffers is None:
            return None
        if batch.states is None:
            raise RuntimeError("the step has no states for the model's recurrent layers")
        self._state_buffers.load(batch.states, len(batch.token_ids), shape)
        return self._state_buffers.of(shape, decodes=is_decode(batch.states))

    def _launch_adapted(
        self, adapted: SlotModules, inputs: StepInputs, shape: StepShape, indices: StateIndices | None
    ) -> torch.Tensor:
        """Launch a step in which the outputs of LoRA adapters are added."""
        with adapted.hooked():
            return self._launch(inputs, shape, indices)

    def _launch(self, inputs: StepInputs, shape: StepShape, indices: StateIndices | None = None) -> torch.Tensor:
        """Launch all work of a step, from its token ids on. Returns logits ``[requests, vocab]``."""
        self._feedback.feed(inputs)
        token_ids, positions, rows = inputs.token_ids.long(), inputs.positions.long(), inputs.rows.long()
        at = positions if inputs.rope_positions is None else inputs.rope_positions.long()
        plans: list[StepPlan] = [self._attention.padded_plan(group, positions) for group in inputs.groups]
        recurrent = None
        if indices is not None:
            indices.broken.zero_()
            recurrent = self._modules.bound_states.captured(indices)
        context = StepContext(self._attention, self._caches, plans)
        with use_context(context), use_states(recurrent), _failures_named(self._module):
            layers = () if self._kept is None else self._kept.layers
            ids = {"input_ids": token_ids[None]}
            computed, hidden = module_outputs(self._module, ids, at, rows, layers)
        if self._kept is not None and hidden is not None:
            self._kept.begin(len(hidden))
            self._kept.put_all(hidden)
        # Copy the logits to one buffer that all graphs share. Otherwise each graph would have its own buffer.
        logits = self._logits_like(computed)[: shape.requests]
        logits.copy_(computed)
        self._feedback.choose(logits, inputs, shape)
        return logits

    def _logits_like(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the buffer for logits, which is large enough for the largest shape. The first call allocates the
        buffer, before a step is captured.
        """
        if self._logits is None:
            with torch.inference_mode(False):
                self._logits = torch.zeros(CAPTURED.requests, logits.shape[1], dtype=logits.dtype, device=self.device)
        return self._logits

    @torch.inference_mode(False)
    def _allocate(self, shape: CacheShape) -> InputBuffers:
        slots, sections = HostSlots.on(self.device), self._sections
        return InputBuffers(CAPTURED, shape.num_groups, shape.max_blocks, slots, self.device, sections=sections)


@contextmanager
def _failures_named(module: torch.nn.Module) -> Iterator[None]:
    """Return a context in which RuntimeErrors of the forward pass name the module that raised them."""
    running: list[str] = []
    with ExitStack() as hooks:
        for name, part in module.named_modules():
            entered = functools.partial(_enter, running, name or type(module).__name__)
            hooks.callback(part.register_forward_pre_hook(entered).remove)
            hooks.callback(part.register_forward_hook(lambda *_: running.pop() and None).remove)
        try:
            yield
        except torch.OutOfMemoryError:  # callers handle errors of this type
            raise
        except RuntimeError as e:
            raise RuntimeError(f"{running[-1] if running else type(module).__name__}: {first_line(e)}") from e


def _enter(running: list[str], name: str, *_: object) -> None:
    running.append(name)

"""Forward pass that runs transformers' own modules, with attention over the paged KV cache. Every supported model type
can use this forward pass.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from penstock_enginecore.attention.base import AttentionBackend, IntArray
from penstock_enginecore.attention.kv_cache import FLOAT8, NO_SCALES, KVScales, LayerCache, LayerCaches
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.forward.base import ForwardBatch, ForwardOutput, MediaDemands, demands_of, to_device
from penstock_enginecore.forward.cuda.adapters import SlotModules
from penstock_enginecore.lora.adapter import AdaptedModules, LoraAdapter, LoraSegment, TakeAdapter, head_of
from penstock_enginecore.models.attention_hook import AttentionCall, StepContext, use_context
from penstock_enginecore.models.dtypes import num_bytes
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.layer_embeddings import has_layer_embeddings, layer_inputs
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.models.quantization.loading import dequantize_kept
from penstock_enginecore.models.sharing import donor_names
from penstock_enginecore.models.state_hook import StateProbe, state_specs
from penstock_enginecore.models.support import ProbeContext, layer_specs
from penstock_enginecore.states.base import use_states
from penstock_enginecore.states.bound import BoundStates, HostStateKernels
from penstock_enginecore.states.core.spec import StateSpec
from penstock_enginecore.states.cuda.context import StateKernels
from penstock_enginecore.states.memory import StateLayers, StateMemory

# Head of a causal language model, called without the layers: it computes logits of selected tokens from their hidden
# states.
#
# After the last layer, models compute more than a matrix product: soft caps, scales and casts. Therefore the model's
# own ``forward`` runs. During the call, a module that returns the given hidden states stands in for the base model.


class _Replay(torch.nn.Module):
    """Module that stands in for the base model and returns a given output. The other attributes of this module are the
    attributes of the base model.
    """

    def __init__(self, output: Any, base: Any) -> None:
        super().__init__()
        self._output = output
        self._of_base = [base]  # in a list, so that PyTorch does not register the base model as a submodule

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only the base model has."""
        return getattr(self.__dict__["_of_base"][0], name)

    def forward(self, *args: object, **kwargs: object) -> Any:  # noqa: ARG002 - the signature of any base model
        """Return the given output."""
        return self._output


class HiddenStates:
    """Output of the base model, which ``Head.capture`` stores during a forward pass."""

    def __init__(self) -> None:
        self.output: Any = None


class Head:
    """Computes logits of selected tokens from the hidden states of a forward pass. Not thread-safe."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        # In most models ``base_model_prefix`` is the name of the attribute with the base model. Llama 4's text model is
        # an exception.
        models = [name for name, child in module.named_children() if isinstance(child, PreTrainedModel)]
        self._name = module.base_model_prefix if module.base_model_prefix in models or not models else models[0]

    @contextmanager
    def capture(self) -> Iterator[HiddenStates]:
        """Return a context that stores the hidden states of the forward pass in it. These hidden states are the input
        for ``logits``.
        """
        states = HiddenStates()

        def keep(module: torch.nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001 - torch's signature
            states.output = output

        base = self._module._modules.get(self._name)
        handle = base.register_forward_hook(keep) if base is not None else None
        try:
            yield states
        finally:
            if handle is not None:
                handle.remove()

    def reproduces(self, states: HiddenStates, logits: torch.Tensor) -> bool:
        """Return whether the head can be called without the layers, that is, whether the head computes ``logits``
        ``[tokens, vocab]`` from ``states``.
        """
        if not dataclasses.is_dataclass(states.output) or not hasattr(states.output, "last_hidden_state"):
            return False
        return torch.equal(self.logits(states, torch.arange(len(logits), device=logits.device)), logits)

    def logits(self, states: HiddenStates, rows: torch.Tensor) -> torch.Tensor:
        """Return logits ``[len(rows), vocab]`` for the tokens with the indices ``rows`` (int64) in the flat batch that
        produced ``states``.
        """
        hidden = states.output.last_hidden_state[:, rows]
        modules = self._module._modules
        base = modules[self._name]
        modules[self._name] = _Replay(replace(states.output, last_hidden_state=hidden), base)
        try:
            output = self._module(input_ids=rows[None], use_cache=False)
        finally:
            modules[self._name] = base
        return cast("torch.Tensor", output.logits[0])


NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """Loaded model, and properties of its layers that a forward pass over one token has found.

    Attributes:
        calls: The attention calls of the model's layers, in order.
        specs: KV cache specs by layer name.
        separate_head: Whether the head can be called without the layers.
        cache_dtype: The dtype of the KV caches.
        states: Specs of recurrent layers by module name.
    """

    model: LoadedModel
    device: torch.device
    calls: list[AttentionCall]
    specs: dict[str, KVCacheSpec]
    head: Head
    separate_head: bool
    cache_dtype: torch.dtype
    states: dict[str, StateSpec]
    donors: Mapping[str, str] = field(default_factory=dict)
    """Names of layers whose keys and values another layer shares, by the name of the layer that only reads them."""

    @property
    def demands(self) -> MediaDemands:
        """Additional inputs that steps with the model's media need."""
        return demands_of(self.model)

    @property
    def cache_scales(self) -> Mapping[str, KVScales]:
        """Scales of an fp8 KV cache, by layer name."""
        return self.model.kv_scales if self.cache_dtype == FLOAT8 else NO_SCALES


def probe_model(
    model: LoadedModel, device: torch.device, block_size: int, cache_dtype: torch.dtype | None = None
) -> ProbedModel:
    """Run one token through ``model`` and return the model with the KV cache specs of its layers.

    ``cache_dtype`` is the dtype of the KV cache, or None for the model's dtype. Raises ModelLoadError if the model
    cannot compute the token or is not supported.
    """
    _expect_no_padding(model.module)
    context, states, head = ProbeContext(), StateProbe(), Head(model.module)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    try:
        with use_context(context), use_states(states), head.capture() as hidden:
            logits = module_logits(model.module, {"input_ids": zero[None]}, zero, zero)
        separate = head.reproduces(hidden, logits)
    except Exception as e:
        raise ModelLoadError(unsupported(model.module, e)) from e
    dtype = cache_dtype or model.dtype
    specs = in_cache_dtype(layer_specs(model.module, context.calls, block_size), cache_dtype)
    donors = donor_names(model.module, context.calls)
    if dtype == FLOAT8 and (unknown := sorted(model.kv_scales.keys() - specs.keys() - donors.keys())):
        raise ModelLoadError(
            f"cache.dtype is 'fp8', but the checkpoint has scales for {unknown[0]}, which is not an attention "
            f"layer of {type(model.module).__name__}; set cache.dtype to 'auto'"
        )
    recurrent = state_specs(model.module, states)
    return ProbedModel(model, device, context.calls, specs, head, separate, dtype, recurrent, donors)


def _expect_no_padding(module: PreTrainedModel) -> None:
    """Turn off transformers' warning about padding without a mask. The check for the warning would read from the device
    in every call.
    """
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            part.__dict__["warn_if_padding_and_no_attention_mask"] = lambda *args: None  # noqa: ARG005


def in_cache_dtype(specs: Mapping[str, KVCacheSpec], dtype: torch.dtype | None) -> dict[str, KVCacheSpec]:
    """Return ``specs`` changed to KV caches of ``dtype``, or unchanged if ``dtype`` is None."""
    if dtype is None:
        return dict(specs)
    return {name: msgspec.structs.replace(spec, dtype_size=dtype.itemsize) for name, spec in specs.items()}


def unsupported(module: torch.nn.Module, error: Exception) -> str:
    """Return the error text for a model that raised ``error`` in its first forward pass."""
    return f"{type(module).__name__} is not supported: a forward pass over one token fails with {type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class KeptStates:
    """Results of a forward pass that ``ModulesForward.head`` needs.

    Attributes:
        hidden: Output of the base model.
        segments: Ranges of tokens with LoRA adapters.
    """

    hidden: HiddenStates
    segments: Sequence[LoraSegment]


class ModulesForward:
    """``ForwardPass`` that calls the model's modules.

    Args:
        probed: The model and its KV cache specs.
        backend: Computes attention.
        packed_bytes: Size in bytes of packed weights that modules hold in addition to their parameters.
        adapted: Computes LoRA adapters, or None to compute them with torch.
        state_kernels: Kernels of recurrent layers, or None to compute them with torch.
        from_start: Compute recurrences token by token, for sequences that begin in the step.
        host_state_kernels: Kernels of recurrent layers on the host, or None.
    """

    def __init__(
        self,
        probed: ProbedModel,
        backend: AttentionBackend,
        packed_bytes: int = 0,
        adapted: AdaptedModules | SlotModules | None = None,
        state_kernels: StateKernels | None = None,
        *,
        from_start: bool = False,
        host_state_kernels: HostStateKernels | None = None,
    ) -> None:
        self.device = probed.device
        self.separate_head = probed.separate_head
        self.specs = probed.specs
        self._module = probed.model.module
        self._head = probed.head
        self._backend = backend
        self._packed_bytes = packed_bytes
        self._donors = probed.donors
        self._has_layer_embeddings = has_layer_embeddings(self._module.base_model)
        self._caches: Mapping[torch.nn.Module, LayerCache] = {}
        self._kept_layers: Sequence[int] = ()
        self._adapted = adapted or AdaptedModules(self._module, head_of(self._module))
        self.memory = backend.memory(probed.specs, probed.cache_dtype, probed.device, probed.cache_scales)
        self.bound_states = BoundStates(
            self._module,
            probed.states,
            probed.model.dtype,
            probed.device,
            state_kernels,
            from_start=from_start,
            on_host=host_state_kernels,
        )

    @property
    def states(self) -> StateMemory:
        """Allocator of memory for the states of recurrent layers."""
        return self.bound_states.memory

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of the model's parameters and packed weights."""
        return module_bytes(self._module) + self._packed_bytes

    def bind(self, caches: LayerCaches) -> None:
        """Use the KV caches ``caches`` from now on. The keys of ``caches`` are the names of the attention modules."""
        if caches and isinstance(self._adapted, SlotModules):
            self._adapted.allocate()
        self._caches = caches_by_module(self._module, caches, self._donors)

    def bind_states(self, layers: StateLayers) -> None:
        """Keep recurrent states in the memory ``layers`` from now on. The keys of ``layers`` are the names of the
        recurrent layers.
        """
        self.bound_states.bind(layers)

    def embed(self, token_ids: IntArray) -> torch.Tensor:
        """Return embeddings from the model's embedding module, in the model's dtype."""
        embedded = self._module.get_input_embeddings()(self._to_device(token_ids)[None])
        return cast("torch.Tensor", embedded[0])

    def keep_hidden(self, layers: Sequence[int]) -> None:
        """Make ``run`` return the hidden states of these layers, in the form that the model outputs."""
        self._kept_layers = tuple(layers)

    def run(self, batch: ForwardBatch, rows: IntArray, *, keep_states: bool = False) -> ForwardOutput:
        """Compute a step with one call of the model. States are kept only if the head can be called without the layers."""
        if batch.embedded is None:
            token_ids = self._to_device(batch.token_ids)
            if batch.fed is not None:
                batch.fed.write(token_ids)
            inputs = {"input_ids": token_ids[None]}
        else:
            inputs = {"inputs_embeds": batch.embedded[None]}
            if self._has_layer_embeddings:
                inputs |= layer_inputs(self._module.base_model, self._to_device(batch.token_ids.copy()), batch.replaced)
        given: dict[str, Any] = {**inputs, **deepstack_inputs(batch.deepstack)}
        positions = batch.positions if batch.rope_positions is None else batch.rope_positions
        plans = [self._backend.plan(metadata, self.device) for metadata in batch.attention]
        capture = self._head.capture() if keep_states else nullcontext()
        context = StepContext(self._backend, self._caches, plans)
        adapted = self._adding(batch.segments, rows, len(batch.token_ids))
        recurrent = self.bound_states.context(batch.states, len(batch.token_ids))
        with use_context(context), use_states(recurrent), adapted, capture as states:
            at, wanted = self._to_device(positions), self._to_device(rows)
            logits, hidden = module_outputs(
                self._module, given, at, wanted, self._kept_layers, calls_base=self.separate_head
            )
        kept = None if states is None else KeptStates(states, batch.segments)
        return ForwardOutput(logits, kept, hidden=hidden)

    def head(self, states: KeptStates, rows: torch.Tensor) -> torch.Tensor:
        """Return logits by calling the model's ``forward`` with the kept hidden states."""
        of = rows.cpu().numpy() if states.segments else NO_ROWS
        with self._adding(states.segments, of, 0):
            return self._head.logits(states.hidden, rows)

    def prepare_adapter(self, adapter: LoraAdapter) -> TakeAdapter:
        """Prepare a LoRA adapter for the modules that the adapter changes."""
        return self._adapted.prepare(adapter)

    def add_adapter(self, adapter: LoraAdapter) -> None:
        """Add a LoRA adapter. Call this method only between steps."""
        self.prepare_adapter(adapter)()

    def remove_adapter(self, digest: bytes) -> None:
        """Remove a LoRA adapter from all modules."""
        self._adapted.remove(digest)

    def to(self, device: torch.device) -> None:
        """Move all modules of the model to ``device``."""
        if isinstance(self._adapted, SlotModules):
            self._adapted.release()
        module: torch.nn.Module = self._module
        module.to(device)

    def weights(self) -> list[torch.Tensor]:
        """Return the parameters and buffers of the modules."""
        return module_tensors(self._module)

    def read(self, model: LoadedModel) -> None:
        """Copy the weights of ``model`` into this forward pass's modules. Quantized layers of ``model`` are dequantized
        first, as in this forward pass.
        """
        dequantize_kept(model.module, model.dtype)
        copy_weights(module_tensors(model.module), self.weights())

    def _adding(self, segments: Sequence[LoraSegment], rows: IntArray, num_tokens: int) -> AbstractContextManager[None]:
        """Return a context in which modules add the outputs of LoRA adapters to their own outputs. If ``num_tokens`` is
        0, only the head adds outputs of adapters.
        """
        if isinstance(self._adapted, SlotModules):
            return self._adapted.step(segments, rows, num_tokens)
        return self._adapted.step(segments, rows)

    def _to_device(self, array: IntArray) -> torch.Tensor:
        return to_device(array, self.device)


def caches_by_module(
    module: torch.nn.Module, caches: LayerCaches, donors: Mapping[str, str]
) -> dict[torch.nn.Module, LayerCache]:
    """Return the KV caches by attention module. ``caches`` are KV caches by the name of the attention module in
    ``module``. A layer in ``donors``, which is as in ``ProbedModel``, gets the KV cache of its donor.
    """
    modules = dict(module.named_modules())
    found = {modules[name]: cache for name, cache in caches.items()}
    if caches:
        found |= {modules[name]: replace(caches[donor], read_only=True) for name, donor in donors.items()}
    return found


def module_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of ``module``. A tensor that several submodules share is returned once."""
    return [*module.parameters(), *module.buffers()]


@torch.inference_mode()
def copy_weights(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy each tensor of ``sources`` into the tensor at the same index in ``targets``. Raises RuntimeError if shapes
    or dtypes differ.
    """
    of_sources, of_targets = ([(tensor.shape, tensor.dtype) for tensor in each] for each in (sources, targets))
    if of_sources != of_targets:
        raise RuntimeError(
            "the checkpoint has changed since the engine started: shapes or dtypes of its weights are different"
        )
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def module_bytes(module: torch.nn.Module) -> int:
    """Return the size in bytes of the parameters of ``module``."""
    return sum(map(num_bytes, module.parameters()))


def deepstack_inputs(deepstack: torch.Tensor | None) -> dict[str, Any]:
    """Return the arguments of a base model that pass ``deepstack``: embeddings ``[layers, tokens, hidden size]`` to add
    after the first layers.
    """
    if deepstack is None:
        return {}
    everywhere = torch.ones(1, deepstack.shape[1], dtype=torch.bool, device=deepstack.device)
    return {"visual_pos_masks": everywhere, "deepstack_visual_embeds": list(deepstack)}


def position_inputs(positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arguments of a base model that pass ``positions``: int64 ``[tokens]``, or ``[3, tokens]`` for rotary
    embeddings with sections.
    """
    return {"position_ids": positions[None] if positions.ndim == 1 else positions[:, None]}


def module_logits(
    module: PreTrainedModel, inputs: dict[str, torch.Tensor], positions: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Return logits ``[len(rows), vocab]`` for the tokens ``rows`` of a flat batch with ``inputs`` at ``positions``,
    int64 ``[tokens]`` or ``[3, tokens]``.
    """
    return module_outputs(module, inputs, positions, rows)[0]


def module_outputs(
    module: PreTrainedModel,
    inputs: dict[str, Any],
    positions: torch.Tensor,
    rows: torch.Tensor,
    layers: Sequence[int] = (),
    *,
    calls_base: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the logits of ``module_logits``, and hidden states ``[tokens, layers * hidden size]`` of ``layers``.

    See ``ForwardPass.keep_hidden`` for the numbering of the layers.

    Args:
        module: The model.
        inputs: Token ids or embeddings, and other arguments of the base model.
        positions: int64 ``[tokens]`` or ``[3, tokens]``.
        rows: int64, indices of the tokens whose logits are returned.
        layers: Numbers of the layers whose hidden states are returned.
        calls_base: Whether the model calls its base model as a module. The output of the last norm is then taken from
            the base model. Otherwise, transformers keeps the hidden states of all layers until the end of the pass.
    """
    given = {**inputs, **position_inputs(positions), "logits_to_keep": rows, "use_cache": False}
    if not layers:
        return cast("torch.Tensor", module(**given).logits[0]), None
    last = module.config.num_hidden_layers if calls_base else None
    with _final_states(module) as final:
        output: Any = module(**given, output_hidden_states=any(layer != last for layer in layers))
    hidden = [final[0] if layer == last else output.hidden_states[layer][0] for layer in layers]
    return cast("torch.Tensor", output.logits[0]), torch.cat(hidden, dim=1)


@contextmanager
def _final_states(module: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Return a context that collects the output of the last norm, ``[tokens, hidden size]``, of each forward pass
    inside the context.
    """
    found: list[torch.Tensor] = []

    def keep(base: torch.nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001 - torch's signature
        if hasattr(output, "last_hidden_state"):
            found.append(output.last_hidden_state[0])

    handle = module.base_model.register_forward_hook(keep)
    try:
        yield found
    finally:
        handle.remove()

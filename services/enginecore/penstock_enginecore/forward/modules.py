"""The forward pass by transformers' own modules, with attention over the paged cache. Every family that is served runs so."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
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
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.models.quantization.loading import dequantize_kept
from penstock_enginecore.models.support import ProbeContext, layer_specs

# The last part of a causal language model on its own: logits of chosen rows, made from hidden states.
#
# Models end in more than a matrix: soft caps, scales and casts. So it is the model's own ``forward`` that runs, with its
# base model replaced for the call by one that returns the hidden states it is given.


class _Replay(torch.nn.Module):
    """Stands for the base model."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def forward(self, *args: object, **kwargs: object) -> Any:  # noqa: ARG002 - the signature of any base model
        """The output it was made with."""
        return self._output


class HiddenStates:
    """What the base model put out in the forward pass inside a ``Head.capture`` block."""

    def __init__(self) -> None:
        self.output: Any = None


class Head:
    """Logits of rows of a forward pass. Not for use by several threads at once."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        # Most are called by the prefix that their class names; Llama 4's text model is not.
        models = [name for name, child in module.named_children() if isinstance(child, PreTrainedModel)]
        self._name = module.base_model_prefix if module.base_model_prefix in models or not models else models[0]

    @contextmanager
    def capture(self) -> Iterator[HiddenStates]:
        """Keep the hidden states of the forward pass in the ``with`` block, for ``logits``."""
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
        """Whether this model comes apart: its head makes of ``states`` the ``logits`` ``[tokens, vocab]`` of the pass."""
        if not dataclasses.is_dataclass(states.output) or not hasattr(states.output, "last_hidden_state"):
            return False
        return torch.equal(self.logits(states, torch.arange(len(logits), device=logits.device)), logits)

    def logits(self, states: HiddenStates, rows: torch.Tensor) -> torch.Tensor:
        """Logits ``[len(rows), vocab]`` at ``rows`` (int64) of the flat batch of the pass that gave ``states``."""
        hidden = states.output.last_hidden_state[:, rows]
        modules = self._module._modules
        base = modules[self._name]
        modules[self._name] = _Replay(dataclasses.replace(states.output, last_hidden_state=hidden))
        try:
            output = self._module(input_ids=rows[None], use_cache=False)
        finally:
            modules[self._name] = base
        return cast("torch.Tensor", output.logits[0])


NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """A loaded model and what a forward pass over one token has shown of it: its attention ``calls`` in order, the ``specs`` of
    their caches by layer name, and whether its head runs on its own. ``cache_dtype``: of the numbers in these caches.
    """

    model: LoadedModel
    device: torch.device
    calls: list[AttentionCall]
    specs: dict[str, KVCacheSpec]
    head: Head
    separate_head: bool
    cache_dtype: torch.dtype

    @property
    def demands(self) -> MediaDemands:
        """What its steps have besides tokens and embeddings."""
        return demands_of(self.model)

    @property
    def cache_scales(self) -> Mapping[str, KVScales]:
        """Those of an fp8 cache, by layer name."""
        return self.model.kv_scales if self.cache_dtype == FLOAT8 else NO_SCALES


def probe_model(
    model: LoadedModel, device: torch.device, block_size: int, cache_dtype: torch.dtype | None = None
) -> ProbedModel:
    """Run a token through ``model`` and look at what its layers ask for. ``cache_dtype``: of their keys and values in the cache,
    None for that of the model. Raises ModelLoadError.
    """
    _expect_no_padding(model.module)
    context, head = ProbeContext(), Head(model.module)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    try:
        with use_context(context), head.capture() as states:
            logits = module_logits(model.module, {"input_ids": zero[None]}, zero, zero)
        separate = head.reproduces(states, logits)
    except Exception as e:
        raise ModelLoadError(unsupported(model.module, e)) from e
    dtype = cache_dtype or model.dtype
    specs = in_cache_dtype(layer_specs(model.module, context.calls, block_size), cache_dtype)
    if dtype == FLOAT8 and (unknown := sorted(model.kv_scales.keys() - specs.keys())):
        raise ModelLoadError(
            f"cache.dtype is 'fp8', and the checkpoint has scales for {unknown[0]}, which is no attention layer of "
            f"{type(model.module).__name__}; use 'auto'"
        )
    return ProbedModel(model, device, context.calls, specs, head, separate, dtype)


def _expect_no_padding(module: PreTrainedModel) -> None:
    """Some models look, in every call, for padding without a mask, to warn of it: a read on the host. There is none here."""
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            part.__dict__["warn_if_padding_and_no_attention_mask"] = lambda *args: None  # noqa: ARG005


def in_cache_dtype(specs: Mapping[str, KVCacheSpec], dtype: torch.dtype | None) -> dict[str, KVCacheSpec]:
    """``specs`` of caches that hold numbers of ``dtype``, None for those of the model."""
    if dtype is None:
        return dict(specs)
    return {name: msgspec.structs.replace(spec, dtype_size=dtype.itemsize) for name, spec in specs.items()}


def unsupported(module: torch.nn.Module, error: Exception) -> str:
    """Why a model that raised ``error`` at its first token cannot be served."""
    return f"{type(module).__name__} is not supported: it fails on one token: {type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class KeptStates:
    """Of a forward pass, for ``ModulesForward.head``: what the base model put out, and which of its tokens have adapters."""

    hidden: HiddenStates
    segments: Sequence[LoraSegment]


class ModulesForward:
    """A ``ForwardPass`` that calls the model. ``packed_bytes``: what modules hold besides their parameters. ``adapted``: what
    adds for adapters, by torch for None.
    """

    def __init__(
        self,
        probed: ProbedModel,
        backend: AttentionBackend,
        packed_bytes: int = 0,
        adapted: AdaptedModules | SlotModules | None = None,
    ) -> None:
        self.device = probed.device
        self.separate_head = probed.separate_head
        self.specs = probed.specs
        self._module = probed.model.module
        self._head = probed.head
        self._backend = backend
        self._packed_bytes = packed_bytes
        self._caches: Mapping[torch.nn.Module, LayerCache] = {}
        self._kept_layers: Sequence[int] = ()
        self._adapted = adapted or AdaptedModules(self._module, head_of(self._module))
        self.memory = backend.memory(probed.specs, probed.cache_dtype, probed.device, probed.cache_scales)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's parameters and of what was packed of them."""
        return module_bytes(self._module) + self._packed_bytes

    def bind(self, caches: LayerCaches) -> None:
        """Attention modules find their part of ``caches`` by their names."""
        if caches and isinstance(self._adapted, SlotModules):
            self._adapted.allocate()
        self._caches = caches_by_module(self._module, caches)

    def embed(self, token_ids: IntArray) -> torch.Tensor:
        """By the model's embedding module, in the model's dtype."""
        embedded = self._module.get_input_embeddings()(self._to_device(token_ids)[None])
        return cast("torch.Tensor", embedded[0])

    def keep_hidden(self, layers: Sequence[int]) -> None:
        """As the model itself puts them out."""
        self._kept_layers = tuple(layers)

    def run(self, batch: ForwardBatch, rows: IntArray, *, keep_states: bool = False) -> ForwardOutput:
        """One call of the model. States are what its layers put out, kept where its head can be called on its own."""
        if batch.embedded is None:
            token_ids = self._to_device(batch.token_ids)
            if batch.fed is not None:
                batch.fed.write(token_ids)
            inputs = {"input_ids": token_ids[None]}
        else:
            inputs = {"inputs_embeds": batch.embedded[None]}
        given: dict[str, Any] = {**inputs, **deepstack_inputs(batch.deepstack)}
        positions = batch.positions if batch.rope_positions is None else batch.rope_positions
        plans = [self._backend.plan(metadata, self.device) for metadata in batch.attention]
        capture = self._head.capture() if keep_states else nullcontext()
        context = StepContext(self._backend, self._caches, plans)
        adapted = self._adding(batch.segments, rows, len(batch.token_ids))
        with use_context(context), adapted, capture as states:
            at, wanted = self._to_device(positions), self._to_device(rows)
            logits, hidden = module_outputs(self._module, given, at, wanted, self._kept_layers)
        kept = None if states is None else KeptStates(states, batch.segments)
        return ForwardOutput(logits, kept, hidden=hidden)

    def head(self, states: KeptStates, rows: torch.Tensor) -> torch.Tensor:
        """By the model's own ``forward`` behind its layers."""
        of = rows.cpu().numpy() if states.segments else NO_ROWS
        with self._adding(states.segments, of, 0):
            return self._head.logits(states.hidden, rows)

    def prepare_adapter(self, adapter: LoraAdapter) -> TakeAdapter:
        """To the modules of its names."""
        return self._adapted.prepare(adapter)

    def add_adapter(self, adapter: LoraAdapter) -> None:
        """Between steps."""
        self.prepare_adapter(adapter)()

    def remove_adapter(self, digest: bytes) -> None:
        """From all of them."""
        self._adapted.remove(digest)

    def to(self, device: torch.device) -> None:
        """Moves all of the model's modules."""
        if isinstance(self._adapted, SlotModules):
            self._adapted.release()
        module: torch.nn.Module = self._module
        module.to(device)

    def weights(self) -> list[torch.Tensor]:
        """Those of the modules, and their buffers."""
        return module_tensors(self._module)

    def read(self, model: LoadedModel) -> None:
        """Quantized layers of ``model`` are dequantized first, as these were."""
        dequantize_kept(model.module, model.dtype)
        copy_weights(module_tensors(model.module), self.weights())

    def _adding(self, segments: Sequence[LoraSegment], rows: IntArray, num_tokens: int) -> AbstractContextManager[None]:
        """A ``with`` block in which modules get what adapters add; without tokens the head alone."""
        if isinstance(self._adapted, SlotModules):
            return self._adapted.step(segments, rows, num_tokens)
        return self._adapted.step(segments, rows)

    def _to_device(self, array: IntArray) -> torch.Tensor:
        return to_device(array, self.device)


def caches_by_module(module: torch.nn.Module, caches: LayerCaches) -> dict[torch.nn.Module, LayerCache]:
    """Those of the attention modules in ``module``, in place of their names."""
    modules = dict(module.named_modules())
    return {modules[name]: cache for name, cache in caches.items()}


def module_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, each once."""
    return [*module.parameters(), *module.buffers()]


@torch.inference_mode()
def copy_weights(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Overwrite ``targets`` one by one. RuntimeError where they are not of the same shapes and types."""
    of_sources, of_targets = ([(tensor.shape, tensor.dtype) for tensor in each] for each in (sources, targets))
    if of_sources != of_targets:
        raise RuntimeError(
            "the checkpoint is another one than when the engine was started: its weights differ in shape"
        )
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def module_bytes(module: torch.nn.Module) -> int:
    """Bytes of the parameters of ``module``."""
    return sum(map(num_bytes, module.parameters()))


def deepstack_inputs(deepstack: torch.Tensor | None) -> dict[str, Any]:
    """What a base model takes for rows ``[layers, tokens, hidden size]`` that are added behind its first layers."""
    if deepstack is None:
        return {}
    everywhere = torch.ones(1, deepstack.shape[1], dtype=torch.bool, device=deepstack.device)
    return {"visual_pos_masks": everywhere, "deepstack_visual_embeds": list(deepstack)}


def position_inputs(positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a base model takes for ``positions`` int64 ``[tokens]``, or ``[3, tokens]`` in sections."""
    return {"position_ids": positions[None] if positions.ndim == 1 else positions[:, None]}


def module_logits(
    module: PreTrainedModel, inputs: dict[str, torch.Tensor], positions: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Logits ``[len(rows), vocab]`` of a flat batch of ``inputs`` at ``positions``, int64 ``[tokens]`` or ``[3, tokens]``."""
    return module_outputs(module, inputs, positions, rows)[0]


def module_outputs(
    module: PreTrainedModel,
    inputs: dict[str, Any],
    positions: torch.Tensor,
    rows: torch.Tensor,
    layers: Sequence[int] = (),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Those logits, and hidden states ``[tokens, layers * hidden size]`` of ``layers``, see ``ForwardPass.keep_hidden``."""
    asked = {"output_hidden_states": True} if layers else {}
    output: Any = module(**inputs, **position_inputs(positions), logits_to_keep=rows, use_cache=False, **asked)
    hidden = torch.cat([output.hidden_states[layer][0] for layer in layers], dim=1) if layers else None
    return cast("torch.Tensor", output.logits[0]), hidden

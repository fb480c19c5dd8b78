"""Decoders of Llama's shape as one call per step.

Norms, projections, rotary embedding, attention, activation and head of all layers run inside the kernels, with q, k and v
merged into one product and gate and up into another whose epilogue is the activation. Weights may be bfloat16; sums,
activations and the KV cache are float32. What is taken over is read from transformers' own modules; ``acceleration`` compares
it with them before they give their weights up.
"""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from penstock_enginecore.attention.base import AttentionMetadata, AttentionParams, IntArray
from penstock_enginecore.models.attention_hook import AttentionCall, LayerCache
from penstock_enginecore.models.query_scale import query_scale
from penstock_enginecore.native.attention import CHUNK, cache_struct, group_struct, reach_struct
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.structs import Cache, Group, Layer, Model, Step
from penstock_enginecore.native.weights import PackedWeight

KNOWN = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Classes whose layers are: norm, attention with rotary halves, add, norm, gated MLP, add."""
_MAX_LAYERS = 1000
_MAX_TABLE_BYTES = 64 * 1024 * 1024
"""Cosines and sines of all positions are kept up to this size."""


class UnsuitableError(Exception):
    """The kernels do not compute this model; the message says why."""


class HiddenStates:
    """What the layers put out in the steps inside a ``NativeDecoder.capture`` block: ``x`` ``[tokens, hidden size]``."""

    def __init__(self) -> None:
        self.x = torch.empty(0)


class NativeDecoder:
    """A model's layers and head. ``calls``: its attention calls of a probe forward, in order. Raises UnsuitableError."""

    def __init__(
        self,
        library: NativeLibrary,
        module: PreTrainedModel,
        calls: Sequence[AttentionCall],
        block_size: int,
        max_len: int,
    ) -> None:
        if reason := _unsuitable(library, module, calls, block_size):
            raise UnsuitableError(reason)
        self._library = library
        self._module: Any = module
        self.attention_modules = [call.module for call in calls]
        self._states: HiddenStates | None = None
        self._bound: Mapping[torch.nn.Module, LayerCache] | None = None
        self._keep: list[Any] = []
        self._handle = self._build([call.params for call in calls])
        library.free_with(self, self._handle, "decoder")
        self._embedding = cast("torch.Tensor", module.get_input_embeddings().weight)
        self._rotary = _Rotary(self._module.model.rotary_emb, self._model.head_size, max_len)

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(part.num_bytes for part in self._keep if isinstance(part, PackedWeight))

    def embed(self, token_ids: IntArray) -> torch.Tensor:
        """Float32 ``[tokens, hidden size]``, a new tensor."""
        return torch.nn.functional.embedding(torch.from_numpy(token_ids), self._embedding).float()

    def run(
        self,
        x: torch.Tensor,
        positions: IntArray,
        attention: Sequence[AttentionMetadata],
        layers: Mapping[torch.nn.Module, LayerCache],
        rows: IntArray,
    ) -> torch.Tensor:
        """Logits ``[len(rows), vocab]`` of ``rows`` (int64) of the flat batch. ``x``: embedded tokens, overwritten.
        ``attention``: one entry per KV cache group.
        """
        if layers is not self._bound:
            self._bind(layers)
        for i, metadata in enumerate(attention):
            self._groups[i] = group_struct(metadata)
        cosines, sines = self._rotary.of(positions, x)
        logits = torch.empty(len(rows), self._model.head.n)
        first = attention[0]
        step = Step(
            len(x),
            first.num_requests,
            first.query_start_loc.ctypes.data,
            first.seq_lens.ctypes.data,
            self._groups,
            self._layer_groups.ctypes.data,
            self._caches,
            x.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            len(rows),
            rows.ctypes.data,
            logits.data_ptr(),
        )
        self._library.call_on(self._handle, "decoder_forward", ctypes.byref(step))
        if self._states is not None:
            self._states.x = x
        return logits

    @contextmanager
    def capture(self) -> Iterator[HiddenStates]:
        """Keep what the layers of the step in the ``with`` block put out, for ``logits``."""
        self._states = HiddenStates()
        try:
            yield self._states
        finally:
            self._states = None

    def logits(self, states: HiddenStates, rows: torch.Tensor) -> torch.Tensor:
        """Logits ``[len(rows), vocab]`` at ``rows`` (int64) of the flat batch of the step that gave ``states``."""
        logits = torch.empty(len(rows), self._model.head.n)
        x, count = states.x.data_ptr(), len(rows)
        self._library.call_on(self._handle, "decoder_head", x, rows.data_ptr(), count, logits.data_ptr())
        return logits

    def take_over(self) -> None:
        """Free the weights of the modules that this stands for."""
        for layer in self._module.model.layers:
            for linear in (*_projections(layer), layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
                _empty(linear)
            _empty(layer.mlp.down_proj)
        if self._module.lm_head.weight is not self._embedding:
            _empty(self._module.lm_head)

    def _bind(self, layers: Mapping[torch.nn.Module, LayerCache]) -> None:
        of = [layers[module] for module in self.attention_modules]
        self._caches = (Cache * len(of))(*(cache_struct(layer.cache) for layer in of))
        self._layer_groups = np.array([layer.group for layer in of], dtype=np.int64)
        self._groups = (Group * (int(self._layer_groups.max()) + 1))()
        self._bound = layers

    def _build(self, params: Sequence[AttentionParams]) -> ctypes.c_void_p:
        model, config = self._module.model, self._module.config
        layers = (Layer * len(model.layers))(*map(self._layer, model.layers, params))
        first = model.layers[0].self_attn
        head_size = int(first.head_dim)
        self._model = Model(
            len(layers),
            config.hidden_size,
            first.q_proj.weight.shape[0] // head_size,
            first.k_proj.weight.shape[0] // head_size,
            head_size,
            model.layers[0].mlp.gate_proj.weight.shape[0],
            model.norm.variance_epsilon,
            layers,
            self._vector(model.norm.weight),
            self._packed(self._module.lm_head.weight, None),
        )
        handle = ctypes.c_void_p()
        self._library.call("decoder_new", ctypes.byref(self._model), ctypes.byref(handle))
        return handle

    def _layer(self, layer: Any, params: AttentionParams) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = _projections(layer)
        bias = None if projections[0].bias is None else torch.cat([p.bias for p in projections])
        reach, sinks = reach_struct(params)
        self._keep.append(sinks)
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        query_norm, key_norm = (None if norm is None else self._vector(norm.weight) for norm in norms)
        return Layer(
            self._vector(layer.input_layernorm.weight),
            self._vector(layer.post_attention_layernorm.weight),
            query_norm,
            key_norm,
            self._packed(torch.cat([p.weight for p in projections]), bias),
            self._packed(attention.o_proj.weight, attention.o_proj.bias),
            self._packed(self._interleaved(mlp.gate_proj.weight, mlp.up_proj.weight), None),
            self._packed(mlp.down_proj.weight, mlp.down_proj.bias),
            reach,
        )

    def _interleaved(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Rows of both in turn, a vector's lanes at a time."""
        shape = (-1, self._library.lanes, gate.shape[1])
        return torch.stack([gate.view(shape), up.view(shape)], dim=1).view(-1, gate.shape[1])

    def _packed(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        packed = PackedWeight(self._library, weight, bias)
        self._keep.append(packed)
        return packed.struct

    def _vector(self, weight: torch.Tensor) -> int:
        vector = weight.detach().float().clone()
        self._keep.append(vector)
        return vector.data_ptr()


class _Rotary:
    """Cosines and sines ``[tokens, head size]`` of positions, as the model's own module makes them."""

    def __init__(self, module: Any, head_size: int, max_len: int) -> None:
        self._module = module
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None
        if 8 * head_size * max_len <= _MAX_TABLE_BYTES:
            self._tables = self._compute(torch.arange(max_len), torch.empty(0))

    def of(self, positions: IntArray, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """At ``positions`` int64 ``[tokens]``."""
        wanted = torch.from_numpy(positions)
        if self._tables is None:
            return self._compute(wanted, like)
        cosines, sines = (table.index_select(0, wanted) for table in self._tables)
        return cosines, sines

    def _compute(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = self._module(like, positions[None])
        return cosines[0].float().contiguous(), sines[0].float().contiguous()


def _unsuitable(
    library: NativeLibrary, module: PreTrainedModel, calls: Sequence[AttentionCall], block_size: int
) -> str | None:
    name = type(module).__name__
    if name not in KNOWN:
        return f"{name} is not one of {', '.join(sorted(KNOWN))}"
    model, config = cast("Any", module).model, module.config
    if (dtype := module.get_input_embeddings().weight.dtype) not in (torch.float32, torch.bfloat16):
        return f"its weights are {str(dtype).removeprefix('torch.')}"
    if block_size % CHUNK:
        return f"cache.block_size {block_size} is no multiple of {CHUNK}"
    if [call.module for call in calls] != [layer.self_attn for layer in model.layers] or len(calls) > _MAX_LAYERS:
        return "its layers are not called one after the other"
    head_size = calls[0].query.shape[2]
    if head_size % library.lanes or any(call.value.shape[2] != head_size for call in calls):
        return f"a head size of {head_size} is no multiple of {library.lanes}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    if config.intermediate_size % library.lanes:
        return f"intermediate_size {config.intermediate_size} is no multiple of {library.lanes}"
    if any(layer.mlp.gate_proj.bias is not None or layer.mlp.up_proj.bias is not None for layer in model.layers):
        return "its gate has a bias"
    if any(query_scale(call.module) is not None for call in calls):
        return "it scales queries by position"
    return None


def _projections(layer: Any) -> tuple[Any, Any, Any]:
    attention = layer.self_attn
    return attention.q_proj, attention.k_proj, attention.v_proj


def _empty(linear: Any) -> None:
    linear.weight = torch.nn.Parameter(linear.weight.new_empty(0), requires_grad=False)

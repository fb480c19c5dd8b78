"""The forward pass of decoders of Llama's shape by the CPU kernels: one call per step.

Norms, projections, rotary embedding, attention, activation and head of all layers run inside the kernels, with q, k and v
merged into one product and gate and up into another whose epilogue is the activation. Weights may be bfloat16; sums,
activations and the KV cache are float32. What is taken over is read from transformers' own modules.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from penstock_enginecore.attention.base import AttentionParams, IntArray
from penstock_enginecore.attention.kv_cache import LayerCaches
from penstock_enginecore.attention.kv_memory import KVMemory
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.forward.base import ForwardBatch, ForwardOutput, ForwardPass
from penstock_enginecore.forward.modules import ProbedModel, module_bytes
from penstock_enginecore.forward.probe import Probe, probe_logits
from penstock_enginecore.forward.proof import Candidate, UnsuitableError
from penstock_enginecore.models.attention_hook import AttentionCall
from penstock_enginecore.models.query_scale import query_scale
from penstock_enginecore.native.attention import TILE, TILES, cache_struct, group_struct, params_struct
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.linear import PackedLinears
from penstock_enginecore.native.structs import Cache, Group, Layer, Model, Step
from penstock_enginecore.native.weights import PackedWeight

T = TypeVar("T")

KNOWN = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Classes whose layers are: norm, attention with rotary halves, add, norm, gated MLP, add."""
_MAX_LAYERS = 1000
_MAX_TABLE_BYTES = 64 * 1024 * 1024
"""Cosines and sines of all positions are kept up to this size."""


def decoder_candidate(library: NativeLibrary, probed: ProbedModel) -> Candidate[ForwardPass]:
    """The whole model in the kernels."""
    return Candidate("decoder", lambda: NativeForward(library, probed))


def linear_candidate(
    library: NativeLibrary, module: torch.nn.Module, run: Callable[[], torch.Tensor], serve: Callable[[int], T]
) -> Candidate[T]:
    """The linear layers of ``module`` packed, for models whose other parts the kernels do not know. ``run``: what the model makes
    of a probe. ``serve``: makes what serves then, of the bytes that are packed.
    """
    return Candidate("linear", lambda: _PackedModules(PackedLinears(module, library), run, serve))


class NativeForward:
    """A ``ForwardPass`` of layers and head, built beside the modules, whose weights it packs. Raises UnsuitableError."""

    device = torch.device("cpu")
    separate_head = True

    def __init__(self, library: NativeLibrary, probed: ProbedModel) -> None:
        module, calls = probed.model.module, probed.calls
        if reason := _unsuitable(library, module, calls, probed.specs):
            raise UnsuitableError(reason)
        self.specs = {
            name: msgspec.structs.replace(spec, dtype_size=torch.float32.itemsize)
            for name, spec in probed.specs.items()
        }
        self.memory = KVMemory(self.specs, lambda *_: TILES, torch.float32, self.device)
        self._library = library
        self._module: Any = module
        self._vocab_size = probed.model.vocab_size
        self._packed: list[PackedWeight] = []
        self._keep: list[torch.Tensor | None] = []
        self._handle = self._build([call.params for call in calls])
        library.free_with(self, self._handle, "decoder")
        self._embedding = cast("torch.Tensor", module.get_input_embeddings().weight)
        self._rotary = _Rotary(self._module.model.rotary_emb, self._model.head_size, probed.model.max_len)

    @property
    def weight_bytes(self) -> int:
        """Bytes of what the modules still hold, embeddings and norms, and of the packed weights."""
        return module_bytes(self._module) + sum(weight.num_bytes for weight in self._packed)

    def bind(self, caches: LayerCaches) -> None:
        """Layers go by their order of execution."""
        of = [caches[name] for name in self.specs] if caches else []
        self._caches = (Cache * len(of))(*(cache_struct(layer.cache) for layer in of))
        self._layer_groups = np.array([layer.group for layer in of], dtype=np.int64)
        self._groups = (Group * (int(self._layer_groups.max(initial=-1)) + 1))()
        self._bound = caches  # the structs point into it

    def embed(self, token_ids: IntArray) -> torch.Tensor:
        """Rows of the embedding in float32."""
        return torch.nn.functional.embedding(torch.from_numpy(token_ids), self._embedding).float()

    def run(self, batch: ForwardBatch, rows: IntArray, *, keep_states: bool = False) -> ForwardOutput:
        """One call of the kernels, head included. States are what the layers put out, ``[tokens, hidden size]``."""
        x = self.embed(batch.token_ids) if batch.embedded is None else batch.embedded
        for i, metadata in enumerate(batch.attention):
            self._groups[i] = group_struct(metadata)
        cosines, sines = self._rotary.of(batch.positions, x)
        logits = torch.empty(len(rows), self._model.head.n)
        first = batch.attention[0]
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
        return ForwardOutput(logits, x if keep_states else None)

    def head(self, states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The last norm and the head alone."""
        logits = torch.empty(len(rows), self._model.head.n)
        x, count = states.data_ptr(), len(rows)
        self._library.call_on(self._handle, "decoder_head", x, rows.data_ptr(), count, logits.data_ptr())
        return logits

    def to(self, device: torch.device) -> None:
        """Moves what the modules still hold. Packed weights stay where the kernels read them."""
        self._module.to(device)

    def probe(self) -> torch.Tensor:
        """Logits of a few tokens."""
        return probe_logits(self, Probe.prompt(self._vocab_size))

    def where(self) -> str:
        """The kernels do not stop between layers."""
        return ""

    def take_over(self) -> "NativeForward":
        """Frees the weights of all projections. q, k and v are rows one after the other of one packed product, gate and up rows
        in turn, some at a time, of another: an adapter's part of a product goes where the projection's rows are.
        """
        for layer in self._module.model.layers:
            for linear in (*_projections(layer), layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
                _empty(linear)
            _empty(layer.mlp.down_proj)
        if self._module.lm_head.weight is not self._embedding:
            _empty(self._module.lm_head)
        return self

    def undo(self) -> None:
        """The modules are as they were: nothing of them was replaced."""

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
            self._pack(self._module.lm_head.weight, None),
        )
        handle = ctypes.c_void_p()
        self._library.call("decoder_new", ctypes.byref(self._model), ctypes.byref(handle))
        return handle

    def _layer(self, layer: Any, params: AttentionParams) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = _projections(layer)
        bias = None if projections[0].bias is None else torch.cat([p.bias for p in projections])
        how, sinks = params_struct(params)
        self._keep.append(sinks)
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        query_norm, key_norm = (None if norm is None else self._vector(norm.weight) for norm in norms)
        return Layer(
            self._vector(layer.input_layernorm.weight),
            self._vector(layer.post_attention_layernorm.weight),
            query_norm,
            key_norm,
            self._pack(torch.cat([p.weight for p in projections]), bias),
            self._pack(attention.o_proj.weight, attention.o_proj.bias),
            self._pack(self._interleaved(mlp.gate_proj.weight, mlp.up_proj.weight), None),
            self._pack(mlp.down_proj.weight, mlp.down_proj.bias),
            how,
        )

    def _interleaved(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Rows of both in turn, a vector's lanes at a time."""
        shape = (-1, self._library.lanes, gate.shape[1])
        return torch.stack([gate.view(shape), up.view(shape)], dim=1).view(-1, gate.shape[1])

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        packed = PackedWeight(self._library, weight, bias)
        self._packed.append(packed)
        return packed.struct

    def _vector(self, weight: torch.Tensor) -> int:
        vector = weight.detach().float().clone()
        self._keep.append(vector)
        return vector.data_ptr()


class _PackedModules(Generic[T]):
    """Packed layers in place of a model's own."""

    def __init__(self, linears: PackedLinears, run: Callable[[], torch.Tensor], serve: Callable[[int], T]) -> None:
        self._linears = linears
        self._run = run
        self._serve = serve

    def probe(self) -> torch.Tensor:
        """By the modules, with packed layers among them."""
        return self._run()

    def where(self) -> str:
        """Nothing is known of single layers."""
        return ""

    def take_over(self) -> T:
        """Lets go of the layers that were replaced. Those that stand for them have their names and sizes."""
        self._linears.keep()
        return self._serve(self._linears.num_bytes)

    def undo(self) -> None:
        """Puts the layers back."""
        self._linears.undo()


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
    library: NativeLibrary,
    module: PreTrainedModel,
    calls: Sequence[AttentionCall],
    specs: Mapping[str, KVCacheSpec],
) -> str | None:
    name = type(module).__name__
    if name not in KNOWN:
        return f"{name} is not one of {', '.join(sorted(KNOWN))}"
    model, config = cast("Any", module).model, module.config
    if (dtype := module.get_input_embeddings().weight.dtype) not in (torch.float32, torch.bfloat16):
        return f"its weights are {str(dtype).removeprefix('torch.')}"
    if odd := [spec.block_size for spec in specs.values() if spec.block_size % TILE]:
        return f"cache.block_size {odd[0]} is no multiple of {TILE}"
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

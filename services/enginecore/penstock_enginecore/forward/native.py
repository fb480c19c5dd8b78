"""The forward pass of decoders of Llama's shape by the CPU kernels: one call per step.

Norms, projections, rotary embedding, attention, activation and head of all layers run inside the kernels, with q, k and v
merged into one product and gate and up into another whose epilogue is the activation. Weights may be bfloat16; sums and
activations are float32, and so is the KV cache unless inputs of products are rounded. What is taken over is read from
transformers' own modules.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec
import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionParams, IntArray
from penstock_enginecore.attention.kv_cache import LayerCaches
from penstock_enginecore.attention.kv_memory import KVMemory
from penstock_enginecore.forward.base import ForwardBatch, ForwardOutput, ForwardPass
from penstock_enginecore.forward.modules import ProbedModel, module_bytes
from penstock_enginecore.forward.native_models import own_layers, unsuitable, unsuitable_part
from penstock_enginecore.forward.proof import Candidate, UnsuitableError
from penstock_enginecore.native.attention import cache_struct, group_struct, kernel_layout, params_struct
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.packed_layers import PackedLayers
from penstock_enginecore.native.structs import Cache, Exchange, Group, Layer, Linear, Model, Step
from penstock_enginecore.native.weights import PackedWeight
from penstock_enginecore.parallel.part import Part
from penstock_enginecore.parallel.shared_memory import PIECE
from penstock_enginecore.parallel.stages import Seams

T = TypeVar("T")

_MAX_TABLE_BYTES = 64 * 1024 * 1024
"""Cosines and sines of all positions are kept up to this size."""


def decoder_candidate(
    library: NativeLibrary,
    probed: ProbedModel,
    run: Callable[[ForwardPass], torch.Tensor],
    part: Part | None = None,
    seams: Seams | None = None,
) -> Candidate[ForwardPass]:
    """All layers in the kernels: of the model, or of a rank's ``part`` of it, or of a stage that was cut at ``seams``. ``run``:
    what a pass makes of a probe.
    """
    return Candidate("decoder", lambda: NativeForward(library, probed, run, part, seams), library.rounds_to)


def linear_candidate(
    library: NativeLibrary, module: torch.nn.Module, run: Callable[[], torch.Tensor], serve: Callable[[int], T]
) -> Candidate[T]:
    """The linear layers of ``module`` packed, for models whose other parts the kernels do not know. ``run``: what the model makes
    of a probe. ``serve``: makes what serves then, of the bytes that are packed.
    """

    def build() -> _PackedModules[T]:
        return _PackedModules(PackedLayers(module, library), run, serve)

    return Candidate("linear", build, library.rounds_to, spends=True)


class NativeForward:
    """A ``ForwardPass`` of layers and head, built beside the modules, whose weights it packs. Raises UnsuitableError. See
    ``decoder_candidate``.
    """

    device = torch.device("cpu")
    separate_head = True

    def __init__(
        self,
        library: NativeLibrary,
        probed: ProbedModel,
        run: Callable[[ForwardPass], torch.Tensor],
        part: Part | None = None,
        seams: Seams | None = None,
    ) -> None:
        module, calls = probed.model.module, probed.calls
        reason = unsuitable(library, module, calls, probed.specs) or unsuitable_part(probed.model, part)
        if seams is not None and probed.model.dtype != torch.float32:
            reason = reason or f"its stages pass on {str(probed.model.dtype).removeprefix('torch.')}"
        if reason:
            raise UnsuitableError(reason)
        # What products round is kept rounded.
        dtype = library.rounds_to or torch.float32
        self.specs = {
            name: msgspec.structs.replace(spec, dtype_size=dtype.itemsize) for name, spec in probed.specs.items()
        }
        self.memory = KVMemory(self.specs, lambda *_: kernel_layout(library, dtype), dtype, self.device)
        self._library = library
        self._module: Any = module
        self._part, self._seams = part, seams
        self._probe = run
        self._packed: list[PackedWeight] = []
        self._keep: list[torch.Tensor | None] = []
        self._handle = self._build([call.params for call in calls])
        library.free_with(self, self._handle, "decoder")
        self._embedding: Any = module.get_input_embeddings()
        self._sum_nanoseconds = np.zeros(2 * len(calls), dtype=np.int64)
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
        return cast("torch.Tensor", self._embedding(torch.from_numpy(token_ids))).float()

    def run(self, batch: ForwardBatch, rows: IntArray, *, keep_states: bool = False) -> ForwardOutput:
        """One call of the kernels, head included. States are what the layers put out, ``[tokens, hidden size]``; unless they are
        kept, the last layer computes behind its keys and values no more than the logits need.
        """
        x = self._entering(batch)
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
            keep_states,
            self._sum_nanoseconds.ctypes.data,
        )
        self._library.call_on(self._handle, "decoder_forward", ctypes.byref(step))
        if self._seams is not None and not self._model.head.n:
            self._seams.leaving = x
        if self._part is not None:
            self._part.collectives.have_reduced((self._sum_nanoseconds * 1e-9).tolist())
        return ForwardOutput(self._finish(logits), x if keep_states else None)

    def head(self, states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The last norm and the head alone."""
        logits = torch.empty(len(rows), self._model.head.n)
        x, count = states.data_ptr(), len(rows)
        self._library.call_on(self._handle, "decoder_head", x, rows.data_ptr(), count, logits.data_ptr())
        return self._finish(logits)

    def _entering(self, batch: ForwardBatch) -> torch.Tensor:
        """What the first layer gets, which the kernels overwrite."""
        if self._seams is not None and self._seams.entering is not None:
            return self._seams.entering.clone()
        return self.embed(batch.token_ids) if batch.embedded is None else batch.embedded

    def _finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Whole, where this rank has some of the columns."""
        vocabulary = None if self._part is None else self._part.vocabulary
        if vocabulary is None or not self._model.head.n:
            return logits
        return vocabulary.finish(logits)

    def to(self, device: torch.device) -> None:
        """Moves what the modules still hold. Packed weights stay where the kernels read them."""
        self._module.to(device)

    def probe(self) -> torch.Tensor:
        """As the modules run it."""
        return self._probe(self)

    def where(self) -> str:
        """The kernels do not stop between layers."""
        return ""

    def take_over(self) -> "NativeForward":
        """Frees the weights of all projections. q, k and v are rows one after the other of one packed product, gate and up rows
        in turn, some at a time, of another: an adapter's part of a product goes where the projection's rows are.
        """
        for layer in own_layers(self._module.model):
            for linear in (*_projections(layer), layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
                _empty(linear)
            _empty(layer.mlp.down_proj)
        if self._module.lm_head.weight is not self._embedding.weight:
            _empty(self._module.lm_head)
        return self

    def undo(self) -> None:
        """The modules are as they were: nothing of them was replaced."""

    def _build(self, params: Sequence[AttentionParams]) -> ctypes.c_void_p:
        model, config = self._module.model, self._module.config
        own = own_layers(model)
        layers = (Layer * len(own))(*map(self._layer, own, params))
        first = own[0].self_attn
        head_size = int(first.head_dim)
        self._model = Model(
            len(layers),
            config.hidden_size,
            first.q_proj.weight.shape[0] // head_size,
            first.k_proj.weight.shape[0] // head_size,
            head_size,
            own[0].mlp.gate_proj.weight.shape[0],
            model.norm.variance_epsilon,
            layers,
            self._vector(model.norm.weight),
            self._pack(head, None) if len(head := self._module.lm_head.weight) else Linear(),
            _exchange(self._part),
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

    def __init__(self, layers: PackedLayers, run: Callable[[], torch.Tensor], serve: Callable[[int], T]) -> None:
        self._layers = layers
        self._run = run
        self._serve = serve

    def probe(self) -> torch.Tensor:
        """By the modules, with packed layers among them."""
        return self._run()

    def where(self) -> str:
        """Nothing is known of single layers."""
        return ""

    def take_over(self) -> T:
        """The layers that stand for others have their names and sizes."""
        return self._serve(self._layers.num_bytes)

    def undo(self) -> None:
        """There is nothing to put back."""


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


def _exchange(part: Part | None) -> Exchange:
    memory = None if part is None else part.shared_memory
    return Exchange() if memory is None else Exchange(memory.base, memory.rank, memory.size, PIECE)


def _projections(layer: Any) -> tuple[Any, Any, Any]:
    attention = layer.self_attn
    return attention.q_proj, attention.k_proj, attention.v_proj


def _empty(linear: Any) -> None:
    linear.weight = torch.nn.Parameter(torch.empty(0, dtype=linear.weight.dtype), requires_grad=False)

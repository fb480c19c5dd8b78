"""Conversion of a model plan's layers to the CPU kernels' decoder, and the checks for unsupported plans."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from penstock_enginecore.attention.kv_cache import KVMemory, LayerCaches
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.forward.modules import module_bytes
from penstock_enginecore.forward.native_inputs import EmbeddingLookup, EmbeddingRows, Rotaries, StepRotaries
from penstock_enginecore.models.decoder_plan import AttentionPlan, ExpertsPlan, LayerPlan, MLPPlan, ModelPlan, Norm
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.native.attention import TILE, cache_struct, group_struct, kernel_layout, params_struct
from penstock_enginecore.native.backend import PackedLayers
from penstock_enginecore.native.experts import PackedExperts, PackedRouter
from penstock_enginecore.native.ffi_structs import Cache, Exchange, Fusion, Group, Layer, Linear, Mixture, Model, Step
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.weights import PackedWeight, interleaved
from penstock_enginecore.parallel.collectives import PIECE
from penstock_enginecore.parallel.sharding import Part

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""Numbers of gate activations in the kernels' interface."""
_MAX_LAYERS = 800


def unsuitable(library: NativeLibrary, plan: ModelPlan, specs: Mapping[str, KVCacheSpec]) -> str | None:
    """Return why the decoder cannot compute the layers of ``plan``, or None if it can."""
    if odd := [spec.block_size for spec in specs.values() if spec.block_size % TILE]:
        return f"cache.block_size {odd[0]} is not a multiple of {TILE}"
    if len(plan.layers) > _MAX_LAYERS:
        return f"the model has more than {_MAX_LAYERS} layers"
    attentions = [each.attention for each in plan.layers if isinstance(each.attention, AttentionPlan)]
    if len(attentions) < len(plan.layers):
        return "the model's layers use latent attention (MLA)"
    if (head_size := attentions[0].head_size) % library.lanes:
        return f"a head size of {head_size} is not a multiple of {library.lanes}"
    if len({(each.num_heads, each.num_kv_heads, each.head_size) for each in attentions}) > 1:
        return "the model's layers have heads of different shapes"
    if len({norm.eps for norm in plan.norms}) > 1:
        return "the model's norms have different epsilons"
    if {plan.input_scale, plan.logits_divisor, *(layer.residual_scale for layer in plan.layers)} != {1.0}:
        return "the model scales inputs, residual additions or logits"
    return next((reason for layer in plan.layers if (reason := _unsuitable_mlp(library, layer))), None)


def unsuitable_part(model: LoadedModel, plan: ModelPlan, part: Part | None) -> str | None:
    """Return why the decoder cannot compute this rank's ``part``, or None if it can."""
    if part is None:
        return None
    if part.shared_memory is None:
        return "workers do not exchange data in shared memory"
    if any(getattr(model.module.config, name, False) for name in ("attention_bias", "mlp_bias")):
        return "the model's layers have a bias"
    if part.vocabulary is None and plan.head is not None and plan.head.out_features != model.vocab_size:
        return "the model's head is split between workers"
    if not all(isinstance(layer.mlp, MLPPlan) for layer in plan.layers):
        return "the model's experts are split between workers"
    if _attention(plan.layers[0]).norms_all_heads:
        return "the input of a norm is split between workers"
    return None


def linears(layer: LayerPlan) -> list[Any]:
    """Return all linear layers that the decoder packs, except the linear layers of mixtures of experts."""
    return layer.attention.linears + (layer.mlp.linears if isinstance(layer.mlp, MLPPlan) else [])


def empty(linear: Any) -> None:
    """Free the weight of a linear layer."""
    linear.weight = torch.nn.Parameter(torch.empty(0, dtype=linear.weight.dtype), requires_grad=False)


def _unsuitable_mlp(library: NativeLibrary, layer: LayerPlan) -> str | None:
    mlp, module = layer.mlp, layer.module.get_submodule("mlp")
    if not isinstance(mlp, MLPPlan):
        odd: torch.dtype | None = next(
            (weight.dtype for weight in module.parameters() if weight.dtype != torch.float32), None
        )
        return None if odd is None else f"the model's mixtures of experts compute in {str(odd).removeprefix('torch.')}"
    if mlp.activation not in _ACTIVATIONS:
        return f"the activation of {layer.name}.mlp is {mlp.activation}"
    if (width := mlp.down.in_features) % library.lanes:
        return f"intermediate_size {width} is not a multiple of {library.lanes}"
    return "a gate has a bias" if any(linear.bias is not None for linear in mlp.gate_up) else None


def _attention(layer: LayerPlan) -> AttentionPlan:
    if not isinstance(layer.attention, AttentionPlan):
        raise TypeError(f"{layer.name} uses latent attention (MLA)")
    return layer.attention


def _gate_and_up(mlp: MLPPlan) -> Sequence[Any]:
    """Return the weights of gate and up, each ``[intermediate, hidden]``."""
    weights: list[Any] = [linear.weight for linear in mlp.gate_up]
    return weights if len(weights) > 1 else weights[0].chunk(2)


class DecoderLayers:
    """Layers and head of ``plan``, packed for the kernels. See ``unsuitable`` for unsupported plans.

    ``struct`` points into the packed weights. The modules keep the weights of projections until ``free``. Mixtures of
    experts are packed immediately and their original weights are freed, because both copies would not fit into memory.
    ``outside`` has, by layer index, the MLP modules that the kernels do not compute. These modules have other parts
    than experts and router, or they share experts with other ranks.
    """

    def __init__(self, library: NativeLibrary, plan: ModelPlan, part: Part | None) -> None:
        self._library = library
        self._plan = plan
        self._keep: list[object] = []
        self._packed: list[PackedWeight] = []
        self._mixture_bytes = 0
        self.outside: dict[int, Any] = {}
        layers = [self._layer(index, layer) for index, layer in enumerate(plan.layers)]
        self.struct = self._model(layers, part)

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(weight.num_bytes for weight in self._packed) + self._mixture_bytes

    def free(self) -> None:
        """Free the weights of all projections in the modules.

        The packed weight of q, k and v has the rows of q, then of k, then of v. The packed weight of gate and up has
        their rows in alternating groups. The output of an adapter for one projection is added at the rows of that
        projection.
        """
        plan = self._plan
        for linear in (each for layer in plan.layers for each in linears(layer)):
            empty(linear)
        if plan.head is not None and plan.head.weight is not plan.embedding:
            empty(plan.head)

    def _model(self, layers: Sequence[Layer], part: Part | None) -> Model:
        plan, first = self._plan, _attention(self._plan.layers[0])
        gated = [layer.mlp for layer in plan.layers if isinstance(layer.mlp, MLPPlan)]
        return Model(
            len(layers),
            first.output.out_features,
            first.num_heads,
            first.num_kv_heads,
            first.head_size,
            plan.rotary_size,
            max((mlp.down.in_features for mlp in gated), default=0),
            _ACTIVATIONS[gated[0].activation] if gated else 0,
            first.norms_all_heads,
            plan.norms[0].eps,
            plan.logits_softcap or 0.0,
            self._kept((Layer * len(layers))(*layers)),
            self.norm(plan.norm),
            Linear() if plan.head is None else self.pack(plan.head.weight, None),
            _exchange(part),
        )

    def _layer(self, index: int, layer: LayerPlan) -> Layer:
        attention, mlp = _attention(layer), layer.mlp
        projections: Any = attention.qkv
        bias = None if projections[0].bias is None else torch.cat([linear.bias for linear in projections])
        how, sinks = params_struct(attention.params)
        self._keep.append(sinks)
        gate_up, down, mixture = Linear(), Linear(), Mixture()
        qkv = self.pack(torch.cat([linear.weight for linear in projections]), bias)
        output = self.pack(attention.output.weight, attention.output.bias)
        if isinstance(mlp, MLPPlan):
            gate_up = self.pack(interleaved(self._library, *_gate_and_up(mlp)), None)
            down = self.pack(mlp.down.weight, mlp.down.bias)
        else:
            mixture = self._mixture(index, layer)
        (before_attention, before_mlp), (attention_out, mlp_out) = layer.norms_before, layer.norms_after
        return Layer(
            *map(self.norm, (before_attention, attention_out, before_mlp, mlp_out)),
            *map(self.norm, attention.norms or (None, None)),
            qkv,
            output,
            gate_up,
            down,
            mixture,
            how,
            attention.rotary,
        )

    def _mixture(self, index: int, layer: LayerPlan) -> Mixture:
        mlp: Any = layer.module.get_submodule("mlp")
        self._mixture_bytes += PackedLayers(mlp, self._library).num_bytes
        plain = isinstance(layer.mlp, ExpertsPlan) and layer.mlp.is_plain and isinstance(mlp.experts, PackedExperts)
        products, router = (mlp.experts.products, mlp.gate) if plain else (None, None)
        if products is None or not isinstance(router, PackedRouter):
            self.outside[index] = mlp
            return Mixture()
        gate_up, down = (self._kept((Linear * len(each))(*(weight.struct for weight in each))) for each in products)
        return Mixture(len(gate_up), router.top, router.normalize, router.packed.struct, gate_up, down)

    def pack(self, weight: Any, bias: Any) -> Linear:
        """Pack the weight and bias of a matrix product. Returns the struct that points to them."""
        packed = PackedWeight(self._library, weight, bias)
        self._packed.append(packed)
        return packed.struct

    def norm(self, norm: Norm | None) -> int | None:
        """Return the address of a norm's weights, float32 ``[n]``, or null if there is no norm."""
        if norm is None:
            return None
        weight = norm.weight.detach().float()
        made: torch.Tensor = self._kept(weight + norm.offset if norm.offset else weight.clone())
        return made.data_ptr()

    def _kept(self, memory: Any) -> Any:
        """Keep ``memory`` alive, because structs point into it, and return it."""
        self._keep.append(memory)
        return memory


def _exchange(part: Part | None) -> Exchange:
    memory = None if part is None else part.shared_memory
    return Exchange() if memory is None else Exchange(memory.base, memory.rank, memory.size, PIECE)


class KernelDecoder:
    """Layers of ``plan`` that the CPU kernels compute. Base class for models and for EAGLE heads.

    Raises UnsuitableError if the kernels do not support the plan.

    Args:
        module: The module from which the plan was read.
        specs: KV cache specs of its attention layers.
        max_len: Number of positions that the model allows.
        run: Runs a pass over a probe and returns the result.
        part: This rank's part of the model, if several ranks share the model.
        fusion: Returns the computation before the layers of an EAGLE head.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        library: NativeLibrary,
        module: Any,
        plan: ModelPlan,
        specs: Mapping[str, KVCacheSpec],
        embedding: EmbeddingLookup,
        max_len: int,
        run: Callable[[Any], torch.Tensor],
        part: Part | None = None,
        fusion: Callable[[DecoderLayers], Fusion] | None = None,
    ) -> None:
        if reason := unsuitable(library, plan, specs):
            raise UnsuitableError(reason)
        # If products round their inputs, the cache stores the rounded values.
        dtype = library.rounds_to or torch.float32
        self.specs = {name: msgspec.structs.replace(spec, dtype_size=dtype.itemsize) for name, spec in specs.items()}
        self.memory = KVMemory(self.specs, lambda *_: kernel_layout(library, dtype), dtype, self.device)
        self._library = library
        self._module: Any = module
        self._probe = run
        self._plan = plan
        self._layers = DecoderLayers(library, plan, part)
        self._model = self._layers.struct
        if fusion is not None:
            self._model.fusion = fusion(self._layers)
        self._handle = ctypes.c_void_p()
        library.call("decoder_new", ctypes.byref(self._model), ctypes.byref(self._handle))
        library.free_with(self, self._handle, "decoder")
        self._embedding = embedding
        makers = [partial(plan.turns, variant) for variant in plan.rotary_variants]
        self._rotaries = Rotaries(makers, self._model.rotary_size, max_len)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the embeddings and norms that the modules still contain, and of the packed weights."""
        return module_bytes(self._module) + self._layers.num_bytes

    def bind(self, caches: LayerCaches) -> None:
        """Use ``caches``. Layers are in order of execution."""
        of = [caches[name] for name in self.specs] if caches else []
        self._caches = (Cache * len(of))(*(cache_struct(layer.cache) for layer in of))
        self._layer_groups = np.array([layer.group for layer in of], dtype=np.int64)
        self._bound = caches  # keeps the memory alive that the structs point into

    def step(
        self, batch: ForwardBatch, x: torch.Tensor, embedding: EmbeddingRows | None, rotaries: StepRotaries
    ) -> Step:
        """Return a step that computes all layers for ``batch``. The step has no memory for logits and kept states yet.

        The step points into the arguments, and is valid until the next step is created.
        """
        self._groups = (Group * len(batch.attention))(*map(group_struct, batch.attention))
        first = batch.attention[0]
        step = Step(
            num_tokens=len(x),
            num_requests=first.num_requests,
            query_start=first.query_start_loc.ctypes.data,
            seq_lens=first.seq_lens.ctypes.data,
            groups=self._groups,
            layer_groups=self._layer_groups.ctypes.data,
            caches=self._caches,
            x=x.data_ptr(),
            token_ids=batch.token_ids.ctypes.data,
            embedding_scale=1.0,
            positions=rotaries.positions.ctypes.data,
            rotaries=rotaries.structs,
            last=self._model.num_layers,
        )
        if embedding is not None:
            step.embedding, step.embedding_kind = embedding.weight.data_ptr(), embedding.kind
            step.embedding_scale = embedding.scale
        return step

    def to(self, device: torch.device) -> None:
        """Move the tensors that the modules still contain. Packed weights are not moved, because the kernels read them."""
        self._module.to(device)

    def probe(self) -> torch.Tensor:
        """Return the pass's result for the probe."""
        return self._probe(self)

    def where(self) -> str:
        """Return an empty text, because the kernels report no results of single layers."""
        return ""

    def undo(self) -> None:
        """Do nothing: the modules are unchanged, or their weights are freed."""

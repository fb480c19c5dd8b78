"""Conversion of the layers of a model plan to structs and packed weights for the CPU kernels."""

import ctypes
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from penstock_common.memory import give_back_free
from penstock_enginecore.attention.kv_cache import KVMemory, LayerCache, LayerCaches
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.forward.modules import module_bytes
from penstock_enginecore.forward.native_inputs import EmbeddingLookup, EmbeddingRows, Rotaries, StepRotaries, Turns
from penstock_enginecore.forward.native_mixtures import PackedMixture
from penstock_enginecore.forward.native_support import (
    ACTIVATIONS,
    GATE_ACTIVATIONS,
    first_attention,
    norms_of_model,
    query_scales,
    unsuitable,
)
from penstock_enginecore.models.decoder_plan import (
    AttentionPlan,
    BesidePlan,
    ExpertsPlan,
    LatentPlan,
    LayerEmbeddingPlan,
    LayerInputsPlan,
    LayerPlan,
    MLPPlan,
    ModelPlan,
    Norm,
    RecurrentPlan,
)
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.rope import QueryScale
from penstock_enginecore.native.attention import (
    cache_struct,
    group_struct,
    kernel_layout,
    params_struct,
)
from penstock_enginecore.native.backend import PackedLayers
from penstock_enginecore.native.experts import PackedExperts
from penstock_enginecore.native.ffi_structs import (
    BesideNorms,
    Cache,
    Exchange,
    Fusion,
    Group,
    Latent,
    Layer,
    LayerEmbedding,
    LayerInputs,
    Linear,
    Mixture,
    Model,
    Params,
    Recurrence,
    Routing,
    Step,
)
from penstock_enginecore.native.latents import packed_heads
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.weights import PackedWeight, interleaved
from penstock_enginecore.parallel.collectives import PIECE
from penstock_enginecore.parallel.sharding import Part

_RECURRENCES = {"delta rule": 1, "duality": 2, "short convolution": 3}
"""Numbers that stand for kinds of recurrent layers in the kernels' interface."""


def linears(layer: LayerPlan) -> list[Any]:
    """Return all linear layers of a layer that ``DecoderLayers`` packs, except those of MLPs that are mixtures of experts."""
    more = ([layer.beside.router] if layer.beside else []) + (layer.embedding.linears if layer.embedding else [])
    return layer.attention.linears + (layer.mlp.linears if isinstance(layer.mlp, MLPPlan) else []) + more


def empty(linear: Any) -> None:
    """Free the weight of a linear layer."""
    linear.weight = torch.nn.Parameter(torch.empty(0, dtype=linear.weight.dtype), requires_grad=False)


def _first_linears(attention: AttentionPlan | LatentPlan | RecurrentPlan) -> tuple[Any, ...]:
    if isinstance(attention, RecurrentPlan):
        return attention.inputs
    return attention.down if isinstance(attention, LatentPlan) else attention.qkv


def query_rows(attention: AttentionPlan, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split ``rows``, the rows of a query projection with gates, into the rows that compute queries and the rows that
    compute gates.
    """
    by_head = rows.view(attention.num_heads, 2, attention.head_size, *rows.shape[1:])
    return by_head[:, 0].flatten(0, 1), by_head[:, 1].flatten(0, 1)


def rows_by_kind(attention: AttentionPlan, rows: torch.Tensor) -> torch.Tensor:
    """Return ``rows``, the rows of a projection that are grouped by head, in the order queries, keys, values."""
    by_head = rows.view(attention.num_heads, 3, attention.head_size, *rows.shape[1:])
    return by_head.transpose(0, 1).flatten(0, 2)


def _gate_and_up(mlp: MLPPlan) -> Sequence[Any]:
    """Return the weights of gate and up, each ``[intermediate, hidden]``."""
    weights: list[Any] = [linear.weight for linear in mlp.gate_up]
    return weights if len(weights) > 1 else weights[0].chunk(2)


class DecoderLayers:
    """Layers and head of ``plan``, packed for the kernels. The function ``unsuitable`` lists unsupported plans.

    ``struct`` points into the packed weights. The modules keep the weights of projections until ``free`` is called. The
    constructor packs each mixture of experts and immediately frees the original weights, because both copies would not
    fit into memory. ``outside`` has, by layer index, the MLP modules that the kernels do not compute inside the decoder.
    These modules have parts that the kernels do not support, or linear layers that LoRA adapters may update, or their
    experts are distributed among ranks.

    Hidden states in the kernels are the model's hidden states divided by ``unit``, the model's factor for residual
    additions. So the kernels can add without this factor. Norms of hidden states give the same result with a smaller
    epsilon.
    """

    def __init__(self, library: NativeLibrary, plan: ModelPlan, part: Part | None, *, adapts: bool = False) -> None:
        """Pack the layers. ``adapts`` is whether LoRA adapters are enabled."""
        self._library = library
        self._plan = plan
        self._adapts = adapts
        self._keep: list[object] = []
        self._packed: list[PackedWeight] = []
        self._mixture_bytes = 0
        self.head = None if plan.head is None else self._pack(plan.head.weight, plan.head.bias)
        self.outside: dict[int, Any] = {}
        self.unit = plan.layers[0].residual_scale
        layers = [self._layer(index, layer) for index, layer in enumerate(plan.layers)]
        self.struct = self._model(layers, part)

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the packed weights."""
        return sum(weight.num_bytes for weight in self._packed) + self._mixture_bytes

    def free(self) -> None:
        """Free the weights of all projections in the modules.

        The packed weight of q, k and v has the rows of q, then of k, then of v. In the packed weight of gate and up,
        groups of rows of gate and groups of rows of up alternate. The output of a LoRA adapter for one projection is
        added at the rows of that projection.
        """
        plan = self._plan
        for linear in (each for layer in plan.layers for each in linears(layer)):
            empty(linear)
        if plan.layer_inputs is not None:
            empty(plan.layer_inputs.projection)
        if plan.head is not None and plan.head.weight is not plan.embedding:
            empty(plan.head)

    def _model(self, layers: Sequence[Layer], part: Part | None) -> Model:
        plan, first = self._plan, first_attention(self._plan)
        dense = [layer.mlp for layer in plan.layers if isinstance(layer.mlp, MLPPlan)]
        return Model(
            len(layers),
            first.output.out_features,
            max((mlp.down.in_features for mlp in dense), default=0),
            (GATE_ACTIVATIONS if dense[0].gated else ACTIVATIONS)[dense[0].activation] if dense else 0,
            isinstance(first, AttentionPlan) and first.norms_all_heads,
            plan.family.norms_rotated,
            plan.family.pairs,
            plan.norms[0].centered,
            norms_of_model(plan)[0].eps / self.unit**2,
            plan.logits_softcap or 0.0,
            self._kept((Layer * len(layers))(*layers)),
            self.norm(plan.norm, 1 / plan.logits_divisor),
            Linear() if self.head is None else self.head.struct,
            _exchange(part),
            layer_inputs=self._layer_inputs(plan.layer_inputs),
        )

    def _layer_inputs(self, plan: LayerInputsPlan | None) -> LayerInputs:
        if plan is None:
            return LayerInputs()
        # The kernels do not scale the product. Its norm is the same with another epsilon.
        eps = plan.norm.eps / plan.projection_scale**2
        projection = self.pack(plan.projection.weight, plan.projection.bias)
        return LayerInputs(plan.norm.size, projection, self.norm(plan.norm, plan.scale), eps)

    def _layer_embedding(self, plan: LayerEmbeddingPlan | None) -> LayerEmbedding:
        if plan is None:
            return LayerEmbedding()
        gate, projection = (self.pack(linear.weight, linear.bias) for linear in plan.linears)
        return LayerEmbedding(gate, projection, self.norm(plan.norm))

    def _layer(self, index: int, layer: LayerPlan) -> Layer:
        attention, mlp = layer.attention, layer.mlp
        gate_up, down, mixture = Linear(), Linear(), Mixture()
        qkv = self._first_product(attention)
        output = self.pack(attention.output.weight, attention.output.bias)
        how, recurrence, latent = Params(), Recurrence(), Latent()
        heads, (rotary, *kinds) = (0, 0, 0), (0, False, False, False, False)
        if isinstance(attention, RecurrentPlan):
            recurrence = self._recurrence(attention)
        else:
            (how, sinks), rotary = params_struct(attention.params), attention.rotary
            self._keep.append(sinks)
        if isinstance(attention, AttentionPlan):
            heads = (attention.num_heads, attention.num_kv_heads, attention.head_size)
            kinds = [attention.gated, attention.value_eps is not None, attention.keys_as_values]
            kinds.append(attention.donor is not None)
        elif isinstance(attention, LatentPlan):
            latent = self._latent(attention)
        if isinstance(mlp, MLPPlan):
            gate_up = self._gate_up(mlp)
            down = self.pack(mlp.down.weight, mlp.down.bias)
        elif mlp is not None:
            mixture = self._mixture(index, layer)
        if layer.beside is not None:
            mixture = self._mixture_beside(layer.module, layer.beside)
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
            *heads,
            rotary,
            *kinds,
            mlp is None,
            layer.parallel,
            *layer.output_scales,
            layer.layer_scale,
            recurrence,
            latent,
            self._layer_embedding(layer.embedding),
        )

    def _latent(self, plan: LatentPlan) -> Latent:
        up = Linear() if plan.up is None else self.pack(plan.up.weight, plan.up.bias)
        weight: Any = plan.expansion.weight
        weights = packed_heads(self._library, weight, plan.plain_size, plan.value_size)
        absorb, expand = (self._kept((Linear * len(each))(*(weight.struct for weight in each))) for each in weights)
        self._packed += weights[0] + weights[1]
        query_norm, key_norm = plan.norms
        return Latent(
            plan.num_heads,
            plan.latent,
            plan.rotary_size,
            plan.plain_size,
            plan.value_size,
            plan.interleaved * (1 + plan.stays_interleaved),
            up,
            absorb,
            expand,
            0.0 if query_norm is None else query_norm.eps,
            key_norm.eps,
        )

    def _gate_up(self, mlp: MLPPlan) -> Linear:
        if not mlp.gated:
            (up,) = mlp.gate_up
            return self.pack(up.weight, up.bias)
        return self.pack(interleaved(self._library, *_gate_and_up(mlp)), None)

    def _first_product(self, attention: AttentionPlan | LatentPlan | RecurrentPlan) -> Linear:
        """Pack the projections before an attention or a recurrent layer as one matrix product."""
        projections: Any = _first_linears(attention)
        weights = [linear.weight for linear in projections]
        biases = [linear.bias for linear in projections]
        if len({bias is None for bias in biases}) > 1:
            biases = [
                weight.new_zeros(len(weight)) if bias is None else bias
                for weight, bias in zip(weights, biases, strict=True)
            ]
        if isinstance(attention, AttentionPlan) and attention.by_head:
            weights = [rows_by_kind(attention, weights[0])]
            biases = [None if biases[0] is None else rows_by_kind(attention, biases[0])]
        if isinstance(attention, AttentionPlan) and attention.gated:
            weights = _gates_last(attention, weights)
            biases = biases if biases[0] is None else _gates_last(attention, biases)
        return self.pack(torch.cat(weights), None if biases[0] is None else torch.cat(biases))

    def _recurrence(self, plan: RecurrentPlan) -> Recurrence:
        weight, bias = plan.convolution
        channels, _, kernel = weight.shape
        width = plan.num_heads * plan.value_size
        norm = plan.norm
        return Recurrence(
            _RECURRENCES[plan.kind],
            self._floats(weight[:, 0].T),
            self._floats(bias),
            plan.activates,
            channels,
            kernel,
            plan.num_heads,
            plan.num_key_heads,
            plan.key_size,
            plan.value_size,
            plan.channels_at,
            plan.gate_at,
            plan.step_at,
            plan.beta_at,
            self._floats(None if plan.decay is None else -plan.decay.float().exp()),
            self._floats(plan.step_bias),
            self._floats(plan.skip),
            self._floats(None if norm is None else norm.weight.repeat(width // len(norm.weight))),
            0 if norm is None else norm.size,
            norm is not None and norm.gates_first,
            0.0 if norm is None else norm.eps,
            *plan.step_limits,
        )

    def _floats(self, parameter: torch.Tensor | None) -> int | None:
        """Return the address of a float32 copy of ``parameter``, or a null pointer if ``parameter`` is None."""
        if parameter is None:
            return None
        copied: torch.Tensor = self._kept(parameter.detach().float().contiguous().clone())
        return copied.data_ptr()

    def _mixture(self, index: int, layer: LayerPlan) -> Mixture:
        mlp: Any = layer.mlp_module
        plan = layer.mlp if isinstance(layer.mlp, ExpertsPlan) else None
        adapted = self._adapts and any(isinstance(module, torch.nn.Linear) for module in mlp.modules())
        if plan is None or adapted or not PackedMixture.takes(self._library, plan, mlp):
            self._mixture_bytes += PackedLayers(mlp, self._library).num_bytes
            self.outside[index] = mlp
            return Mixture()
        packed: PackedMixture = self._kept(PackedMixture(self._library, plan, mlp))
        self._mixture_bytes += packed.num_bytes
        if packed.is_whole:
            return packed.struct
        self.outside[index] = packed
        return Mixture()

    def _mixture_beside(self, module: Any, plan: BesidePlan) -> Mixture:
        """Pack the experts that the layer ``module`` has beside its MLP, and free their original weights."""
        module.experts = experts = PackedExperts(self._library, plan.module)
        experts.free()
        give_back_free()  # without this call, the C library would keep freed blocks of this size
        self._mixture_bytes += experts.num_bytes
        if experts.gate is None:
            raise TypeError(f"the kernels do not compute the activation of {type(plan.module).__name__}")
        gate_up, down = self._expert_structs(experts.products)
        norms = (self.norm(norm) for norm in (plan.norm_before, *plan.norms_after))
        routing = Routing(
            num_experts=len(gate_up), top=plan.top_k, normalize=True, factor=1.0, scales=self._floats(plan.scales)
        )
        return Mixture(
            routing,
            experts.gate,
            False,
            BesideNorms(self.norm(plan.router_norm, plan.router_factor), *norms),
            self.pack(plan.router.weight, plan.router.bias),
            gate_up,
            down,
        )

    def _expert_structs(self, products: Sequence[Sequence[PackedWeight]]) -> tuple[Any, Any]:
        """Return arrays with the structs of the experts' packed weights: gate and up, and down."""
        gate_up, down = (self._kept((Linear * len(each))(*(weight.struct for weight in each))) for each in products)
        return gate_up, down

    def pack(self, weight: Any, bias: Any) -> Linear:
        """Pack the weight and bias of a matrix product. Returns a struct for the kernels that points to the packed
        weight and the bias.
        """
        return self._pack(weight, bias).struct

    def _pack(self, weight: Any, bias: Any) -> PackedWeight:
        packed = PackedWeight(self._library, weight, bias)
        self._packed.append(packed)
        return packed

    def norm(self, norm: Norm | None, factor: float = 1.0) -> int | None:
        """Return the address of a norm's weights times ``factor``, float32 ``[n]``, or a null pointer if there is no
        norm. After the weights of a norm that subtracts the mean, its biases follow.
        """
        if norm is None:
            return None
        rows = [norm.factors * factor]
        if norm.centered:
            rows.append(torch.zeros(norm.size) if norm.bias is None else norm.bias.detach().float() * factor)
        made: torch.Tensor = self._kept(torch.cat(rows))
        return made.data_ptr()

    def _kept(self, memory: Any) -> Any:
        """Keep a reference to ``memory``, because structs point into this memory, and return ``memory``."""
        self._keep.append(memory)
        return memory


def _gates_last(attention: AttentionPlan, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the rows of an attention with gates, in the order queries, keys, values, gates."""
    queries, gates = query_rows(attention, rows[0])
    return [queries, *rows[1:], gates]


def _turns(
    plan: ModelPlan, variant: tuple[str, ...], scale: QueryScale | None, positions: torch.Tensor, like: torch.Tensor
) -> Turns:
    scales = None if scale is None else scale.factors(positions if positions.ndim == 1 else positions[0])
    return *plan.turns(variant, positions, like), scales


def _exchange(part: Part | None) -> Exchange:
    memory = None if part is None else part.shared_memory
    return Exchange() if memory is None else Exchange(memory.base, memory.rank, memory.size, PIECE)


class KernelDecoder:
    """Layers of ``plan`` that the CPU kernels compute. Base class for models and for EAGLE heads, which propose drafts.

    Raises UnsuitableError if the kernels do not support the plan.

    Args:
        module: The module from which the plan was read.
        specs: KV cache specs of the attention layers of ``module``.
        max_len: Number of positions that the model allows.
        run: Function that runs a forward pass over a probe and returns the result.
        part: This rank's shard of the model, if the model is split among tensor-parallel ranks.
        fusion: Function that returns the struct for the computation before the layers of an EAGLE head.
        adapts: Whether LoRA adapters are enabled.
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
        *,
        adapts: bool = False,
    ) -> None:
        if reason := unsuitable(library, plan, specs):
            raise UnsuitableError(reason)
        # If matrix products round their inputs to bfloat16, the KV cache stores the rounded values.
        dtype = library.rounds_to or torch.float32
        self.specs = {name: msgspec.structs.replace(spec, dtype_size=dtype.itemsize) for name, spec in specs.items()}
        self.memory = KVMemory(
            self.specs, lambda spec, _: kernel_layout(library, dtype, latents=spec.keeps_latents), dtype, self.device
        )
        self._library = library
        self._module: Any = module
        self._probe = run
        self._plan = plan
        self._layers = DecoderLayers(library, plan, part, adapts=adapts)
        self._model = self._layers.struct
        if fusion is not None:
            self._model.fusion = fusion(self._layers)
        self._handle = ctypes.c_void_p()
        library.call("decoder_new", ctypes.byref(self._model), ctypes.byref(self._handle))
        library.free_with(self, self._handle, "decoder")
        self._embedding = embedding
        # The rotary embedding keeps a plan without the embedding table, so that the table can be freed.
        slim = dataclasses.replace(plan, embedding=torch.nn.Parameter(torch.empty(0), requires_grad=False))
        makers = [
            partial(_turns, slim, variant, next(iter(scales), None))
            for variant, scales in zip(plan.rotary_variants, query_scales(plan), strict=True)
        ]
        self._rotaries = Rotaries(makers, sum(map(plan.rotary_size, range(len(makers)))), max_len)

    @property
    def input_factor(self) -> float:
        """Factor by which the inputs of the first layer are multiplied."""
        return self._plan.input_scale / self._layers.unit

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of the embeddings and norms that the modules still contain, plus the packed weights."""
        return module_bytes(self._module) + self._layers.num_bytes

    def bind(self, caches: LayerCaches) -> None:
        """Use the KV caches ``caches`` from now on, by layer name in order of execution."""
        of = iter([caches[name] for name in self.specs] if caches else [])
        bound: list[LayerCache | None] = []
        for attention in (layer.attention for layer in self._plan.layers):
            donor = attention.donor if isinstance(attention, AttentionPlan) else None
            own = None if donor is not None or isinstance(attention, RecurrentPlan) else next(of, None)
            bound.append(own if donor is None else bound[donor])
        self._caches = (Cache * len(bound))(*(Cache() if each is None else cache_struct(each.cache) for each in bound))
        self._layer_groups = np.array([0 if each is None else each.group for each in bound], dtype=np.int64)
        self._bound = caches  # keeps the memory alive, because the structs point into it

    def step(
        self, batch: ForwardBatch, x: torch.Tensor, embedding: EmbeddingRows | None, rotaries: StepRotaries
    ) -> Step:
        """Return the kernels' description of a step that computes all layers for ``batch``. The caller adds the memory
        for logits and kept states.

        The description points into the arguments, and is valid until this method is called again.
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
            embedding_scale=self.input_factor,
            positions=rotaries.positions.ctypes.data,
            rotaries=rotaries.structs,
            last=self._model.num_layers,
        )
        if embedding is not None:
            step.embedding, step.embedding_kind = embedding.pointer, embedding.kind
            step.embedding_scale = embedding.scale * self.input_factor
        return step

    def to(self, device: torch.device) -> None:
        """Move the tensors that the modules still contain. Packed weights are not moved, because the kernels read them."""
        self._module.to(device)

    def probe(self) -> torch.Tensor:
        """Return the result of this forward pass for the probe."""
        return self._probe(self)

    def where(self) -> str:
        """Return an empty text, because the kernels do not return the results of single layers."""
        return ""

    def undo(self) -> None:
        """Do nothing, because the modules are either unchanged or cannot be restored."""

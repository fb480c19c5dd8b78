"""Conversion of the layers of a model plan to structs and packed weights for the CPU kernels, and the checks for
unsupported plans.
"""

import ctypes
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from penstock_common.memory import give_back_free
from penstock_enginecore.attention.kv_cache import KVMemory, LayerCaches
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.forward.modules import module_bytes
from penstock_enginecore.forward.native_inputs import EmbeddingLookup, EmbeddingRows, Rotaries, StepRotaries, Turns
from penstock_enginecore.models.decoder_plan import (
    AttentionPlan,
    BesidePlan,
    ExpertsPlan,
    LatentPlan,
    LayerPlan,
    MLPPlan,
    ModelPlan,
    Norm,
    RecurrentPlan,
)
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.models.rope import QueryScale
from penstock_enginecore.native.attention import (
    MAX_HEAD_SIZE,
    TILE,
    cache_struct,
    group_struct,
    kernel_layout,
    params_struct,
    takes_latents,
)
from penstock_enginecore.native.backend import PackedLayers
from penstock_enginecore.native.experts import MAX_EXPERTS, PackedExperts, PackedRouter, gate_of
from penstock_enginecore.native.ffi_structs import (
    BesideNorms,
    Cache,
    Exchange,
    Fusion,
    Group,
    Latent,
    Layer,
    Linear,
    Mixture,
    Model,
    Params,
    Recurrence,
    Step,
)
from penstock_enginecore.native.latents import packed_heads
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.weights import PackedWeight, interleaved
from penstock_enginecore.parallel.collectives import PIECE
from penstock_enginecore.parallel.sharding import Part

_GATE_ACTIVATIONS: Mapping[str, int] = {"silu": 0, "gelu_tanh": 1}
_ACTIVATIONS: Mapping[str, int] = {"relu2": 2, "relu": 3, "gelu_tanh": 4, "gelu": 5}
"""Numbers that stand for activation functions of gates, and of MLPs without a gate, in the kernels' interface."""
_RECURRENCES = {"delta rule": 1, "duality": 2, "short convolution": 3}
"""Numbers that stand for kinds of recurrent layers in the kernels' interface."""
_MAX_LAYERS = 800


def unsuitable(library: NativeLibrary, plan: ModelPlan, specs: Mapping[str, KVCacheSpec]) -> str | None:
    """Return why the kernels' decoder cannot compute the layers of ``plan``, or None if the decoder can compute the
    layers.
    """
    if odd := [spec.block_size for spec in specs.values() if spec.block_size % TILE and not spec.keeps_latents]:
        return f"cache.block_size {odd[0]} is not a multiple of {TILE}"
    if len(plan.layers) > _MAX_LAYERS:
        return f"the model has more than {_MAX_LAYERS} layers"
    latents = any(isinstance(each.attention, LatentPlan) for each in plan.layers)
    if reason := (_unsuitable_latents(library, plan, specs) if latents else _unsuitable_heads(library, plan)):
        return reason
    if reason := _unsuitable_norms(plan):
        return reason
    if len({layer.residual_scale for layer in plan.layers}) > 1:
        return "the model's layers scale residual additions differently"
    if plan.layers[0].residual_scale != 1 and any(
        layer.attention.norms or any(layer.norms_after) for layer in plan.layers
    ):
        return "the model scales residual additions, and norms other values than hidden states"
    if plan.logits_divisor != 1 and plan.head is not None and (plan.norm is None or plan.head.bias is not None):
        return "the model scales logits, and has no final norm or a head with a bias"
    if len({(each.mlp.activation, each.mlp.gated) for each in plan.layers if isinstance(each.mlp, MLPPlan)}) > 1:
        return "the model's MLPs have different activation functions"
    return next((reason for layer in plan.layers if (reason := _unsuitable_mlp(library, layer))), None)


def _unsuitable_latents(library: NativeLibrary, plan: ModelPlan, specs: Mapping[str, KVCacheSpec]) -> str | None:
    attentions = [each.attention for each in plan.layers if isinstance(each.attention, LatentPlan)]
    if len(attentions) < len(plan.layers):
        return "only some of the model's layers use latent attention (MLA)"
    if not all(spec.keeps_latents for spec in specs.values()):
        return "the KV cache has full keys and values of latent attention (MLA)"
    shapes = {(each.num_heads, each.latent, each.rotary_size, each.plain_size, each.value_size) for each in attentions}
    if len(shapes) > 1:
        return "the model's layers have latents of different shapes"
    latent, rotated = attentions[0].latent, attentions[0].rotary_size
    dtype = library.rounds_to or torch.float32
    if not takes_latents(library, dtype, latent + rotated, latent):
        return f"latents of {latent} numbers with {rotated} rotated numbers are not multiples of the kernels' vectors"
    return None


def _unsuitable_heads(library: NativeLibrary, plan: ModelPlan) -> str | None:
    attentions = [each.attention for each in plan.layers if isinstance(each.attention, AttentionPlan)]
    if reason := _unsuitable_recurrence(library, plan) or _unsuitable_attention(plan, attentions):
        return reason
    if odd := [each.head_size for each in attentions if each.head_size % library.lanes]:
        return f"a head size of {odd[0]} is not a multiple of {library.lanes}"
    if (head_size := max(each.head_size for each in attentions)) > MAX_HEAD_SIZE:
        return f"a head size of {head_size} is larger than {MAX_HEAD_SIZE}"
    return None


def unsuitable_part(model: LoadedModel, plan: ModelPlan, part: Part | None) -> str | None:
    """Return why the kernels' decoder cannot compute this rank's shard ``part``, or None if the decoder can compute the
    shard.
    """
    if part is None:
        return None
    if part.shared_memory is None:
        return "workers do not exchange data in shared memory"
    if any(getattr(linear, "whole_bias", None) is not None for linear in plan.linears):
        return "the model's layers have a bias"
    if part.vocabulary is None and plan.head is not None and plan.head.out_features != model.vocab_size:
        return "the model's head is split between workers"
    if any(isinstance(layer.mlp, MLPPlan) and layer.mlp.is_merged for layer in plan.layers):
        return "workers split the outputs of a linear layer that computes gate and up values"
    if any(layer.beside or not isinstance(layer.mlp, MLPPlan | None) for layer in plan.layers):
        return "the model's experts are split between workers"
    if any(isinstance(layer.attention, RecurrentPlan) for layer in plan.layers):
        return "the model's recurrent layers are split between workers"
    first = _first_attention(plan)
    if isinstance(first, LatentPlan) and first.num_heads == model.module.config.num_attention_heads:
        return "every worker computes all heads of the model's latent attention (MLA)"
    if isinstance(first, AttentionPlan) and first.norms_all_heads:
        return "the input of a norm is split between workers"
    return None


def query_scales(plan: ModelPlan) -> list[set[QueryScale | None]]:
    """Return, for each rotary variant, how the layers with this variant scale queries by position."""
    attentions = [each.attention for each in plan.layers if isinstance(each.attention, AttentionPlan)]
    return [
        {each.query_scale for each in attentions if each.rotary == variant}
        for variant in range(len(plan.rotary_variants))
    ]


def linears(layer: LayerPlan) -> list[Any]:
    """Return all linear layers that ``DecoderLayers`` packs, except the linear layers of MLPs that are mixtures of experts."""
    router = [layer.beside.router] if layer.beside else []
    return layer.attention.linears + (layer.mlp.linears if isinstance(layer.mlp, MLPPlan) else []) + router


def empty(linear: Any) -> None:
    """Free the weight of a linear layer."""
    linear.weight = torch.nn.Parameter(torch.empty(0, dtype=linear.weight.dtype), requires_grad=False)


def _unsuitable_attention(plan: ModelPlan, attentions: Sequence[AttentionPlan]) -> str | None:
    if any(len({linear.bias is None for linear in each.qkv}) > 1 for each in attentions):
        return "some projections of attention have a bias and others have none"
    if any(len(scales) > 1 for scales in query_scales(plan)):
        return "layers with the same rotary embedding scale queries differently"
    if len({each.norms_all_heads for each in attentions}) > 1:
        return "the norms of queries and keys cover all heads in some layers and one head in others"
    return None


def _unsuitable_norms(plan: ModelPlan) -> str | None:
    if len(_epsilons(plan)) > 1:
        return "the model's norms have different epsilons"
    if len({norm.centered for norm in plan.norms}) > 1:
        return "some of the model's norms subtract the mean, and others do not"
    for layer in plan.layers:
        for norm, scale in zip(layer.norms_after, layer.output_scales, strict=True):
            if norm is not None and scale != 1:
                return f"{layer.name} scales an output to which it applies a norm"
    return None


def _unsuitable_mlp(library: NativeLibrary, layer: LayerPlan) -> str | None:
    mlp, module = layer.mlp, layer.mlp_module
    if mlp is None or module is None:
        return None
    if not isinstance(mlp, MLPPlan):
        odd: torch.dtype | None = next(
            (weight.dtype for weight in module.parameters() if weight.dtype != torch.float32), None
        )
        return None if odd is None else f"the model's mixtures of experts compute in {str(odd).removeprefix('torch.')}"
    if mlp.activation not in (_GATE_ACTIVATIONS if mlp.gated else _ACTIVATIONS):
        return f"{layer.name}.mlp uses the activation function {mlp.activation}, which this decoder does not support"
    if (width := mlp.down.in_features) % library.lanes:
        return f"intermediate_size {width} is not a multiple of {library.lanes}"
    biased = mlp.gated and any(linear.bias is not None for linear in mlp.gate_up)
    if biased:
        return "a gate has a bias"
    return None if layer.beside is None else _unsuitable_beside(library, layer, layer.beside)


def _unsuitable_beside(library: NativeLibrary, layer: LayerPlan, beside: BesidePlan) -> str | None:
    experts: Any = beside.module
    if not PackedExperts.takes(experts):
        return f"the kernels do not support the weights of {layer.name}.experts, a {type(experts).__name__}"
    if gate_of(library, experts) is None:
        return f"the kernels do not support the activation or the sizes of {layer.name}.experts"
    if (count := len(experts.down_proj)) > MAX_EXPERTS:
        return f"{layer.name} has {count} experts, more than {MAX_EXPERTS}"
    if layer.parallel:
        return f"{layer.name} has experts beside its MLP, and computes attention and MLP from the same input"
    return None


def _unsuitable_recurrence(library: NativeLibrary, plan: ModelPlan) -> str | None:
    recurrent = [each.attention for each in plan.layers if isinstance(each.attention, RecurrentPlan)]
    shapes = {(each.num_heads, each.num_key_heads, each.key_size, each.value_size) for each in recurrent}
    if len(shapes) > 1:
        return "the model's recurrent layers have heads of different shapes"
    for each in recurrent:
        # LoRA adapters need projections that begin at multiples of the SIMD vector length in the merged product.
        odd = [linear.out_features for linear in each.inputs if linear.out_features % library.lanes]
        if len(each.inputs) > 1 and odd:
            return f"a projection of a recurrent layer has {odd[0]} outputs, not a multiple of {library.lanes}"
        if len({linear.bias is None for linear in each.inputs}) > 1:
            return "some projections of a recurrent layer have a bias and others have none"
    return None


def _norms_of_model(plan: ModelPlan) -> list[Norm]:
    """Return the norms that use the model's own epsilon. Norms of latent attention have their own epsilons."""
    own = [each.attention.norms for each in plan.layers if isinstance(each.attention, LatentPlan)]
    others = {id(norm) for norms in own for norm in norms}
    return [norm for norm in plan.norms if id(norm) not in others]


def _epsilons(plan: ModelPlan) -> set[float]:
    """Return the epsilons of the norms that use the model's own epsilon, also of norms of values."""
    attentions = [each.attention for each in plan.layers if isinstance(each.attention, AttentionPlan)]
    of_values = {each.value_eps for each in attentions if each.value_eps is not None}
    return of_values | {norm.eps for norm in _norms_of_model(plan)}


def _first_attention(plan: ModelPlan) -> AttentionPlan | LatentPlan:
    return next(each.attention for each in plan.layers if not isinstance(each.attention, RecurrentPlan))


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


def _gate_and_up(mlp: MLPPlan) -> Sequence[Any]:
    """Return the weights of gate and up, each ``[intermediate, hidden]``."""
    weights: list[Any] = [linear.weight for linear in mlp.gate_up]
    return weights if len(weights) > 1 else weights[0].chunk(2)


class DecoderLayers:
    """Layers and head of ``plan``, packed for the kernels. The function ``unsuitable`` lists unsupported plans.

    ``struct`` points into the packed weights. The modules keep the weights of projections until ``free`` is called. The
    constructor packs each mixture of experts and immediately frees the original weights, because both copies would not
    fit into memory. ``outside`` has, by layer index, the MLP modules that the kernels do not compute. These modules
    have parts other than experts and router, or their experts are distributed among ranks.

    Hidden states in the kernels are the model's hidden states divided by ``unit``, the model's factor for residual
    additions. So the kernels can add without this factor. Norms of hidden states give the same result with a smaller
    epsilon.
    """

    def __init__(self, library: NativeLibrary, plan: ModelPlan, part: Part | None) -> None:
        self._library = library
        self._plan = plan
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
        if plan.head is not None and plan.head.weight is not plan.embedding:
            empty(plan.head)

    def _model(self, layers: Sequence[Layer], part: Part | None) -> Model:
        plan, first = self._plan, _first_attention(self._plan)
        dense = [layer.mlp for layer in plan.layers if isinstance(layer.mlp, MLPPlan)]
        return Model(
            len(layers),
            first.output.out_features,
            max((mlp.down.in_features for mlp in dense), default=0),
            (_GATE_ACTIVATIONS if dense[0].gated else _ACTIVATIONS)[dense[0].activation] if dense else 0,
            isinstance(first, AttentionPlan) and first.norms_all_heads,
            plan.family.norms_rotated,
            plan.family.pairs,
            plan.norms[0].centered,
            _norms_of_model(plan)[0].eps / self.unit**2,
            plan.logits_softcap or 0.0,
            self._kept((Layer * len(layers))(*layers)),
            self.norm(plan.norm, 1 / plan.logits_divisor),
            Linear() if self.head is None else self.head.struct,
            _exchange(part),
        )

    def _layer(self, index: int, layer: LayerPlan) -> Layer:
        attention, mlp = layer.attention, layer.mlp
        gate_up, down, mixture = Linear(), Linear(), Mixture()
        qkv = self._first_product(attention)
        output = self.pack(attention.output.weight, attention.output.bias)
        how, recurrence, latent = Params(), Recurrence(), Latent()
        heads, (rotary, *kinds) = (0, 0, 0), (0, False, False, False)
        if isinstance(attention, RecurrentPlan):
            recurrence = self._recurrence(attention)
        else:
            (how, sinks), rotary = params_struct(attention.params), attention.rotary
            self._keep.append(sinks)
        if isinstance(attention, AttentionPlan):
            heads = (attention.num_heads, attention.num_kv_heads, attention.head_size)
            kinds = [attention.gated, attention.value_eps is not None, attention.keys_as_values]
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
        self._mixture_bytes += PackedLayers(mlp, self._library).num_bytes
        plain = isinstance(layer.mlp, ExpertsPlan) and layer.mlp.is_plain and isinstance(mlp.experts, PackedExperts)
        products, router = (mlp.experts.products, mlp.gate) if plain else (None, None)
        if products is None or not isinstance(router, PackedRouter):
            self.outside[index] = mlp
            return Mixture()
        gate_up, down = self._expert_structs(products)
        gate = mlp.experts.gate or 0
        how = (len(gate_up), router.top, router.normalize, gate)
        return Mixture(*how, None, BesideNorms(), router.packed.struct, gate_up, down)

    def _mixture_beside(self, module: Any, plan: BesidePlan) -> Mixture:
        """Pack the experts that the layer ``module`` has beside its MLP, and free their original weights."""
        module.experts = experts = PackedExperts(self._library, plan.module)
        experts.free()
        give_back_free()  # without this call, the C library would keep freed blocks of this size
        self._mixture_bytes += experts.num_bytes
        if experts.products is None:
            raise TypeError(f"the kernels do not compute the activation of {type(plan.module).__name__}")
        gate_up, down = self._expert_structs(experts.products)
        norms = (self.norm(norm) for norm in (plan.norm_before, *plan.norms_after))
        return Mixture(
            len(gate_up),
            plan.top_k,
            True,
            experts.gate or 0,
            self._floats(plan.scales),
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
        self._layers = DecoderLayers(library, plan, part)
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
        bound = [None if isinstance(each.attention, RecurrentPlan) else next(of, None) for each in self._plan.layers]
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

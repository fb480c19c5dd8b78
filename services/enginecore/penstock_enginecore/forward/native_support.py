"""Checks of plans that the CPU kernels' decoder does not support."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.models.decoder_plan import (
    AttentionPlan,
    BesidePlan,
    LatentPlan,
    LayerEmbeddingPlan,
    LayerPlan,
    MLPPlan,
    ModelPlan,
    Norm,
    RecurrentPlan,
)
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.models.rope import QueryScale
from penstock_enginecore.native.attention import MAX_HEAD_SIZE, TILE, takes_latents
from penstock_enginecore.native.experts import MAX_EXPERTS, PackedExperts, gate_of
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.parallel.sharding import Part

GATE_ACTIVATIONS: Mapping[str, int] = {"silu": 0, "gelu_tanh": 1}
ACTIVATIONS: Mapping[str, int] = {"relu2": 2, "relu": 3, "gelu_tanh": 4, "gelu": 5}
"""Numbers that stand for activation functions of gates, and of MLPs without a gate, in the kernels' interface."""
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
        layer.attention.norms or any(layer.norms_after) or layer.embedding for layer in plan.layers
    ):
        return "the model scales residual additions, and norms other values than hidden states"
    if plan.logits_divisor != 1 and plan.head is not None and (plan.norm is None or plan.head.bias is not None):
        return "the model scales logits, and has no final norm or a head with a bias"
    if len({(each.mlp.activation, each.mlp.gated) for each in plan.layers if isinstance(each.mlp, MLPPlan)}) > 1:
        return "the model's MLPs have different activation functions"
    if any(
        isinstance(each.attention, AttentionPlan) and each.attention.donor is not None for each in plan.layers
    ) and any(not isinstance(each.mlp, MLPPlan) for each in plan.layers):
        return "some of the model's layers share keys and values, and some have other MLPs than dense ones"
    if any(layer.embedding and not _gates_alike(layer.mlp, layer.embedding) for layer in plan.layers):
        return "the model's embeddings of token ids in each layer have another activation function than its gates"
    return next((reason for layer in plan.layers if (reason := _unsuitable_mlp(library, layer))), None)


def _gates_alike(mlp: object, embedding: LayerEmbeddingPlan) -> bool:
    """Return whether the gates of an MLP and of a layer's embedding have the same activation function."""
    return isinstance(mlp, MLPPlan) and mlp.gated and mlp.activation == embedding.activation


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
    first = first_attention(plan)
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
    if mlp.activation not in (GATE_ACTIVATIONS if mlp.gated else ACTIVATIONS):
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


def norms_of_model(plan: ModelPlan) -> list[Norm]:
    """Return the norms that use the model's own epsilon. Norms of latent attention have their own epsilons."""
    own = [each.attention.norms for each in plan.layers if isinstance(each.attention, LatentPlan)]
    others = {id(norm) for norms in own for norm in norms}
    return [norm for norm in plan.norms if id(norm) not in others]


def _epsilons(plan: ModelPlan) -> set[float]:
    """Return the epsilons of the norms that use the model's own epsilon, also of norms of values."""
    attentions = [each.attention for each in plan.layers if isinstance(each.attention, AttentionPlan)]
    of_values = {each.value_eps for each in attentions if each.value_eps is not None}
    return of_values | {norm.eps for norm in norms_of_model(plan)}


def first_attention(plan: ModelPlan) -> AttentionPlan | LatentPlan:
    """Return the attention of the first layer that is not recurrent."""
    return next(each.attention for each in plan.layers if not isinstance(each.attention, RecurrentPlan))

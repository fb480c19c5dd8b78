"""The models that the CPU kernels' decoder computes, and where their modules are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.models.attention_hook import AttentionCall
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.models.rope import query_scale
from penstock_enginecore.native.attention import TILE
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.parallel.part import Part

_ONE_MORE = frozenset({"GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "VaultGemmaForCausalLM"})
"""Their norms multiply with one more than their weights."""
KNOWN = _ONE_MORE | {
    "Dots1ForCausalLM",
    "Exaone4ForCausalLM",
    "FlexOlmoForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MinistralForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoeForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
}
"""Classes whose layers are attention with rotary halves and a gated MLP or a mixture of experts. What each puts out is added to
the hidden states, with RMS norms before it, behind it or both.
"""
KNOWN_BASES = frozenset({"Qwen2VLTextModel", "Qwen2_5_VLTextModel", "Qwen3VLTextModel"})
"""Classes of base models with such layers, whatever puts a head on them: transformers has no class for that."""
_ACTIVATIONS = {type(ACT2FN["silu"]): 0, torch.nn.SiLU: 0, type(ACT2FN["gelu_pytorch_tanh"]): 1}
"""What the kernels call what a gate passes through."""
_SPLIT = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
"""Linear layers of a gated MLP."""
_MAX_LAYERS = 800
UNROTATED = "unrotated"
"""The rotary embedding of layers without positions, among those that a model has."""


@dataclass(frozen=True, slots=True)
class Norms:
    """Modules of a layer; None where it has none. ``attention_out`` and ``mlp_out``: of what is about to be added."""

    before_attention: Any
    attention_out: Any
    before_mlp: Any
    mlp_out: Any

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, field.name) for field in fields(self))

    @classmethod
    def of(cls, layer: Any) -> "Norms":
        """Those of ``layer``."""
        first, second, before_mlp, mlp_out = (
            getattr(layer, f"{name}_layernorm", None)
            for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )
        if before_mlp is None and mlp_out is None:
            return cls(first, None, second, None)
        return cls(first, second, before_mlp, mlp_out)


def unsuitable(
    library: NativeLibrary,
    module: PreTrainedModel,
    calls: Sequence[AttentionCall],
    specs: Mapping[str, KVCacheSpec],
) -> str | None:
    """Why the decoder does not compute ``module``, None where it does. ``calls``: its attention calls, in order."""
    if not is_known(module):
        return f"{type(module).__name__} is not one of {', '.join(sorted(KNOWN))}"
    model = cast("Any", module).model
    if (dtype := module.get_input_embeddings().weight.dtype) not in (torch.float32, torch.bfloat16):
        return f"its weights are {str(dtype).removeprefix('torch.')}"
    return unsuitable_layers(library, model, calls, specs)


def unsuitable_layers(
    library: NativeLibrary, model: Any, calls: Sequence[AttentionCall], specs: Mapping[str, KVCacheSpec]
) -> str | None:
    """Why the decoder does not compute the layers of a base ``model``, as ``unsuitable`` has it."""
    if odd := [spec.block_size for spec in specs.values() if spec.block_size % TILE]:
        return f"cache.block_size {odd[0]} is no multiple of {TILE}"
    layers = own_layers(model)
    if [call.module for call in calls] != [layer.self_attn for layer in layers] or len(calls) > _MAX_LAYERS:
        return "its layers are not called one after the other"
    if reason := _unsuitable_attention(library, calls):
        return reason
    if len(set(map(norm_eps, _norms(model)))) > 1:
        return "its norms add several epsilons"
    return next((reason for layer in layers if (reason := _unsuitable_mlp(library, layer.mlp))), None)


def unsuitable_part(model: LoadedModel, part: Part | None) -> str | None:
    """Why the decoder does not compute this rank's ``part``, None where it does."""
    if part is None:
        return None
    if part.shared_memory is None:
        return "workers do not exchange in shared memory"
    module: Any = model.module
    if any(getattr(module.config, name, False) for name in ("attention_bias", "mlp_bias")):
        return "its layers have a bias"
    if part.vocabulary is None and len(module.lm_head.weight) not in (model.vocab_size, 0):
        return "its head is in parts"
    if is_mixture(module):
        return "workers have parts of its experts"
    if norms_all_heads(own_layers(module.model)[0].self_attn):
        return "workers have parts of what one norm takes"
    return None


def own_layers(model: Any) -> list[Any]:
    """The layers of a base model, without those of other stages."""
    return [layer for layer in model.layers if hasattr(layer, "self_attn")]


def is_known(module: PreTrainedModel) -> bool:
    """Whether the shape of its layers is known."""
    return type(module).__name__ in KNOWN or type(getattr(module, "model", None)).__name__ in KNOWN_BASES


def is_mixture(module: PreTrainedModel) -> bool:
    """Whether some MLPs of a model, if it is a known one, are mixtures of experts."""
    layers = own_layers(cast("Any", module).model) if is_known(module) else []
    return not all(is_gated(layer.mlp) for layer in layers)


def is_gated(mlp: torch.nn.Module) -> bool:
    """Whether ``mlp`` is a gate, an up and a down projection and nothing else; else it is a mixture."""
    return {name for name, _ in mlp.named_children()} - {"act_fn", "activation_fn"} in _SPLIT


def gate_and_up(mlp: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights ``[intermediate, hidden]`` of a gated MLP."""
    if hasattr(mlp, "gate_proj"):
        return mlp.gate_proj.weight, mlp.up_proj.weight
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    return gate, up


def activation(mlp: Any) -> int:
    """What the kernels call what the gate passes through."""
    return _ACTIVATIONS[type(_activation(mlp))]


def query_key_value(attention: Any) -> list[Any]:
    """The linear layers that give queries, keys and values, one after the other."""
    if hasattr(attention, "qkv_proj"):
        return [attention.qkv_proj]
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def query_key_norms(attention: Any) -> tuple[Any, Any]:
    """None twice where there are none."""
    return getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)


def norms_all_heads(attention: Any) -> bool:
    """Whether these norms take all heads as one."""
    norm, _ = query_key_norms(attention)
    return norm is not None and len(norm.weight) != attention.head_dim


def linears(layer: Any) -> list[Any]:
    """All linear layers whose weights the decoder packs as its own, those of mixtures left out."""
    of_mlp = (
        [child for child in layer.mlp.children() if isinstance(child, torch.nn.Linear)] if is_gated(layer.mlp) else []
    )
    return [*query_key_value(layer.self_attn), layer.self_attn.o_proj, *of_mlp]


def norm_weight(module: PreTrainedModel, norm: Any) -> torch.Tensor:
    """float32 ``[n]``, what a norm of ``module`` multiplies with."""
    weight: torch.Tensor = norm.weight.detach().float()
    return weight + 1.0 if type(module).__name__ in _ONE_MORE else weight.clone()


def norm_eps(norm: Any) -> float:
    """What a norm adds to the mean of the squares."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def epsilon(model: Any) -> float:
    """What all norms of a base model add."""
    return norm_eps(_norms(model)[0])


def is_norm(norm: Any) -> bool:
    """Whether a place for a norm has one."""
    return norm is not None and not isinstance(norm, torch.nn.Identity)


def _norms(model: Any) -> list[Any]:
    """Of a base model, the last one first."""
    of_layers = [norm for layer in own_layers(model) for norm in (*Norms.of(layer), *query_key_norms(layer.self_attn))]
    return list(filter(is_norm, [model.norm, *of_layers]))


def rotary_kinds(model: Any) -> list[str | None]:
    """What the layers of a base model call their rotary embedding, None where all have the same."""
    return [_rotary_kind(model.rotary_emb, layer.self_attn) for layer in own_layers(model)]


def _rotary_kind(rotary: Any, attention: Any) -> str | None:
    # EXAONE 4 has positions in layers with windows alone, where it has such layers.
    windowed = hasattr(attention, "sliding_window_pattern") and attention.sliding_window is not None
    if not getattr(attention, "use_rope", True) or (windowed and not attention.is_sliding):
        return UNROTATED
    if not hasattr(rotary, "layer_types"):
        return None
    kind: str = attention.layer_type if hasattr(attention, "layer_type") else attention.attention_type
    return kind


def _activation(mlp: Any) -> Any:
    return mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn


def _unsuitable_attention(library: NativeLibrary, calls: Sequence[AttentionCall]) -> str | None:
    heads, kv_heads, head_size = calls[0].query.shape[1], calls[0].key.shape[1], calls[0].query.shape[2]
    if head_size % library.lanes or any(call.value.shape[2] != head_size for call in calls):
        return f"a head size of {head_size} is no multiple of {library.lanes}"
    if len({(call.query.shape[1:], call.key.shape[1:]) for call in calls}) > 1:
        return "its layers have heads of several shapes"
    for attention in (cast("Any", call.module) for call in calls):
        if getattr(attention.config, "clip_qkv", None) is not None:
            return "its queries, keys and values are clipped"
        if query_scale(attention) is not None:
            return "it scales queries by position"
        if sum(len(linear.weight) for linear in query_key_value(attention)) != head_size * (heads + 2 * kv_heads):
            return "its projections are not those of its heads"
    return None


def _unsuitable_mlp(library: NativeLibrary, mlp: Any) -> str | None:
    if not is_gated(mlp):
        odd = next((weight.dtype for weight in mlp.parameters() if weight.dtype != torch.float32), None)
        return odd and f"its mixtures compute in {str(odd).removeprefix('torch.')}"
    if type(_activation(mlp)) not in _ACTIVATIONS:
        return f"its activation is {type(_activation(mlp)).__name__}"
    if (width := len(gate_and_up(mlp)[0])) % library.lanes:
        return f"intermediate_size {width} is no multiple of {library.lanes}"
    if any(child.bias is not None for name, child in mlp.named_children() if name.startswith(("gate", "up"))):
        return "its gate has a bias"
    return None

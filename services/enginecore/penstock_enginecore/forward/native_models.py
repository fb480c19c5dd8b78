"""The models that the CPU kernels' decoder computes, and where their modules are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.models.attention_hook import AttentionCall
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.models.query_scale import query_scale
from penstock_enginecore.native.attention import TILE
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.parallel.part import Part

_GEMMA = frozenset({"GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"})
"""Their norms multiply with one more than their weights."""
_MIXTURES = frozenset({"MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"})
KNOWN = _GEMMA | _MIXTURES | {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
"""Classes whose layers are: norm, attention with rotary halves, add, norm, gated MLP or a mixture of experts, add; what attention
and MLP put out may be normed before it is added.
"""
_ACTIVATIONS = {type(ACT2FN["silu"]): 0, torch.nn.SiLU: 0, type(ACT2FN["gelu_pytorch_tanh"]): 1}
"""What the kernels call what a gate passes through."""
_MAX_LAYERS = 800


@dataclass(frozen=True, slots=True)
class Norms:
    """Modules of a layer; None where it has none. ``attention_out`` and ``mlp_out``: of what is about to be added."""

    before_attention: Any
    attention_out: Any
    before_mlp: Any
    mlp_out: Any

    @classmethod
    def of(cls, layer: Any) -> "Norms":
        """Those of ``layer``."""
        if hasattr(layer, "pre_feedforward_layernorm"):
            return cls(
                layer.input_layernorm,
                layer.post_attention_layernorm,
                layer.pre_feedforward_layernorm,
                layer.post_feedforward_layernorm,
            )
        return cls(layer.input_layernorm, None, layer.post_attention_layernorm, None)


def unsuitable(
    library: NativeLibrary,
    module: PreTrainedModel,
    calls: Sequence[AttentionCall],
    specs: Mapping[str, KVCacheSpec],
) -> str | None:
    """Why the decoder does not compute ``module``, None where it does. ``calls``: its attention calls, in order."""
    name = type(module).__name__
    if name not in KNOWN:
        return f"{name} is not one of {', '.join(sorted(KNOWN))}"
    model = cast("Any", module).model
    if (dtype := module.get_input_embeddings().weight.dtype) not in (torch.float32, torch.bfloat16):
        return f"its weights are {str(dtype).removeprefix('torch.')}"
    if odd := [spec.block_size for spec in specs.values() if spec.block_size % TILE]:
        return f"cache.block_size {odd[0]} is no multiple of {TILE}"
    layers = own_layers(model)
    if [call.module for call in calls] != [layer.self_attn for layer in layers] or len(calls) > _MAX_LAYERS:
        return "its layers are not called one after the other"
    head_size = calls[0].query.shape[2]
    if head_size % library.lanes or any(call.value.shape[2] != head_size for call in calls):
        return f"a head size of {head_size} is no multiple of {library.lanes}"
    if any(query_scale(call.module) is not None for call in calls):
        return "it scales queries by position"
    for layer in layers:
        if reason := _unsuitable_mlp(library, layer.mlp):
            return reason
    return None


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
    return None


def own_layers(model: Any) -> list[Any]:
    """The layers of a base model, without those of other stages."""
    return [layer for layer in model.layers if hasattr(layer, "self_attn")]


def is_mixture(module: PreTrainedModel) -> bool:
    """Whether some MLPs of a model that is known are mixtures of experts."""
    return type(module).__name__ in _MIXTURES


def is_gated(mlp: torch.nn.Module) -> bool:
    """Whether ``mlp`` is a gate, an up and a down projection and nothing else; else it is a mixture."""
    return {name for name, _ in mlp.named_children()} - {"act_fn"} == {"gate_proj", "up_proj", "down_proj"}


def activation(mlp: Any) -> int:
    """What the kernels call what the gate passes through."""
    return _ACTIVATIONS[type(mlp.act_fn)]


def norm_weight(module: PreTrainedModel, norm: Any) -> torch.Tensor:
    """float32 ``[n]``, what a norm of ``module`` multiplies with."""
    weight: torch.Tensor = norm.weight.detach().float()
    return weight + 1.0 if type(module).__name__ in _GEMMA else weight.clone()


def norm_eps(norm: Any) -> float:
    """What a norm adds to the mean of the squares."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def layer_types(model: Any) -> list[str | None]:
    """What the layers of a base model call their rotary embedding, None where all have the same."""
    if not hasattr(model.rotary_emb, "layer_types"):
        return [None] * len(own_layers(model))
    return [layer.self_attn.layer_type for layer in own_layers(model)]


def _unsuitable_mlp(library: NativeLibrary, mlp: Any) -> str | None:
    if not is_gated(mlp):
        return None
    if type(mlp.act_fn) not in _ACTIVATIONS:
        return f"its activation is {type(mlp.act_fn).__name__}"
    if (width := mlp.gate_proj.weight.shape[0]) % library.lanes:
        return f"intermediate_size {width} is no multiple of {library.lanes}"
    if mlp.gate_proj.bias is not None or mlp.up_proj.bias is not None:
        return "its gate has a bias"
    return None

"""The models that the CPU kernels' decoder computes."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.models.attention_hook import AttentionCall
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.models.query_scale import query_scale
from penstock_enginecore.native.attention import TILE
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.parallel.part import Part

KNOWN = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Classes whose layers are: norm, attention with rotary halves, add, norm, gated MLP, add."""
_MAX_LAYERS = 1000


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
    model, config = cast("Any", module).model, module.config
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
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    if (width := layers[0].mlp.gate_proj.weight.shape[0]) % library.lanes:
        return f"intermediate_size {width} is no multiple of {library.lanes}"
    if any(layer.mlp.gate_proj.bias is not None or layer.mlp.up_proj.bias is not None for layer in layers):
        return "its gate has a bias"
    if any(query_scale(call.module) is not None for call in calls):
        return "it scales queries by position"
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
    return None


def own_layers(model: Any) -> list[Any]:
    """The layers of a base model, without those of other stages."""
    return [layer for layer in model.layers if hasattr(layer, "self_attn")]

"""Which architectures can be served. Everything else is refused by name: a wrong answer would not be noticed.

The checks come in two stages. ``check_supported`` looks at the configuration and the class before any weight is read.
``layer_specs`` looks at the attention calls that one probe forward really made, so that a model whose layers bypass the
attention interface, or ask it for something we do not do, is found out whatever it declares.
"""

import math
from collections.abc import Mapping, Sequence
from types import EllipsisType

import torch
from transformers import PretrainedConfig, PreTrainedModel

from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.models.attention_hook import AttentionCall
from penstock_enginecore.models.errors import ModelLoadError

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_ROPE_TYPES_BY_BATCH = frozenset({"dynamic", "longrope"})
"""Rotary scaling that picks frequencies from the largest position in the batch: neighbours would change a request's
output.
"""
_HARMLESS_EXTRAS = frozenset(
    {
        "cache_position",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments of an attention call that do not change what it must compute, or that are checked on their own."""


def check_supported(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> None:
    """Raise ModelLoadError, naming the class, unless ``model_class`` can be served by our attention function."""
    if reason := _unsupported(config, model_class):
        raise ModelLoadError(
            f"{model_class.__name__} is not supported: {reason}. Serve a decoder-only checkpoint whose layers all use "
            "full or sliding-window attention, e.g. Llama, Qwen2/3, Mistral, Mixtral, Gemma or Phi3."
        )


def _unsupported(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    if getattr(model_class, "_is_stateful", False):
        return "its layers carry linear-attention or state-space state, which the paged KV cache does not hold"
    if not getattr(model_class, "_supports_attention_backend", False):
        return "it does not dispatch its attention through transformers' attention interface"
    if config.get_text_config() is not config:
        return "it is a multimodal or composite model, which is not served yet"
    if other := sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES):
        return f"it has layers of type {', '.join(other)}"
    if getattr(config, "num_kv_shared_layers", 0):
        return "some of its layers share the keys and values of others"
    if scaling := sorted(_rope_types(config) & _ROPE_TYPES_BY_BATCH):
        return f"its rotary scaling '{scaling[0]}' depends on the longest request of the batch"
    if getattr(config, "quantization_config", None) is not None:
        return "its checkpoint is quantized, which is not served yet"
    return None


def _rope_types(config: PretrainedConfig) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, Mapping)]
    return {str(p["rope_type"]) for p in (parameters, *nested) if p.get("rope_type") is not None}


def layer_specs(model: PreTrainedModel, calls: Sequence[AttentionCall], block_size: int) -> dict[str, KVCacheSpec]:
    """The KV cache demand of every attention module, by module name in execution order.

    ``calls`` are those of a forward pass over one token. Raises ModelLoadError if they show that the model would be
    served wrongly.
    """
    config, class_name = model.config, type(model).__name__
    if len(calls) < config.num_hidden_layers:
        raise ModelLoadError(
            f"{class_name} is not supported: {len(calls)} of its {config.num_hidden_layers} layers use the attention "
            "interface; the others keep state of their own"
        )
    windows = _expected_windows(config, len(calls))
    names = {module: name for name, module in model.named_modules()}
    specs: dict[str, KVCacheSpec] = {}
    for call, window in zip(calls, windows, strict=True):
        name = names[call.module]
        reason = _unsupported_call(call, window)
        if name in specs:
            reason = "it attends more than once"
        if reason is not None:
            raise ModelLoadError(f"{class_name} is not supported: in layer '{name}', {reason}")
        specs[name] = KVCacheSpec(
            block_size=block_size,
            num_kv_heads=call.key.shape[1],
            head_size=call.key.shape[2],
            head_size_v=call.value.shape[2],
            dtype_size=call.key.element_size(),
            sliding_window=call.params.sliding_window,
        )
    return specs


def _expected_windows(config: PretrainedConfig, num_calls: int) -> list[int | EllipsisType | None]:
    """The sliding window each attention module should ask for; Ellipsis where the configuration does not say."""
    window = getattr(config, "sliding_window", None)
    if window is None or window >= (getattr(config, "max_position_embeddings", None) or math.inf):
        return [...] * num_calls  # no window, or one that no sequence leaves
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window if getattr(config, "use_sliding_window", True) else None] * num_calls
    if len(types) != num_calls:
        return [...] * num_calls
    return [window if kind == "sliding_attention" else None for kind in types]


def _unsupported_call(call: AttentionCall, window: int | EllipsisType | None) -> str | None:
    if call.mask is not None:
        return "the model builds an attention mask of its own"
    if call.extra.get("is_causal") is False or getattr(call.module, "is_causal", True) is False:
        return "attention is not causal"
    if window is not ... and call.params.sliding_window != window:
        asked = call.params.sliding_window
        return f"the sliding window is {window} by the configuration but {asked} in the attention call"
    unknown = [k for k, v in call.extra.items() if v is not None and v is not False and k not in _HARMLESS_EXTRAS]
    if unknown:
        return f"attention takes the argument '{unknown[0]}', which is not honoured"
    return None


class ProbeContext:
    """An attention context that notes the calls and returns zeros. See ``attention_hook.AttentionContext``."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See ``AttentionContext.attend``."""
        self.calls.append(call)
        return call.query.new_zeros(call.query.shape[0], call.query.shape[1], call.value.shape[2])

"""Encoder-only models: which are served, how their inputs differ from decoders', and their attention without a cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForMaskedLM, PretrainedConfig, PreTrainedModel

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.models.attention_hook import AttentionCall
from penstock_enginecore.models.errors import ModelLoadError

if TYPE_CHECKING:
    from penstock_enginecore.models.attention_hook import AttentionCall


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """``offset_positions``: positions begin behind the padding index. ``token_types``: the model tells two texts apart."""

    offset_positions: bool = False
    token_types: bool = False


_ROBERTA = EncoderFamily(offset_positions=True, token_types=True)
FAMILIES: dict[str, EncoderFamily] = {
    "bert": EncoderFamily(token_types=True),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": EncoderFamily(),
    "modernbert": EncoderFamily(),
}
"""By model type. Others may number positions or mix texts in ways of their own, which nobody would notice."""

_HARMLESS_EXTRAS = frozenset(
    {
        "deterministic",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def encoder_family(config: PretrainedConfig) -> EncoderFamily | None:
    """How the model takes its inputs; None for a model that is no encoder we know."""
    return None if getattr(config, "is_decoder", False) else FAMILIES.get(config.model_type)


def is_encoder(config: PretrainedConfig) -> bool:
    """Whether tokens see those after them, in an encoder that is served or not: it was trained to fill in masked tokens."""
    return type(config) in AutoModelForMaskedLM._model_mapping and not getattr(config, "is_decoder", False)


def position_offset(config: PretrainedConfig) -> int:
    """What is added to a token's place in its prompt to get its position id."""
    family = encoder_family(config)
    if family is None or not family.offset_positions:
        return 0
    return int(config.pad_token_id) + 1


def encoder_max_len(config: PretrainedConfig) -> int:
    """Longest prompt in tokens: as many as there are positions."""
    return int(config.max_position_embeddings) - position_offset(config)


def has_token_types(config: PretrainedConfig) -> bool:
    """Whether the second text of a pair gets another token type than the first."""
    family = encoder_family(config)
    return family is not None and family.token_types and int(getattr(config, "type_vocab_size", 0)) > 1


def encoder_inputs(config: PretrainedConfig, positions: IntArray, token_types: IntArray) -> dict[str, torch.Tensor]:
    """Arguments of the model besides its token ids, ``[1, tokens]`` int64. ``positions`` count from 0 in each prompt."""
    inputs = {"position_ids": torch.from_numpy(positions + position_offset(config))[None]}
    if has_token_types(config):
        inputs["token_type_ids"] = torch.from_numpy(token_types)[None]
    return inputs


def check_encoder(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> None:
    """Raise ModelLoadError, naming the class, unless it is an encoder that can be served."""
    reason = None
    if encoder_family(config) is None:
        reason = f"its model type is {config.model_type!r}; encoders that are served: {', '.join(FAMILIES)}"
    elif not getattr(model_class, "_supports_attention_backend", False):
        reason = "it does not dispatch its attention through transformers' attention interface"
    elif getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        reason = f"its position_embedding_type is {config.position_embedding_type!r}; served: 'absolute'"
    elif types := sorted(_rope_types(config) - {"default"}):
        reason = f"its rotary scaling is {types[0]!r}; served: 'default'"
    elif getattr(config, "quantization_config", None) is not None:
        reason = "its checkpoint is quantized, which is served for decoders only"
    if reason is not None:
        raise ModelLoadError(f"{model_class.__name__} is not supported: {reason}")


def _rope_types(config: PretrainedConfig) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, Mapping)]
    return {str(p["rope_type"]) for p in (parameters, *nested) if p.get("rope_type") is not None}


def check_encoder_calls(model: PreTrainedModel, calls: Sequence[AttentionCall]) -> None:
    """Raise ModelLoadError unless every layer attends as ``attention.encoder`` does.

    ``calls`` are those of a forward pass over one token.
    """
    name, num_layers = type(model).__name__, model.config.num_hidden_layers
    if len(calls) != num_layers:
        raise ModelLoadError(
            f"{name} is not supported: {len(calls)} of its {num_layers} layers use the attention interface"
        )
    for index, call in enumerate(calls):
        if reason := _unsupported_call(call):
            raise ModelLoadError(f"{name} is not supported: in attention call {index}, {reason}")


def _unsupported_call(call: AttentionCall) -> str | None:
    if call.mask is not None:
        return "the model builds an attention mask of its own"
    if call.extra.get("is_causal", getattr(call.module, "is_causal", True)):
        return "attention is causal"
    if call.params.softcap is not None or call.params.sinks is not None:
        return "attention has a soft cap or sinks, which are not honoured"
    unknown = [k for k, v in call.extra.items() if v is not None and v is not False and k not in _HARMLESS_EXTRAS]
    return f"attention takes the argument '{unknown[0]}', which is not honoured" if unknown else None


# Bidirectional attention of a step's prompts, each over its own tokens.


class EncoderContext:
    """An attention context for whole prompts that lie one after the other in the flat batch.

    Prompts of one length attend together. Windows are symmetric: a token sees ``sliding_window - 1`` tokens on each side,
    as transformers' encoders pass it.
    """

    def __init__(self, query_start_loc: IntArray, device: torch.device) -> None:
        """``query_start_loc`` ``[prompts + 1]``: first token of each prompt."""
        self._device = device
        starts, lengths = query_start_loc[:-1], np.diff(query_start_loc)
        self._rows: list[torch.Tensor] = []
        """Per length, the flat positions ``[prompts, length]``."""
        for length in np.unique(lengths):
            rows = starts[lengths == length][:, None] + np.arange(length)
            self._rows.append(torch.from_numpy(rows).to(device))
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def attend(self, call: "AttentionCall") -> torch.Tensor:
        """Every prompt over its own tokens: the output ``[tokens, num_heads, head_size_v]``."""
        output = call.query.new_empty(*call.query.shape[:2], call.value.shape[2])
        for rows in self._rows:
            # [prompts, heads, length, head size]
            q, k, v = (x[rows].transpose(1, 2) for x in (call.query, call.key, call.value))
            attended = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=self._mask(rows.shape[1], call.params.sliding_window),
                scale=call.params.scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            output[rows] = attended.transpose(1, 2)
        return output

    def _mask(self, length: int, window: int | None) -> torch.Tensor | None:
        """True where a query sees a key, ``[length, length]``; None where all see all."""
        if window is None or length <= window:
            return None
        if (length, window) not in self._masks:
            position = torch.arange(length, device=self._device)
            self._masks[length, window] = (position[:, None] - position[None, :]).abs() < window
        return self._masks[length, window]

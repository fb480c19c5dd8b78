"""Models with bidirectional attention: supported model types, inputs that decoders do not have, and attention without a
KV cache.
"""

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
from penstock_enginecore.models.relative_attention import BIAS_ARGUMENT, RelativeBias, unsupported_relative

if TYPE_CHECKING:
    from penstock_enginecore.models.attention_hook import AttentionCall


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """Input format of an encoder's model type.

    Attributes:
        offset_positions: Whether position ids begin after the id of the padding token.
        padding_id: Id of the padding token for this purpose, or None for the id in the configuration.
        token_types: Whether tokens have a type that tells the first text of a pair from the second.
        relative: Whether attention scores have a bias that depends on the distance between tokens. See
            ``relative_attention``.
    """

    offset_positions: bool = False
    padding_id: int | None = None
    token_types: bool = False
    relative: bool = False


_BERT = EncoderFamily(token_types=True)
_ROBERTA = EncoderFamily(offset_positions=True, token_types=True)
FAMILIES: dict[str, EncoderFamily] = {
    "bert": _BERT,
    "albert": _BERT,
    "electra": _BERT,
    "ernie": _BERT,
    "gte": _BERT,
    "jina_embeddings_v3": _BERT,
    "nomic_bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "xlm-roberta-xl": _ROBERTA,
    "camembert": _ROBERTA,
    "deberta-v2": EncoderFamily(token_types=True, relative=True),
    "distilbert": EncoderFamily(),
    "eurobert": EncoderFamily(),
    "modernbert": EncoderFamily(),
    "mpnet": EncoderFamily(offset_positions=True, padding_id=1, relative=True),
}
"""Input formats of supported encoders, by model type. Other models may number positions or distinguish two texts
differently, and wrong results would not be noticed.
"""

_TWO_WAY = frozenset({"gemma", "gemma3_text", "llama", "mistral", "qwen2", "qwen3"})
"""Model types of decoders that can be served with bidirectional attention, as encoders without special inputs."""
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary scaling whose frequencies do not depend on the length of the prompt."""

_KNOWN_EXTRAS = frozenset(
    {
        BIAS_ARGUMENT,
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
    """Return the input format of an encoder, or None if the model is not a supported encoder."""
    if is_two_way(config):
        return EncoderFamily() if config.model_type in _TWO_WAY else None
    return None if getattr(config, "is_decoder", False) else FAMILIES.get(config.model_type)


def is_encoder(config: PretrainedConfig) -> bool:
    """Return whether the model is an encoder, supported or not. Encoders have bidirectional attention. Most are trained
    to fill in masked tokens, and some are decoders whose configuration switches the causal mask off.
    """
    if is_two_way(config):
        return True
    return type(config) in AutoModelForMaskedLM._model_mapping and not getattr(config, "is_decoder", False)


def is_two_way(config: PretrainedConfig) -> bool:
    """Return whether the configuration of a decoder asks for bidirectional attention."""
    if type(config) in AutoModelForMaskedLM._model_mapping:
        return False
    return getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", False) is True


def prepare_two_way(model: PreTrainedModel) -> None:
    """Let the attention modules of a decoder with bidirectional attention say so, and switch transformers' cache off.
    transformers reads only some of the configurations' flags.
    """
    if not is_two_way(model.config):
        return
    model.config.use_cache = False
    for module in model.modules():
        if hasattr(module, "is_causal"):
            setattr(module, "is_causal", False)  # noqa: B010 - the type of modules has no such attribute


def position_offset(config: PretrainedConfig) -> int:
    """Return the difference between a token's position id and its index in the prompt."""
    family = encoder_family(config)
    if family is None or not family.offset_positions:
        return 0
    return int(config.pad_token_id if family.padding_id is None else family.padding_id) + 1


def encoder_max_len(config: PretrainedConfig) -> int:
    """Return the length of the longest prompt in tokens, which is the number of the model's positions."""
    return int(config.max_position_embeddings) - position_offset(config)


def has_token_types(config: PretrainedConfig) -> bool:
    """Return whether the second text of a pair has a different token type."""
    family = encoder_family(config)
    return family is not None and family.token_types and int(getattr(config, "type_vocab_size", 0)) > 1


def encoder_inputs(config: PretrainedConfig, positions: IntArray, token_types: IntArray) -> dict[str, torch.Tensor]:
    """Return the arguments of the model's forward pass other than the token ids, each int64 ``[1, tokens]``. In each
    prompt, ``positions`` start from 0.
    """
    inputs = {"position_ids": torch.from_numpy(positions + position_offset(config))[None]}
    if has_token_types(config):
        inputs["token_type_ids"] = torch.from_numpy(token_types)[None]
    return inputs


def check_encoder(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> None:
    """Raise ModelLoadError, with the class name, if the encoder is not supported."""
    family, reason = encoder_family(config), None
    if family is None and is_two_way(config):
        supported = ", ".join(sorted(_TWO_WAY))
        reason = f"its configuration sets bidirectional attention, which is supported for the model types {supported}"
    elif family is None:
        reason = f"its model type is {config.model_type!r}; supported encoders: {', '.join(FAMILIES)}"
    elif family.relative:
        reason = unsupported_relative(config)
    elif not getattr(model_class, "_supports_attention_backend", False):
        reason = "it does not dispatch its attention through transformers' attention interface"
    elif getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        reason = f"its position_embedding_type is {config.position_embedding_type!r}; supported: 'absolute'"
    elif types := sorted(_rope_types(config) - _STATIC_ROPE):
        reason = f"its rotary scaling is {types[0]!r}; supported: {', '.join(map(repr, sorted(_STATIC_ROPE)))}"
    elif getattr(config, "quantization_config", None) is not None:
        reason = "its checkpoint is quantized, which is supported only for decoders"
    if reason is not None:
        raise ModelLoadError(f"{model_class.__name__} is not supported: {reason}")


def _rope_types(config: PretrainedConfig) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, Mapping)]
    return {str(p["rope_type"]) for p in (parameters, *nested) if p.get("rope_type") is not None}


def check_encoder_calls(model: PreTrainedModel, calls: Sequence[AttentionCall]) -> None:
    """Raise ModelLoadError unless ``EncoderContext`` supports the attention call of every layer.

    ``calls`` are the attention calls of a forward pass over one token.
    """
    name, num_layers = type(model).__name__, model.config.num_hidden_layers
    if len(calls) != num_layers:
        raise ModelLoadError(
            f"{name} is not supported: {len(calls)} of its {num_layers} layers use the attention interface"
        )
    for index, call in enumerate(calls):
        if reason := _unsupported_call(call, model.config):
            raise ModelLoadError(f"{name} is not supported: in attention call {index}, {reason}")


def _unsupported_call(call: AttentionCall, config: PretrainedConfig) -> str | None:
    if call.mask is not None:
        return "the model builds its own attention mask"
    if call.extra.get("is_causal", getattr(call.module, "is_causal", True)):
        return "attention is causal"
    if call.params.softcap is not None or call.params.sinks is not None:
        return "attention has a soft cap or sinks, which are not supported"
    if call.params.sliding_window is not None and getattr(config, "is_causal", True) is False:
        return "attention has a sliding window, which is not defined without a causal mask"
    unknown = [k for k, v in call.extra.items() if v is not None and v is not False and k not in _KNOWN_EXTRAS]
    return f"attention is called with the argument '{unknown[0]}', which is not supported" if unknown else None


# Bidirectional attention of a step's prompts, separately for each prompt.


class EncoderContext:
    """Attention context for complete prompts, one after the other in the flat batch.

    Prompts of equal length and with an equal number of attended tokens are computed together. Windows are symmetric, as in
    transformers' encoders: a token attends to ``sliding_window - 1`` tokens on each side.
    """

    def __init__(self, query_start_loc: IntArray, device: torch.device, num_attended: IntArray | None = None) -> None:
        """Prepare the context for prompts whose first tokens have the indices ``query_start_loc`` ``[prompts + 1]``.
        The last index is the end of the batch. The tokens of a prompt attend to its first ``num_attended`` ``[prompts]``
        tokens, or to all its tokens if this argument is None.
        """
        self._device = device
        starts, lengths = query_start_loc[:-1], np.diff(query_start_loc)
        self._groups: list[tuple[torch.Tensor, int]] = []
        """Indices of tokens in the flat batch, ``[prompts, length]``, and the number of attended tokens of each prompt.
        There is one entry for all prompts for which both numbers are equal.
        """
        kinds = np.stack([lengths, lengths if num_attended is None else num_attended])
        for length, attended in np.unique(kinds, axis=1).T.tolist():
            rows = starts[(kinds[0] == length) & (kinds[1] == attended)][:, None] + np.arange(length)
            self._groups.append((torch.from_numpy(rows).to(device), attended))
        self._masks: dict[tuple[int, int], torch.Tensor] = {}
        self._shared_biases: dict[int, torch.Tensor] = {}
        """Parts of relative biases that all layers share, by prompt length."""

    def attend(self, call: "AttentionCall") -> torch.Tensor:
        """Return the attention output ``[tokens, num_heads, head_size_v]`` of every prompt over its own tokens."""
        output = call.query.new_empty(*call.query.shape[:2], call.value.shape[2])
        for rows, attended in self._groups:
            # [prompts, heads, length, head size]
            q = call.query[rows].transpose(1, 2)
            k, v = (x[rows[:, :attended]].transpose(1, 2) for x in (call.key, call.value))
            bias: RelativeBias | None = call.extra.get(BIAS_ARGUMENT)
            mask = self._mask(rows.shape[1], call.params.sliding_window) if bias is None else self._bias(bias, rows)
            result = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if mask is None else mask[..., :attended],
                scale=call.params.scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            output[rows] = result.transpose(1, 2)
        return output

    def _mask(self, length: int, window: int | None) -> torch.Tensor | None:
        """Return a mask ``[length, length]``, True where a query attends to a key, or None if every query attends to
        every key.
        """
        if window is None or length <= window:
            return None
        if (length, window) not in self._masks:
            position = torch.arange(length, device=self._device)
            self._masks[length, window] = (position[:, None] - position[None, :]).abs() < window
        return self._masks[length, window]

    def _bias(self, bias: RelativeBias, rows: torch.Tensor) -> torch.Tensor:
        """Return the relative bias of the prompts in ``rows``, ``[prompts or 1, heads, length, length]``."""
        length = rows.shape[1]
        if length not in self._shared_biases:
            self._shared_biases[length] = bias.of_length(length, self._device)
        return bias.of_prompts(self._shared_biases[length], rows)

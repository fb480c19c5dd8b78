"""Random tiny text models of multimodal checkpoints, and the same models with transformers' own attention."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
)
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from penstock_common.types.media import MultiModalFeature
from penstock_enginecore.core.model_info import MediaInfo
from penstock_enginecore.models import attention_hook
from penstock_enginecore.models.loader import LoadedModel, prepare_decoder
from penstock_enginecore.models.multimodal.base import RopePositions
from penstock_enginecore.models.multimodal.text_model import for_causal_lm

VOCAB = 320
MAX_LEN = 512


def _unasked(token_ids: Sequence[int], features: Sequence[MultiModalFeature]) -> RopePositions:
    raise AssertionError("forward passes must get positions")


class FakeEncoder:
    """Attributes of a ``MediaEncoder`` that a forward pass reads. Its encoders have no layers."""

    modules = ()

    def __init__(
        self, *, has_sections: bool, num_deepstack: int, both_ways: bool, windowed_spans: bool = False
    ) -> None:
        self.windowed_spans = windowed_spans
        self.rope_positions = _unasked if has_sections else None
        self.num_deepstack, self.width = num_deepstack, 64 * (1 + num_deepstack)
        self.media: Sequence[MediaInfo] = [
            MediaInfo(modality="image", num_blocks=1, max_embeds=16, max_tokens=16, max_span=16 if both_ways else 0)
        ]


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
_HEAD: dict[str, Any] = {"head_dim": 16}
_SECTIONS = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]}
WINDOW = 12


@dataclass(frozen=True)
class _Family:
    model: Any
    config: PretrainedConfig
    encoder: FakeEncoder


def _families() -> dict[str, _Family]:
    sections = FakeEncoder(has_sections=True, num_deepstack=0, both_ways=False)
    deep = FakeEncoder(has_sections=True, num_deepstack=2, both_ways=False)
    spans = FakeEncoder(has_sections=False, num_deepstack=0, both_ways=True)
    plain = FakeEncoder(has_sections=False, num_deepstack=0, both_ways=False)
    rope: dict[str, Any] = {"rope_parameters": dict(_SECTIONS)}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    per_kind = {kind: {"rope_type": "default", "rope_theta": 100.0} for kind in kinds}
    gemma: dict[str, Any] = {
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "layer_types": kinds,
        "rope_parameters": per_kind,
    }
    shared: dict[str, Any] = {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    }
    return {
        "qwen2_vl": _Family(for_causal_lm(Qwen2VLTextModel), Qwen2VLTextConfig(**_SIZES, **rope), sections),
        "qwen2_5_vl": _Family(for_causal_lm(Qwen2_5_VLTextModel), Qwen2_5_VLTextConfig(**_SIZES, **rope), sections),
        "qwen3_vl": _Family(for_causal_lm(Qwen3VLTextModel), Qwen3VLTextConfig(**_SIZES, **_HEAD, **rope), deep),
        "gemma3": _Family(Gemma3ForCausalLM, Gemma3TextConfig(**_SIZES, **_HEAD, **gemma), spans),
        "llama": _Family(LlamaForCausalLM, LlamaConfig(**_SIZES), plain),
        "gemma4": _Family(Gemma4ForCausalLM, Gemma4TextConfig(**{**_SIZES, **_HEAD, **shared}), plain),
    }


FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "llama", "gemma4")


def make(family: str, **changes: Any) -> tuple[LoadedModel, Any]:
    """Return the model to serve, in float32, and the same model with transformers' own attention. ``changes`` are
    changes of its configuration.
    """
    of = _families()[family]
    of.config.update(changes)
    max_len = of.config.max_position_embeddings
    attention_hook.register()
    torch.manual_seed(0)
    twin = of.model._from_config(copy.deepcopy(of.config), attn_implementation="eager").eval()
    module = of.model._from_config(copy.deepcopy(of.config), attn_implementation=attention_hook.ATTENTION_NAME).eval()
    for parameter in twin.parameters():  # give norms and biases different values
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    module.load_state_dict(twin.state_dict())
    prepare_decoder(module, max_len, torch.device("cpu"))
    encoder: Any = of.encoder
    return LoadedModel(module, torch.float32, torch.float32, max_len, VOCAB, frozenset(), encoder=encoder), twin


def spans_masks(twin: Any, embedded: torch.Tensor, groups: torch.Tensor, *, windowed: bool) -> Any:
    """Return the attention masks of transformers' Gemma 3 for the images ``groups`` ``[1, tokens]``; -1 is text. If
    ``windowed``, return those of Gemma 4, whose images attend both ways only in layers with windows.
    """
    positions = torch.arange(embedded.shape[1])[None]
    make_masks: Any = modeling_gemma4.create_masks_for_vision_model if windowed else create_masks_for_vision_model
    return make_masks(
        config=twin.config,
        inputs_embeds=embedded,
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
        block_sequence_ids=groups,
    )

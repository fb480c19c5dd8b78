"""Tiny composite checkpoints of which only the text is served. They have random weights and a tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedModel, PreTrainedTokenizerFast

from penstock_common.checkpoint import WITH_TOWERS
from penstock_enginecore.models.multimodal import absent_towers
from tests.fakes.models.small_tokenizers import EOS, byte_level

VOCAB_SIZE = 512
WINDOW = 12
CHUNK = 12

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_HEAD = {"head_dim": 16}
_WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
_HALF_SECTIONS = {**_SECTIONS, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_DEEP_TOWER = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
_GRID_TOWER = {**_DEEP_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_SOUND = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "d_model": 32, "output_dim": 64}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GEMMA4 = {**_TEXT, **_HEAD, **_WINDOWS, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0}
_LIKE_31B = {**_GEMMA4, "attention_k_eq_v": True, "global_head_dim": 32, "num_global_key_value_heads": 1}
_LIKE_26B = {
    **_GEMMA4,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "global_head_dim": 32,
}

_SHARED_KEYS = {
    **_GEMMA4,
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
_LIKE_3N = {
    **_SHARED_KEYS,
    "vocab_size_per_layer_input": VOCAB_SIZE - 32,
    "laurel_rank": 8,
    "altup_num_inputs": 3,
    "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0, 0.0],
}
_LIKE_E2B = {**_SHARED_KEYS, "global_head_dim": 32, "use_double_wide_mlp": True}

_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "cohere2_vision": {
        "text_config": {"model_type": "cohere2", **_TEXT, **_HEAD, **_WINDOWS},
        "vision_config": _TOWER,
        "alignment_intermediate_size": 64,
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            **_TEXT,
            "rope_parameters": {**_SECTIONS, "mrope_section": [3, 3, 2]},
            "moe_intermediate_size": [32, 16],
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "mlp_layer_types": ["dense", "sparse"],
        },
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2},
    },
    "exaone4_5": {"text_config": {"model_type": "exaone4", **_TEXT, **_HEAD, **_WINDOWS}, "vision_config": _DEEP_TOWER},
    "gemma3n": {
        "text_config": _LIKE_3N,
        "vision_config": {"hidden_size": 32, "vocab_offset": VOCAB_SIZE, "vocab_size": 8},
        "audio_config": {
            "hidden_size": 32,
            "vocab_offset": VOCAB_SIZE + 8,
            "vocab_size": 8,
            "input_feat_size": 16,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
            "sscp_conv_channel_size": [4, 2],
        },
    },
    "gemma4": {"text_config": _LIKE_31B, "vision_config": {**_TOWER, "num_key_value_heads": 2, "head_dim": 16}},
    "gemma4_e2b": {
        "model_type": "gemma4",
        "text_config": _LIKE_E2B,
        "vision_config": {**_TOWER, "num_key_value_heads": 2, "head_dim": 16},
    },
    "gemma4_moe": {"model_type": "gemma4", "text_config": _LIKE_26B, "vision_config": None, "audio_config": None},
    "gemma4_unified": {"text_config": _LIKE_31B},
    "glm4v": {"text_config": {**_TEXT, "rope_parameters": _HALF_SECTIONS}, "vision_config": _DEEP_TOWER},
    "glm46v": {
        "text_config": {"model_type": "glm4v_text", **_TEXT, "rope_parameters": _HALF_SECTIONS},
        "vision_config": {"model_type": "glm4v_vision", **_DEEP_TOWER},
    },
    "glm4v_moe": {
        "text_config": {**_TEXT, **_ROUTED, "rope_parameters": _HALF_SECTIONS},
        "vision_config": _DEEP_TOWER,
    },
    "glm_ocr": {"text_config": {**_TEXT, **_HEAD, "rope_parameters": _SECTIONS}, "vision_config": _DEEP_TOWER},
    "got_ocr2": {
        "text_config": {"model_type": "qwen2", **_TEXT},
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 48},
    },
    "hunyuan_vl": {
        "text_config": {
            **_TEXT,
            **_HEAD,
            "rope_parameters": {
                "rope_type": "xdrope",
                "rope_theta": 10_000.0,
                "mrope_section": [2, 2, 2, 2],
                "factor": 1.0,
            },
        },
        "vision_config": {**_TOWER, "out_hidden_size": 64, "text_hidden_size": 64},
    },
    "kimi_k25": {
        "text_config": {"model_type": "deepseek_v3", **_TEXT, **_ROUTED, **_MLA},
        "vision_config": _TOWER,
    },
    "llama4": {
        "text_config": {
            **_TEXT,
            **_HEAD,
            "num_local_experts": 4,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": CHUNK,
            "no_rope_layers": [1, 0],
            "interleave_moe_layer_step": 2,
            "floor_scale": 6,
            "attn_scale": 0.7,
        },
        "vision_config": {**_TOWER, "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32},
    },
    "mistral3_mistral4": {
        "model_type": "mistral3",
        "text_config": {"model_type": "mistral4", **_TEXT, **_ROUTED, **_MLA},
        "vision_config": {"model_type": "pixtral", **_TOWER, "head_dim": 16},
    },
    "muse_glimmer": {
        "text_config": {**_TEXT, **_HEAD, **_WINDOWS},
        "vision_config": _TOWER,
        "out_hidden_size": 64,
        "projector_hidden_size": 64,
    },
    "paddleocr_vl": {"text_config": {**_TEXT, **_HEAD, "rope_parameters": _SECTIONS}, "vision_config": _TOWER},
    "qwen2_5_omni": {
        "thinker_config": {
            "text_config": {**_TEXT, "rope_parameters": _SECTIONS},
            "vision_config": {**_DEEP_TOWER, "fullatt_block_indexes": [0]},
            "audio_config": _SOUND,
            "vision_start_token_id": 1,
        },
        "enable_audio_output": False,
    },
    "qwen3_asr": {"text_config": {"model_type": "qwen3", **_TEXT, **_HEAD}, "audio_config": _SOUND},
    "qwen3_omni_moe": {
        "thinker_config": {
            "text_config": {**_TEXT, **_HEAD, **_EXPERTS, "rope_parameters": {**_SECTIONS, "mrope_interleaved": True}},
            "vision_config": _GRID_TOWER,
            "audio_config": _SOUND,
            "vision_start_token_id": 1,
        },
        "enable_audio_output": False,
    },
    "step3p7": {
        "text_config": {
            **_TEXT,
            **_HEAD,
            **_WINDOWS,
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "share_expert_dim": 32,
            "mlp_layer_types": ["dense", "sparse"],
        },
        "vision_config": _TOWER,
    },
}
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% else %}<image>{% endif %}{% endfor %}\n{% endfor %}"
)
"""Chat template that reads parts, as those of multimodal models do."""
COMPOSITES = tuple(name for name in _CONFIGS if name not in WITH_TOWERS)
"""Names for ``save_composite`` whose media encoders Penstock does not know: model types of transformers, or variants of
them.
"""


def save_composite(name: str, directory: Path, **text: Any) -> PreTrainedModel:
    """Write a checkpoint with this name in ``_CONFIGS`` to ``directory``, and return the model in float32 with
    transformers' attention.

    ``text`` changes the configuration of the text model.
    """
    settings = {"model_type": name, "tie_word_embeddings": False, **_CONFIGS[name]}
    if "text_config" in settings:
        settings["text_config"] = {**settings["text_config"], **text}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    absent_towers.register()
    torch.manual_seed(0)
    make: Any = AutoModelForMultimodalLM.from_config
    model: PreTrainedModel = make(config, dtype=torch.float32).eval()
    _randomize(model)
    model.save_pretrained(directory)
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=byte_level(), eos_token=EOS).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    return model


@torch.no_grad()
def _randomize(model: PreTrainedModel) -> None:
    """Wide enough that tokens depend on their context, with norms, biases and corrections that do something."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            parameter.normal_(0.0, 0.3)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.1)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)

"""Configurations of models that people deploy, in reduced sizes, as their checkpoints' config.json has them.

The widths, the numbers of layers and experts, and the windows are smaller. The sizes of heads, the ratio of query to key
heads, the order of layer types, the rotary settings, and the multipliers are those of the published checkpoints. The
keys are those of the published files, even where transformers has newer names. ``initializer_range`` is smaller for
models whose random layers would amplify rounding until tokens differ.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel

VOCAB_SIZE = 320
MAX_LENGTH = 192
"""Tokens of the longest sequence for which the configurations' rotary settings are tested."""
_WINDOW = 20
_LAYERS = 4

_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": _LAYERS,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_SEPARATE_HEAD = {"tie_word_embeddings": False}


def _heads(queries: int, keys: int, size: int = 128) -> dict[str, Any]:
    return {"num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": size}


def _layers(*kinds: str) -> dict[str, Any]:
    return {"layer_types": list(kinds), "num_hidden_layers": len(kinds)}


_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_FIVE_TO_ONE = _layers(*[_SLIDING] * 5, _FULL)
_THREE_TO_ONE = _layers(*[_SLIDING] * 3, _FULL)
_DELTA_LAYERS = _layers(*[_LINEAR] * 3, _FULL)
_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_MLA = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
_DELTA_ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "rope_type": "default",
    "rope_theta": 10_000_000,
    "partial_rotary_factor": 0.25,
}
_DELTA = {
    **_DELTA_LAYERS,
    **_SEPARATE_HEAD,
    "full_attention_interval": 4,
    "attn_output_gate": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": _DELTA_ROPE,
    "max_position_embeddings": 262_144,
}
_DELTA_EXPERTS = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}
_GRANITE = {
    **_SEPARATE_HEAD,
    "embedding_multiplier": 12,
    "residual_multiplier": 0.246,
    "attention_multiplier": 0.015625,
    "logits_scaling": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_d_state": 128,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "position_embedding_type": "nope",
    "layer_types": ["mamba", "mamba", "attention", "mamba", "mamba"],
    "num_hidden_layers": 5,
}
_SSD = {
    **_SEPARATE_HEAD,
    "mamba_n_heads": 2,
    "mamba_d_head": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12]}
_DEEP_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}

_PIXELS = {
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
}
_PROCESSORS = {
    "preprocessor_config.json": {**_PIXELS, "image_processor_type": "Qwen2VLImageProcessorFast"},
    "video_preprocessor_config.json": {**_PIXELS, "video_processor_type": "Qwen3VLVideoProcessor"},
}
"""Files that composite checkpoints have beside config.json."""

SERVED: Mapping[str, Mapping[str, Any]] = {
    # Dense models.
    "Llama-3.1-8B": {
        "model_type": "llama",
        **_heads(8, 2),
        **_SEPARATE_HEAD,
        "rope_theta": 500_000.0,
        "rope_scaling": _LLAMA3,
        "max_position_embeddings": 131_072,
    },
    "Qwen2.5-7B": {"model_type": "qwen2", "num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112,
                   **_SEPARATE_HEAD, "rope_theta": 1_000_000.0, "use_sliding_window": False, "max_window_layers": 28,
                   "sliding_window": 131_072, "max_position_embeddings": 32_768},
    "Qwen3-0.6B": {"model_type": "qwen3", **_heads(4, 2), "rope_theta": 1_000_000, **_SEPARATE_HEAD,
                   "max_position_embeddings": 40_960},
    "Gemma-3-4B": {
        "model_type": "gemma3_text",
        **_heads(2, 1, 256),
        **_FIVE_TO_ONE,
        **_SEPARATE_HEAD,
        "query_pre_attn_scalar": 256,
        "sliding_window": _WINDOW,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "max_position_embeddings": 131_072,
    },
    "Gemma-4-31B-text": {
        "model_type": "gemma4_text",
        **_heads(2, 1, 256),
        **_FIVE_TO_ONE,
        **_SEPARATE_HEAD,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "sliding_window": _WINDOW,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        },
        "max_position_embeddings": 262_144,
        "initializer_range": 0.2,
    },
    "Phi-4-mini": {
        "model_type": "phi3",
        **_heads(3, 1),
        "hidden_size": 384,
        "num_hidden_layers": 2,
        **_SEPARATE_HEAD,
        "partial_rotary_factor": 0.75,
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 48,
            "long_factor": [1.0 + 0.9 * index for index in range(48)],
        },
        "original_max_position_embeddings": 4096,
        "max_position_embeddings": 131_072,
        "sliding_window": 262_144,
    },
    "Olmo-3-7B": {
        "model_type": "olmo3",
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "hidden_size": 256,
        **_THREE_TO_ONE,
        **_SEPARATE_HEAD,
        "sliding_window": _WINDOW,
        "rope_theta": 500_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "attention_factor": 1.2079441541679836,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        "max_position_embeddings": 65_536,
    },
    "SmolLM3-3B": {"model_type": "smollm3", "num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 128,
                   "no_rope_layers": [1, 1, 1, 0], "rope_theta": 5_000_000.0, **_SEPARATE_HEAD,
                   "max_position_embeddings": 65_536},
    "EXAONE-4.0-32B": {"model_type": "exaone4", **_heads(5, 1), **_THREE_TO_ONE, **_SEPARATE_HEAD,
                       "sliding_window": _WINDOW, "sliding_window_pattern": "LLLG", "rope_theta": 1_000_000,
                       "rope_scaling": {**_LLAMA3, "factor": 16.0}, "max_position_embeddings": 131_072},
    "Command-R7B": {"model_type": "cohere2", **_heads(4, 1), **_THREE_TO_ONE, **_SEPARATE_HEAD, "logit_scale": 0.25,
                    "sliding_window": _WINDOW, "sliding_window_pattern": 4, "rope_theta": 50_000,
                    "max_position_embeddings": 8192},
    "Granite-3.3-8B": {"model_type": "granite", "num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 512,
                       "num_hidden_layers": 2, **_SEPARATE_HEAD, "attention_multiplier": 0.0078125,
                       "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 4.0,
                       "rope_theta": 10_000_000.0, "max_position_embeddings": 131_072},
    "Ministral-3-8B": {
        "model_type": "ministral3",
        **_heads(4, 1),
        **_SEPARATE_HEAD,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "max_position_embeddings": 262_144,
    },
    # Mixtures of experts.
    "Qwen3-30B-A3B": {"model_type": "qwen3_moe", **_heads(8, 1), **_SEPARATE_HEAD, "num_experts": 16,
                      "num_experts_per_tok": 8, "moe_intermediate_size": 32, "norm_topk_prob": True,
                      "rope_theta": 1_000_000.0, "decoder_sparse_step": 1, "max_position_embeddings": 40_960},
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        **_heads(8, 1, 64),
        **_layers(_SLIDING, _FULL, _SLIDING, _FULL),
        **_SEPARATE_HEAD,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "sliding_window": _WINDOW,
        "rope_theta": 150_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 131_072,
    },
    "GLM-4.5-Air": {"model_type": "glm4_moe", **_heads(12, 1), **_SEPARATE_HEAD, "attention_bias": True,
                    "partial_rotary_factor": 0.5, "use_qk_norm": False, "n_routed_experts": 16,
                    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
                    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
                    "moe_intermediate_size": 32, "rope_theta": 1_000_000, "max_position_embeddings": 131_072},
    "MiniMax-M2": {"model_type": "minimax_m2", **_heads(6, 1), **_SEPARATE_HEAD, "rotary_dim": 64,
                   "num_local_experts": 16, "num_experts_per_tok": 8, "rope_theta": 5_000_000,
                   "max_position_embeddings": 196_608},
    "DeepSeek-V3.1": {
        "model_type": "deepseek_v3",
        **_MLA,
        **_SEPARATE_HEAD,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "moe_intermediate_size": 32,
        "rope_theta": 10_000,
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "max_position_embeddings": 163_840,
    },
    "ERNIE-4.5-21B-A3B": {"model_type": "ernie4_5_moe", "num_attention_heads": 5, "num_key_value_heads": 1,
                          "hidden_size": 160, **_SEPARATE_HEAD, "moe_num_experts": 16, "moe_k": 6,
                          "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_intermediate_size": 32,
                          "rope_theta": 500_000.0, "max_position_embeddings": 131_072},
    "Hy3": {"model_type": "hy_v3", **_heads(8, 1), **_SEPARATE_HEAD, "num_experts": 16, "num_experts_per_tok": 8,
            "num_shared_experts": 1, "moe_intermediate_size": 32, "router_scaling_factor": 2.826,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "rope_theta": 10_000.0},
    "MiMo-V2-Flash": {"model_type": "mimo_v2_flash", **_heads(8, 1, 192), "v_head_dim": 128, **_FIVE_TO_ONE,
                      **_SEPARATE_HEAD, "sliding_window": _WINDOW, "n_routed_experts": 16, "num_experts_per_tok": 8,
                      "moe_intermediate_size": 32, "mlp_layer_types": ["dense", *["sparse"] * 5]},
    "GLM-4.7-Flash": {
        "model_type": "glm4_moe_lite",
        **_MLA,
        **_SEPARATE_HEAD,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.8,
        "rope_theta": 1_000_000,
    },
    "Solar-Open-100B": {
        "model_type": "solar_open",
        **_heads(8, 1),
        **_SEPARATE_HEAD,
        "n_routed_experts": 16,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
    },
    "Command-A-MoE": {
        "model_type": "cohere2_moe",
        **_heads(8, 2),
        **_THREE_TO_ONE,
        **_SEPARATE_HEAD,
        "sliding_window": _WINDOW,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "Gemma-4-26B-A4B-text": {
        "model_type": "gemma4_text",
        **_heads(2, 1, 256),
        **_FIVE_TO_ONE,
        **_SEPARATE_HEAD,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 4,
        "moe_intermediate_size": 32,
        "final_logit_softcapping": 30.0,
        "sliding_window": _WINDOW,
        "max_position_embeddings": 262_144,
    },
    "CWM-32B": {
        "model_type": "cwm",
        **_heads(6, 1),
        "hidden_size": 96,
        **_THREE_TO_ONE,
        **_SEPARATE_HEAD,
        "bos_token_id": 0,
        "eos_token_id": [],
        "sliding_window": _WINDOW,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {**_LLAMA3, "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
        "max_position_embeddings": 131_072,
    },
    # Models with recurrent layers.
    "Qwen3.5-0.8B": {
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "image_token_id": 315,
        "video_token_id": 316,
        "vision_start_token_id": 317,
        "vision_end_token_id": 318,
        "text_config": {
            "model_type": "qwen3_5_text",
            **_SMALL,
            **_heads(4, 1, 256),
            **_DELTA,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
        },
        "vision_config": _DEEP_TOWER,
    },
    "Qwen3.5-27B-text": {"model_type": "qwen3_5_text", **_heads(6, 1, 256), **_DELTA, "linear_num_key_heads": 2,
                         "linear_num_value_heads": 6},
    "Qwen3.5-35B-A3B-text": {"model_type": "qwen3_5_moe_text", **_heads(8, 1, 256), **_DELTA, **_DELTA_EXPERTS,
                             "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "Qwen3-Next-80B-A3B": {"model_type": "qwen3_next", **_heads(8, 1, 256), **_DELTA, **_DELTA_EXPERTS,
                           "rope_parameters": None, "rope_theta": 10_000_000, "partial_rotary_factor": 0.25,
                           "rope_scaling": None, "decoder_sparse_step": 1, "linear_num_key_heads": 2,
                           "linear_num_value_heads": 4},
    "Olmo-Hybrid-7B": {"model_type": "olmo_hybrid", "num_attention_heads": 3, "hidden_size": 384, **_DELTA_LAYERS,
                       **_SEPARATE_HEAD, "linear_num_key_heads": 3, "linear_num_value_heads": 3,
                       "linear_key_head_dim": 96, "linear_value_head_dim": 192, "linear_allow_neg_eigval": True,
                       "rope_parameters": None, "max_position_embeddings": 65_536, "initializer_range": 0.15},
    "Granite-4.0-h-350m": {"model_type": "granitemoehybrid", **_GRANITE, "num_local_experts": 0,
                           "num_experts_per_tok": 0, "shared_intermediate_size": 96, "rope_theta": 10_000},
    "Granite-4.0-h-tiny": {"model_type": "granitemoehybrid", **_GRANITE, "num_local_experts": 16,
                           "num_experts_per_tok": 6, "intermediate_size": 32, "shared_intermediate_size": 64},
    "Nemotron-3-Nano": {
        "model_type": "nemotron_h",
        **_heads(16, 1),
        **_SEPARATE_HEAD,
        "num_hidden_layers": 9,
        "hybrid_override_pattern": "MEMEM*EME",
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 4,
        "conv_kernel": 4,
        "mamba_ssm_cache_dtype": "float32",
        "mlp_hidden_act": "relu2",
        "n_routed_experts": 16,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 64,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "max_position_embeddings": 262_144,
        "initializer_range": 0.2,
    },
    "Bamba-9B": {"model_type": "bamba", "num_attention_heads": 4, "num_key_value_heads": 1, **_SSD,
                 "num_hidden_layers": 5, "attn_layer_indices": [2], "mamba_d_state": 128, "mamba_n_groups": 1,
                 "rope_theta": 10_000.0, "max_position_embeddings": 262_144},
    "Falcon-H1-0.5B": {
        "model_type": "falcon_h1",
        **_heads(4, 1, 64),
        **_SSD,
        "mamba_d_ssm": 192,
        "mamba_n_heads": 3,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_rms_norm": False,
        "embedding_multiplier": 5.656854249492381,
        "key_multiplier": 0.39062499999999994,
        "lm_head_multiplier": 0.0390625,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 0.9375,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.23570226039551587,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "mlp_multipliers": [0.8838834764831844, 0.5859375],
        "rope_theta": 100_000_000_000.0,
        "max_position_embeddings": 16_384,
    },
    "Zamba2-1.2B": {
        "model_type": "zamba2",
        "num_attention_heads": 2,
        **_SEPARATE_HEAD,
        "num_hidden_layers": 8,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 64,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "n_mamba_heads": 2,
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": True,
        "adapter_rank": 8,
        "use_mem_rope": True,
        "rope_theta": 10_000,
        "max_position_embeddings": 4096,
        "initializer_range": 0.12,
    },
    "Mamba-Codestral-7B": {"model_type": "mamba2", "num_heads": 8, "head_dim": 64, "hidden_size": 256, "expand": 2,
                           "state_size": 128, "n_groups": 8, "conv_kernel": 4, "chunk_size": 256, **_SEPARATE_HEAD,
                           "initializer_range": 0.15},
    "Kimi-Linear-48B-A3B": {
        "model_type": "kimi_linear",
        **_SEPARATE_HEAD,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 72,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3, 5],
            "head_dim": 128,
            "num_heads": 2,
            "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "rope_theta": 10_000.0,
        "routed_scaling_factor": 2.446,
        "topk_group": 1,
        "use_grouped_topk": True,
        "model_max_length": 1_048_576,
    },
    "Ling-3.0-Flash": {
        "model_type": "bailing_hybrid",
        **_SEPARATE_HEAD,
        "num_hidden_layers": 6,
        "layer_group_size": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "short_conv_kernel_size": 4,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "first_k_dense_replace": 2,
        "moe_intermediate_size": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_theta": 6_000_000,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 262_144,
    },
    "Mamba-2.8B": {"model_type": "mamba", "expand": 2, "intermediate_size": 128, "state_size": 16, "conv_kernel": 4,
                   "time_step_rank": 4, "use_bias": False, "use_conv_bias": True, "residual_in_fp32": True,
                   **_SEPARATE_HEAD},
    "Falcon-Mamba-7B": {"model_type": "falcon_mamba", "expand": 16, "intermediate_size": 128, "state_size": 16,
                        "conv_kernel": 4, "time_step_rank": 4, "use_bias": False, "use_conv_bias": True,
                        "residual_in_fp32": True, "mixer_rms_eps": 1e-6, **_SEPARATE_HEAD},
    "Jamba-1.5-Mini": {
        "model_type": "jamba",
        **_SEPARATE_HEAD,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "attn_layer_offset": 4,
        "attn_layer_period": 8,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_dt_rank": 4,
        "mamba_expand": 2,
        "mamba_proj_bias": False,
        "num_logits_to_keep": 1,
        "sliding_window": None,
        "use_mamba_kernels": True,
        "max_position_embeddings": 262_144,
        "initializer_range": 0.15,
    },
    "LFM2-350M": {"model_type": "lfm2", "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 128,
                  "num_hidden_layers": 8, "full_attn_idxs": [2, 5], "conv_L_cache": 3, "conv_bias": False,
                  "block_ff_dim": 96, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0,
                  "block_auto_adjust_ff_dim": True, "rope_theta": 1_000_000.0, **_SEPARATE_HEAD,
                  "max_position_embeddings": 128_000},
    "LFM3": {
        "model_type": "lfm3",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "hidden_size": 256,
        **_layers("conv", "conv", _FULL, "conv"),
        **_SEPARATE_HEAD,
        "initializer_range": 0.2,
    },
    "LFM2-8B-A1B": {"model_type": "lfm2_moe", "num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 256,
                    **_layers("conv", "conv", _FULL, "conv", "conv", "conv", _FULL, "conv"), "conv_L_cache": 3,
                    "num_dense_layers": 2, "num_experts": 16, "num_experts_per_tok": 4, "use_expert_bias": True,
                    "moe_intermediate_size": 32, "rope_theta": 1_000_000.0, **_SEPARATE_HEAD,
                    "initializer_range": 0.15, "max_position_embeddings": 128_000},
}  # fmt: skip
"""Configurations that are served, by the checkpoint's name."""

_MEDIA = "composite model|its media encoders are not supported"
_CROSS_ATTENTION = "composite model|its layers read images by cross-attention"
_LATER_TOKENS = "composite model|tokens of its prompts attend to later tokens"
_INDEXED = "it has layers of type indexed_attention"
_OTHER_RECURRENCE = "do not call transformers' causal convolution"
_STATE = "its layers keep a state of a kind that is not supported"
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "RWKV-4": ({"model_type": "rwkv"}, _STATE),
    "RecurrentGemma-2B": ({"model_type": "recurrent_gemma"}, _OTHER_RECURRENCE),
    "xLSTM-7B": ({"model_type": "xlstm"}, _STATE),
    "Zamba-7B": (
        {
            "model_type": "zamba",
            **_SMALL,
            "num_attention_heads": 4,
            "n_mamba_heads": 2,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        },
        r"layer 'model\.layers\.0\.mamba' \(ZambaMambaMixer\) called its convolution 1 times and its scan 2 times",
    ),
    "MiniMax-Text-01": (
        {"model_type": "minimax", **_layers(*[_LINEAR] * 3, _FULL)},
        _OTHER_RECURRENCE,
    ),
    "DeepSeek-V4-Flash": ({"model_type": "deepseek_v4"}, _STATE),
    "DeepSeek-V3.2": ({"model_type": "deepseek_v32"}, _INDEXED),
    "GLM-5": ({"model_type": "glm_moe_dsa"}, _INDEXED),
    "Qwen3.8-Flash-Next": ({"model_type": "qwen4_exp_text"}, _INDEXED),
    "T5-large": ({"model_type": "t5"}, "encoder-decoder"),
    "Whisper-large-v3": ({"model_type": "whisper"}, "encoder-decoder"),
    "Gemma-3n-E4B": ({"model_type": "gemma3n"}, _MEDIA),
    "Gemma-3n-E4B-text": ({"model_type": "gemma3n_text"}, "share the keys and values of other layers"),
    "Gemma-4-E4B-text": (
        {"model_type": "gemma4_text", "num_kv_shared_layers": 18, "num_hidden_layers": 42},
        "share the keys and values of other layers",
    ),
    "Llama-3.2-11B-Vision": ({"model_type": "mllama"}, _CROSS_ATTENTION),
    "PaliGemma-2-3B": ({"model_type": "paligemma"}, _LATER_TOKENS),
    "GLM-4.5V": ({"model_type": "glm4v_moe"}, _MEDIA),
    "Kimi-K2.5": ({"model_type": "kimi_k25"}, _MEDIA),
    "BLOOM-560m": ({"model_type": "bloom"}, "attention interface"),
    "DiffLlama-375M": (
        {"model_type": "diffllama", **_SMALL, "num_attention_heads": 4, "num_key_value_heads": 2},
        "in layer 'model.layers.0.self_attn', the module attends more than once",
    ),
    "Doge-160M": (
        {"model_type": "doge", **_SMALL, "num_attention_heads": 2, "num_key_value_heads": 1},
        "in layer 'model.layers.0.self_attn', the model builds its own attention mask",
    ),
    "ViT-base": ({"model_type": "vit"}, "transformers has no causal language model for it"),
    "Zaya-1B": ({"model_type": "zaya"}, _OTHER_RECURRENCE),
    "StableLM-2-1.6B": ({"model_type": "stablelm"}, "attention interface"),
}
"""Configurations that are refused, with a pattern of the reason, by the checkpoint's name."""


def config_of(settings: Mapping[str, Any]) -> Any:
    """Return the configuration that transformers reads from a config.json with ``settings``."""
    changed = dict(settings)
    return AutoConfig.for_model(changed.pop("model_type"), **changed)


def save_published_model(name: str, directory: Path) -> PreTrainedModel:
    """Write the checkpoint of a row of ``SERVED`` to ``directory``, and return transformers' model in float32."""
    torch.manual_seed(0)
    settings = SERVED[name]
    config = config_of(settings if "text_config" in settings else {**_SMALL, **settings})
    auto_class: Any = AutoModelForMultimodalLM if "text_config" in settings else AutoModelForCausalLM
    model = auto_class.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # transformers initializes sinks, biases and some routers with constants.
            if key.endswith("sinks"):
                parameter.normal_(0.0, 0.5)
            elif key.endswith("bias") or (parameter.dim() == 2 and not parameter.any()):
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(directory)
    if "vision_config" in settings:
        for file, content in _PROCESSORS.items():
            (directory / file).write_text(json.dumps(content))
    return cast("PreTrainedModel", model)


def save_published_config(name: str, directory: Path) -> None:
    """Write config.json of a row of ``REFUSED``, without weights, to ``directory``."""
    config = config_of(REFUSED[name][0])
    config.save_pretrained(directory)

"""Tiny checkpoints with random weights. The weights have a large variance, so that outputs vary."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

VOCAB_SIZE = 320
_DEMO_MODEL = Path(__file__).parents[3] / "examples" / "demo_model" / "penstock-tiny"
SLIDING_WINDOW = 12
CHUNK = 12

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.35,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_HEAD = {"head_dim": 16}
_WINDOW = {"sliding_window": SLIDING_WINDOW}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_MIXED = {"layer_types": [_SLIDING, _FULL], **_WINDOW}
_UNTIED = {"tie_word_embeddings": False}  # tied embeddings would mostly repeat the input token
_ALL_HEADS = {"num_key_value_heads": 4}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED_MOE = {
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
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    **_ALL_HEADS,
}
_GEMMA2 = {**_HEAD, **_WINDOW, **_UNTIED, "query_pre_attn_scalar": 16}
_GEMMA4 = {
    "model_type": "gemma4_text",
    **_HEAD,
    **_WINDOW,
    **_UNTIED,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 30.0,
}

_SHARED_KEYS = {
    **_HEAD,
    **_WINDOW,
    **_UNTIED,
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
    "final_logit_softcapping": 30.0,
}
"""Layers 3 and 4 read the keys and values of layers 2 and 1."""

_FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**_HEAD, **_MOE, **_MIXED, "num_dense_layers": 1},
    "apertus": {},
    "arcee": {**_HEAD},
    "axk1": {**_ROUTED_MOE, **_MLA},
    "cohere": {},
    "cohere2": {**_HEAD, **_MIXED},
    "deepseek_v2": {**_ROUTED_MOE, **_MLA},
    "deepseek_v3": {**_ROUTED_MOE, **_MLA},
    "dots1": {**_HEAD, **_ROUTED_MOE, **_MIXED},
    "ernie4_5": {**_HEAD},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    "exaone4": {**_HEAD, **_MIXED},
    "exaone_moe": {**_HEAD, **_MOE, **_MIXED},
    "flex_olmo": {**_MOE},
    "gemma": {**_HEAD},
    "gemma2": _GEMMA2,
    "gemma3": {**_GEMMA2, "model_type": "gemma3_text"},
    "gemma3n": {
        **_SHARED_KEYS,
        "model_type": "gemma3n_text",
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE - 16,
        "laurel_rank": 8,
        "altup_num_inputs": 3,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0, 0.0],
    },
    "gemma4_shared": {
        **_SHARED_KEYS,
        "model_type": "gemma4_text",
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "use_double_wide_mlp": True,
    },
    "gemma4": _GEMMA4,
    "gemma4_moe": {
        **_GEMMA4,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "glm": {**_HEAD},
    "glm4": {**_HEAD},
    "glm4_moe": {**_HEAD, **_ROUTED_MOE},
    "glm4_moe_lite": {**_ROUTED_MOE, **_MLA},
    "gpt2": _UNTIED,
    "gpt_bigcode": _UNTIED,
    "gpt_neox": {},
    "gpt_oss": {**_HEAD, **_WINDOW, **_LOCAL_MOE},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "granitemoe": {**_LOCAL_MOE},
    "granitemoeshared": {**_LOCAL_MOE, "shared_intermediate_size": 32},
    "helium": {"head_dim": 12},
    "hunyuan_v1_dense": {**_HEAD},
    "hunyuan_v1_moe": {**_HEAD, "num_experts": 4, "moe_topk": 2},
    "hyperclovax": {**_HEAD},
    "jais2": {},
    "jetmoe": {"num_local_experts": 4, "kv_channels": 12},
    "llama": {},
    "llama4_text": {
        **_HEAD,
        **_LOCAL_MOE,
        "intermediate_size_mlp": 64,
        "attention_chunk_size": CHUNK,
        "no_rope_layers": [1, 0],
        "interleave_moe_layer_step": 2,
        "attn_temperature_tuning": True,
        "floor_scale": 6,
        "attn_scale": 0.7,
    },
    "minicpm3": {**_MLA, **_UNTIED, "scale_emb": 1, "scale_depth": 1.4, "dim_model_base": 48},
    "minimax_m2": {**_HEAD, **_LOCAL_MOE},
    "ministral": {**_HEAD, **_MIXED},
    "ministral3": {
        **_HEAD,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "mistral": _WINDOW,
    "mixtral": {**_LOCAL_MOE},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _MIXED,
    "olmoe": _MOE,
    "opt": {**_UNTIED, "ffn_dim": 64, "word_embed_proj_dim": 48},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": _LOCAL_MOE,
    "qwen2": {},
    "qwen2_moe": {**_MOE, "shared_expert_intermediate_size": 32},
    "qwen3": {**_HEAD},
    "qwen3_moe": {**_HEAD, **_MOE},
    "seed_oss": {**_HEAD},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {**_WINDOW, **_UNTIED},
    "vaultgemma": {**_HEAD, **_MIXED, **_UNTIED},
}
_DELTA = {
    **_HEAD,
    **_UNTIED,
    "num_hidden_layers": 4,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
_DELTA_MOE = {**_DELTA, **_MOE, "shared_expert_intermediate_size": 32}
_MAMBA = {
    **_UNTIED,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
_CALM = {"initializer_range": 0.1}
"""With larger weights, rounding in a recurrence grows until logits differ by 1e-2 between orders of summation."""
_UNLIMITED = {"time_step_min": 1e-9}
"""transformers applies the minimum time step to prompts only, so its outputs would depend on where the prompt ends."""
_KDA = {
    **_UNTIED,
    **_MLA,
    "qk_rope_head_dim": 8,
    "q_lora_rank": None,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
}
_SELECTIVE = {**_UNTIED, "num_hidden_layers": 3, "state_size": 8, "expand": 2, "conv_kernel": 4, "time_step_rank": 6}
_CONV = {"hidden_size": 64, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], **_UNTIED}
_RECURRENT: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 96},
    "granitemoehybrid": {
        **_MAMBA,
        **_LOCAL_MOE,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 32,
    },
    "granitemoehybrid_dense": {
        **_MAMBA,
        "model_type": "granitemoehybrid",
        "hidden_size": 64,
        "mamba_d_head": 16,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 64,
        "num_local_experts": 0,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.5,
    },
    "bailing_hybrid": {
        **_KDA,
        **_HEAD,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "short_conv_kernel_size": 4,
    },
    "falcon_mamba": _SELECTIVE,
    "jamba": {
        **_MOE,
        **_UNTIED,
        "num_hidden_layers": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 6,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "kimi_linear": {**_KDA, "linear_num_heads": 4, "linear_head_dim": 12, "linear_conv_kernel_dim": 4},
    "lfm2": {**_CONV, "block_multiple_of": 32},
    "lfm2_moe": {**_CONV, **_MOE, "num_dense_layers": 1},
    "lfm3": _CONV,
    "mamba": {**_SELECTIVE, "initializer_range": 0.3},  # otherwise, states hardly change the logits
    "mamba2": {
        **_UNTIED,
        "num_heads": 8,
        "head_dim": 12,
        "state_size": 16,
        "n_groups": 2,
        "expand": 2,
        "chunk_size": 16,
    },
    "nemotron_h": {
        **_UNTIED,
        **_UNLIMITED,
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*M-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        **_HEAD,
    },
    "olmo_hybrid": _DELTA,
    "qwen3_5": {**_DELTA, "model_type": "qwen3_5_text"},
    "qwen3_5_moe": {**_DELTA_MOE, "model_type": "qwen3_5_moe_text"},
    "qwen3_next": _DELTA_MOE,
    "zamba2": {
        **_UNTIED,
        **_UNLIMITED,
        "num_hidden_layers": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "chunk_size": 16,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_mem_blocks": 1,
        "adapter_rank": 8,
    },
}
_LONG_MEMORY = ("bailing_hybrid", "falcon_mamba", "jamba", "kimi_linear", "mamba")
_TIME_STEPS = ("dt_bias", "dt_proj.bias")
"""Biases of time steps. With larger biases, states of ``_LONG_MEMORY`` would decay to nothing within a span."""
_SCALED = ("gemma4", "gemma4_moe", "gemma4_shared")
"""Model types with several norms and factors of the same size, which would be interchangeable if all were 1."""
WITHOUT_ATTENTION = ("falcon_mamba", "mamba", "mamba2")
"""Model types without attention layers."""
RECURRENT_ARCHITECTURES = tuple(_RECURRENT)
"""Model types whose layers have recurrent states, whose tokens the recurrent parity tests compare."""
ARCHITECTURES = tuple(_FAMILIES)
"""Model types for the parity tests. Most names are those of transformers."""


def class_name(architecture: str) -> str | None:
    """Return the name of the model class of one of ``ARCHITECTURES`` in transformers."""
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    found = classes.get(type(tiny_config(architecture)), None)
    return None if found is None else str(found.__name__)


def tiny_config(architecture: str, **changes: Any) -> PretrainedConfig:
    """Return the configuration of one of ``ARCHITECTURES`` or ``RECURRENT_ARCHITECTURES``, with ``changes``."""
    common = {**_COMMON, **_CALM} if architecture in _RECURRENT else _COMMON
    settings = {"model_type": architecture, **common, **(_FAMILIES | _RECURRENT)[architecture], **changes}
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def save_tiny_model(architecture: str, directory: Path, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Write a checkpoint to ``directory`` and return the model, in float32 with transformers' own attention."""
    torch.manual_seed(seed)
    config = tiny_config(architecture, **changes)
    make: Any = AutoModelForCausalLM.from_config
    model: PreTrainedModel = make(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # transformers initializes everything except linear layers with constants: sinks, biases, norms.
            if name.endswith("sinks"):
                parameter.normal_(0.0, 0.5)
            elif name.endswith(_TIME_STEPS) and architecture in _LONG_MEMORY:
                parameter.normal_(-3.0, 1.0)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
            elif architecture in _SCALED and parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            elif (
                parameter.dim() == 2 and not parameter.any()
            ):  # otherwise the router would send all tokens to the same experts
                parameter.normal_(0.0, config.initializer_range)
        for name, buffer in model.named_buffers():
            if architecture in _SCALED and name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.0)
    model.save_pretrained(directory)
    return model


def save_narrow_model(
    architecture: str, directory: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> PreTrainedModel:
    """Write a 16-bit checkpoint to ``directory``. Return its transformers model in float32."""
    model: Any = save_tiny_model(architecture, directory, **changes)
    model.to(dtype).save_pretrained(directory)
    made: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    narrow: PreTrainedModel = made.eval()
    return narrow


def save_speaking_model(architecture: str, directory: Path, **changes: Any) -> PreTrainedModel:
    """Write a checkpoint with the demo model's tokenizer and chat template to ``directory``, and return the model."""
    vocab_size = len(AutoTokenizer.from_pretrained(_DEMO_MODEL))
    sizes = {"vocab_size": vocab_size, "max_position_embeddings": 2048, "eos_token_id": 1}
    model = save_tiny_model(architecture, directory, **sizes, **changes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_DEMO_MODEL / name, directory)
    return model

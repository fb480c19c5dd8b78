"""Tiny checkpoints with random weights, drawn wide enough that their output varies."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB_SIZE = 320
SLIDING_WINDOW = 12

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
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Tied, their normed output would mostly repeat the input token.
_GEMMA2 = {"head_dim": 16, "sliding_window": SLIDING_WINDOW, "query_pre_attn_scalar": 16, "tie_word_embeddings": False}


def tiny_config(architecture: str) -> PretrainedConfig:
    """The configuration of one of ``ARCHITECTURES``."""
    return _CONFIGS[architecture]()


_CONFIGS = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "qwen2": lambda: Qwen2Config(**_COMMON),
    "qwen3": lambda: Qwen3Config(**_COMMON, head_dim=16),
    "mistral": lambda: MistralConfig(**_COMMON, sliding_window=SLIDING_WINDOW),
    "gemma": lambda: GemmaConfig(**_COMMON, head_dim=16),
    "phi3": lambda: Phi3Config(**_COMMON),
    "mixtral": lambda: MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_COMMON, **_MOE, head_dim=16),
    # Beyond the common eight: soft caps, mixed windows and attention sinks.
    "gemma2": lambda: Gemma2Config(**_COMMON, **_GEMMA2),
    "gemma3": lambda: Gemma3TextConfig(**_COMMON, **_GEMMA2),
    "gpt_oss": lambda: GptOssConfig(
        **_COMMON, head_dim=16, sliding_window=SLIDING_WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
}
ARCHITECTURES = tuple(_CONFIGS)


def save_tiny_model(architecture: str, directory: Path, *, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """Write a checkpoint to ``directory`` and return the model, in float32 with transformers' own attention.

    ``overrides``: fields of the configuration that are to be different.
    """
    torch.manual_seed(seed)
    config = tiny_config(architecture)
    for name, value in overrides.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # transformers zeroes or fills what is not a linear layer: sinks, biases, norms.
            if name.endswith(("sinks", "bias")):
                parameter.normal_(0.0, 0.5)
    model.save_pretrained(directory)
    return model

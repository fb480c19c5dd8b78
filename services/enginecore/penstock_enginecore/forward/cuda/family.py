"""How the classes of the families that the fused decoder knows are called and built."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """How the classes of a family are called and built. ``sandwich``: norms behind attention and MLP as well. ``merged``: one
    linear layer for queries, keys and values, and one for gate and up. ``multipliers``: Granite's, of inputs, of what is added,
    and of logits. ``extras``: parts of a layer that do nothing. ``gpt_oss``: attention with sinks, and experts with biases.
    ``latent``: attention over a latent (MLA), and DeepSeek's experts. ``deepseek_2``: as DeepSeek-V2 turns, and chooses experts.
    """

    prefix: str
    norm_offset: float = 0.0
    qk_norm: bool = False
    sandwich: bool = False
    merged: bool = False
    rotary_by_type: bool = False
    multipliers: bool = False
    embedding: str = "Embedding"
    extras: tuple[str, ...] = ()
    gpt_oss: bool = False
    latent: bool = False
    deepseek_2: bool = False


FAMILIES: Mapping[str, Family] = {
    "DeepseekV2ForCausalLM": Family("DeepseekV2", latent=True, deepseek_2=True),
    "DeepseekV3ForCausalLM": Family("DeepseekV3", latent=True),
    "Glm4MoeLiteForCausalLM": Family("Glm4MoeLite", latent=True),
    "GemmaForCausalLM": Family("Gemma", norm_offset=1.0, embedding="GemmaTextScaledWordEmbedding"),
    "GptOssForCausalLM": Family("GptOss", gpt_oss=True),
    "GraniteForCausalLM": Family("Granite", multipliers=True),
    "LlamaForCausalLM": Family("Llama"),
    "MinistralForCausalLM": Family("Ministral"),
    "MistralForCausalLM": Family("Mistral"),
    "Qwen2ForCausalLM": Family("Qwen2"),
    "Qwen3ForCausalLM": Family("Qwen3", qk_norm=True),
    "Gemma2ForCausalLM": Family("Gemma2", norm_offset=1.0, sandwich=True, embedding="Gemma2TextScaledWordEmbedding"),
    "Gemma3ForCausalLM": Family(
        "Gemma3",
        norm_offset=1.0,
        qk_norm=True,
        sandwich=True,
        rotary_by_type=True,
        embedding="Gemma3TextScaledWordEmbedding",
    ),
    "MixtralForCausalLM": Family("Mixtral"),
    "Qwen3MoeForCausalLM": Family("Qwen3Moe", qk_norm=True),
    "SeedOssForCausalLM": Family("SeedOss"),
    "Phi3ForCausalLM": Family("Phi3", merged=True, extras=("resid_attn_dropout", "resid_mlp_dropout")),
}
"""By the name of the class that generates."""

"""Known classes of decoder models, with the properties that their modules do not show. Add new classes here.

``decoder_plan.py`` reads all other properties from the modules. CPU and GPU decoders, draft heads, adapters and tensor
parallelism use both sources.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a model class that its modules do not show.

    Attributes:
        norm_offset: Number that is added to the weights of norms.
        half_turns: Whether the rotary embedding returns elements for one half of a head, which apply to both halves.
        sections: Whether each token has three rotary positions: time, height and width.
        deepseek_v2: Whether rotary embedding and routing work as in DeepSeek-V2.
        splits: Tensor parallelism plan in transformers' format, for model classes that have no plan in transformers.
    """

    norm_offset: float = 0.0
    half_turns: bool = False
    sections: bool = False
    deepseek_v2: bool = False
    splits: Mapping[str, str] | None = None


_PLAIN = Family()
_GEMMA = Family(norm_offset=1.0)
_SPLIT_ATTENTION = {
    **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "model.layers.*.self_attn.o_proj": "rowwise",
}
FAMILIES: Mapping[str, Family] = {
    "ArceeForCausalLM": _PLAIN,
    "DeepseekV2ForCausalLM": Family(deepseek_v2=True),
    "DeepseekV3ForCausalLM": _PLAIN,
    "Dots1ForCausalLM": _PLAIN,
    "Exaone4ForCausalLM": _PLAIN,
    "ExaoneMoeForCausalLM": _PLAIN,
    "FlexOlmoForCausalLM": _PLAIN,
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "GemmaForCausalLM": _GEMMA,
    "Glm4MoeForCausalLM": _PLAIN,
    "Glm4MoeLiteForCausalLM": _PLAIN,
    "GptOssForCausalLM": Family(
        half_turns=True,
        splits={
            "model.embed_tokens": "embedding_rowwise",
            "lm_head": "colwise_gather_output",
            **_SPLIT_ATTENTION,
            "model.layers.*.self_attn.sinks": "rowwise",
            # In the experts' weights, the first dimension is the inputs, and columns of gate and up alternate.
            "model.layers.*.mlp.experts.gate_up_proj": "rowwise",
            "model.layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
            "model.layers.*.mlp.experts.down_proj": "colwise",
            "model.layers.*.mlp.experts.down_proj_bias": "first_rank",
            "model.layers.*.mlp.experts": "moe_tp_experts",
        },
    ),
    "GraniteForCausalLM": _PLAIN,
    "HyperCLOVAXForCausalLM": _PLAIN,
    "LlamaForCausalLM": _PLAIN,
    "MiniMaxM2ForCausalLM": _PLAIN,
    "MinistralForCausalLM": _PLAIN,
    "MistralForCausalLM": _PLAIN,
    "MixtralForCausalLM": _PLAIN,
    "Olmo2ForCausalLM": _PLAIN,
    "Olmo3ForCausalLM": _PLAIN,
    "OlmoeForCausalLM": _PLAIN,
    "Phi3ForCausalLM": _PLAIN,
    "Qwen2ForCausalLM": _PLAIN,
    "Qwen2MoeForCausalLM": _PLAIN,
    "Qwen2VLForCausalLM": Family(sections=True),
    "Qwen2_5_VLForCausalLM": Family(sections=True),
    "Qwen3ForCausalLM": _PLAIN,
    "Qwen3MoeForCausalLM": _PLAIN,
    "Qwen3VLForCausalLM": Family(
        sections=True,
        splits={
            "lm_head": "colwise_gather_output",
            **_SPLIT_ATTENTION,
            **{f"model.layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
            "model.layers.*.mlp.down_proj": "rowwise",
        },
    ),
    "Qwen3VLMoeForCausalLM": Family(sections=True),
    "SeedOssForCausalLM": _PLAIN,
    "SmolLM3ForCausalLM": _PLAIN,
    "VaultGemmaForCausalLM": _GEMMA,
}
"""Properties by class name of the causal language model."""
_ALWAYS_NORMALIZE = frozenset({"MixtralTopKRouter", "Qwen3VLMoeTextTopKRouter"})
SOFTMAX_ROUTERS = _ALWAYS_NORMALIZE | {
    "FlexOlmoTopKRouter",
    "OlmoeTopKRouter",
    "Qwen2MoeTopKRouter",
    "Qwen3MoeTopKRouter",
}
"""Names of router classes that choose the experts with the largest values of a softmax over all experts."""


def is_known(module: torch.nn.Module) -> bool:
    """Return whether a model's class is in ``FAMILIES``."""
    return type(module).__name__ in FAMILIES


def sums_to_one(router: Any) -> bool:
    """Return whether a router scales the weights of a token's experts so that their sum is 1."""
    return type(router).__name__ in _ALWAYS_NORMALIZE or bool(router.norm_topk_prob)

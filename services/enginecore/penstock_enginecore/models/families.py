"""Known classes of decoder models, with the properties that their modules do not show. Add new classes here.

``decoder_plan.py`` reads all other properties from the modules. CPU and GPU decoders, draft heads, adapters and tensor
parallelism use both sources.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Turned = Literal["halves", "half", "pairs"]
Factor = Literal["inputs", "attention", "mlp", "residual", "logits"]


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a model class that its modules do not show.

    Attributes:
        norm_offset: Number that is added to the weights of norms.
        norm_eps: Epsilon of norms whose modules do not show it.
        norms_rotated: Whether norms of queries and keys are applied after the rotation.
        pairs: Whether the rotary embedding rotates neighbouring elements together, and not an element of the first half
            of a head with an element of the second half.
        turned: Elements for which the rotary embedding returns cosines and sines: ``halves`` for both halves of a head,
            ``half`` for one half, ``pairs`` for each element of neighbouring pairs.
        only_windows_rotate: Whether only layers with a sliding window rotate queries and keys.
        scales_queries: Whether the rotary parameters scale queries by position, as in Ministral 3.
        parallel: Whether attention and MLP of a layer have the same input.
        factors: Names of factors in the configuration. ``inputs`` multiplies the inputs of the first layer,
            ``attention`` and ``mlp`` these outputs before the additions, ``residual`` both, and ``logits`` the logits.
            Factors with the names of Granite are always used.
        sections: Whether each token has three rotary positions: time, height and width.
        deepseek_v2: Whether rotary embedding and routing work as in DeepSeek-V2.
        splits: Tensor parallelism plan in transformers' format, for model classes that have no plan in transformers.
    """

    norm_offset: float = 0.0
    norm_eps: float | None = None
    norms_rotated: bool = False
    pairs: bool = False
    turned: Turned = "halves"
    only_windows_rotate: bool = False
    scales_queries: bool = False
    parallel: bool = False
    factors: Mapping[Factor, str] = field(default_factory=dict)
    sections: bool = False
    deepseek_v2: bool = False
    splits: Mapping[str, str] | None = None


_PLAIN = Family()
_GEMMA = Family(norm_offset=1.0)
_PAIRS = Family(pairs=True)
_SPLIT_ATTENTION = {
    **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "model.layers.*.self_attn.o_proj": "rowwise",
}
FAMILIES: Mapping[str, Family] = {
    "ArceeForCausalLM": _PLAIN,
    "Cohere2ForCausalLM": Family(
        pairs=True, turned="pairs", parallel=True, only_windows_rotate=True, factors={"logits": "logit_scale"}
    ),
    "CohereForCausalLM": Family(pairs=True, turned="pairs", parallel=True, factors={"logits": "logit_scale"}),
    "DeepseekV2ForCausalLM": Family(deepseek_v2=True),
    "DeepseekV3ForCausalLM": _PLAIN,
    "Dots1ForCausalLM": _PLAIN,
    "Ernie4_5ForCausalLM": _PAIRS,
    "Exaone4ForCausalLM": _PLAIN,
    "ExaoneMoeForCausalLM": _PLAIN,
    "FlexOlmoForCausalLM": _PLAIN,
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "Gemma4ForCausalLM": _PLAIN,
    "Gemma4UnifiedForCausalLM": _PLAIN,
    "GemmaForCausalLM": _GEMMA,
    "Glm4ForCausalLM": _PAIRS,
    "Glm4MoeForCausalLM": _PLAIN,
    "Glm4MoeLiteForCausalLM": _PLAIN,
    "GlmForCausalLM": _PAIRS,
    "GPTNeoXForCausalLM": _PLAIN,
    "GptOssForCausalLM": Family(
        turned="half",
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
    "HeliumForCausalLM": _PAIRS,
    "HunYuanDenseV1ForCausalLM": Family(norms_rotated=True),
    "HyperCLOVAXForCausalLM": _PLAIN,
    "Jais2ForCausalLM": _PLAIN,
    "Llama4ForCausalLM": Family(pairs=True, turned="half", norms_rotated=True),
    "LlamaForCausalLM": _PLAIN,
    "MiniMaxM2ForCausalLM": _PLAIN,
    "Ministral3ForCausalLM": Family(scales_queries=True),
    "MinistralForCausalLM": _PLAIN,
    "MistralForCausalLM": _PLAIN,
    "MixtralForCausalLM": _PLAIN,
    "NemotronForCausalLM": Family(norm_offset=1.0),
    "Olmo2ForCausalLM": _PLAIN,
    "Olmo3ForCausalLM": _PLAIN,
    "OlmoForCausalLM": Family(norm_eps=1e-5),
    "OlmoeForCausalLM": _PLAIN,
    "Phi3ForCausalLM": _PLAIN,
    "PhiForCausalLM": Family(parallel=True),
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
    "Starcoder2ForCausalLM": _PLAIN,
    "VaultGemmaForCausalLM": _GEMMA,
}
"""Properties by class name of the causal language model."""
CLAMPED_ROUTER = "GptOssTopKRouter"
"""Name of the router class of gpt-oss, whose weights are a softmax over only the chosen experts. A softmax over all experts,
scaled so that the sum over the chosen experts is 1, gives the same weights.
"""
CORRECTED_ROUTER = "MiniMaxM2TopKRouter"
"""Name of the router class of MiniMax-M2, which adds a correction of its mixture to the logistic function of the logits."""
_ALWAYS_NORMALIZE = frozenset({CLAMPED_ROUTER, "MixtralTopKRouter", "Qwen3VLMoeTextTopKRouter", "Qwen3_5MoeTopKRouter"})
SOFTMAX_ROUTERS = (_ALWAYS_NORMALIZE - {CLAMPED_ROUTER}) | {
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
    kind = type(router).__name__
    return kind in _ALWAYS_NORMALIZE or kind == CORRECTED_ROUTER or bool(router.norm_topk_prob)

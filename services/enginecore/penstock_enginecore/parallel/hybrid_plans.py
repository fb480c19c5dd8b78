"""Tensor parallelism plans for classes of models with recurrent layers, in transformers' format. Add new classes here.

transformers has no plan or an incomplete plan for these classes. The plans do not contain the recurrent layers, because
``mixers`` splits these layers by heads.
"""

from collections.abc import Mapping

_WORDS = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}


def _attention(name: str, output: str = "o_proj") -> dict[str, str]:
    return {**{f"{name}.{each}_proj": "colwise" for each in "qkv"}, f"{name}.{output}": "rowwise"}


def _gated(name: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> dict[str, str]:
    return {f"{name}.{gate}": "colwise", f"{name}.{up}": "colwise", f"{name}.{down}": "rowwise"}


def _experts(name: str) -> dict[str, str]:
    return {f"{name}.gate_up_proj": "packed_colwise", f"{name}.down_proj": "rowwise", name: "moe_tp_experts"}


_BAMBA = {**_WORDS, **_attention("model.layers.*.self_attn"), **_gated("model.layers.*.feed_forward")}
_LFM2 = {
    **_WORDS,
    **_attention("model.layers.*.self_attn", "out_proj"),
    **_gated("model.layers.*.feed_forward", "w1", "w3", "w2"),
}
_KIMI = {
    **_WORDS,
    **dict.fromkeys((f"model.layers.*.self_attn.{each}_proj" for each in ("q", "q_b", "kv_b")), "colwise"),
    "model.layers.*.self_attn.o_proj": "rowwise",
    **_gated("model.layers.*.mlp"),
    **_gated("model.layers.*.mlp.shared_experts"),
    **_experts("model.layers.*.mlp.experts"),
}
_MAMBA = {"backbone.embeddings": "embedding_rowwise", "lm_head": "colwise_gather_output"}
_ADAPTERS = "model.layers.*.shared_transformer.self_attn.linear_{}_adapter_list.*.1"
HYBRID_PLANS: Mapping[str, Mapping[str, str]] = {
    "BailingHybridForCausalLM": {**_KIMI, "model.layers.*.self_attn.g_proj": "colwise"},
    "BambaForCausalLM": _BAMBA,
    "FalconH1ForCausalLM": _BAMBA,
    "FalconMambaForCausalLM": _MAMBA,
    "GraniteMoeHybridForCausalLM": {
        **_WORDS,
        **_attention("model.layers.*.self_attn"),
        **_experts("model.layers.*.block_sparse_moe.experts"),
        "model.layers.*.shared_mlp.input_linear": "packed_colwise",
        "model.layers.*.shared_mlp.output_linear": "rowwise",
    },
    "JambaForCausalLM": {**_BAMBA, **_experts("model.layers.*.feed_forward.experts")},
    "KimiLinearForCausalLM": _KIMI,
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": {**_LFM2, **_experts("model.layers.*.feed_forward.experts")},
    "Lfm3ForCausalLM": {
        **_WORDS,
        **_attention("model.layers.*.self_attn"),
        "model.layers.*.self_attn.g_proj": "colwise",
        **_gated("model.layers.*.feed_forward", "w1", "w3", "w2"),
    },
    "Mamba2ForCausalLM": _MAMBA,
    "MambaForCausalLM": _MAMBA,
    "NemotronHForCausalLM": {
        "model.embeddings": "embedding_rowwise",
        "lm_head": "colwise_gather_output",
        **_attention("model.layers.*.mixer"),
        "model.layers.*.mixer.up_proj": "colwise",
        "model.layers.*.mixer.down_proj": "rowwise",
        "model.layers.*.mixer.shared_experts.up_proj": "colwise",
        "model.layers.*.mixer.shared_experts.down_proj": "rowwise",
        "model.layers.*.mixer.experts.up_proj": "colwise",
        "model.layers.*.mixer.experts.down_proj": "rowwise",
        "model.layers.*.mixer.experts": "moe_tp_experts",
    },
    "Zamba2ForCausalLM": {
        **_WORDS,
        **_attention("model.layers.*.shared_transformer.self_attn"),
        **{_ADAPTERS.format(each): "colwise" for each in "qkv"},
        "model.layers.*.shared_transformer.feed_forward.gate_up_proj": "packed_colwise",
        "model.layers.*.shared_transformer.feed_forward.gate_up_proj_adapter_list.*.1": "packed_colwise",
        "model.layers.*.shared_transformer.feed_forward.down_proj": "rowwise",
    },
}
"""Plans by the class name of the causal language model. The plans of transformers for these classes are not used."""

"""Reads a plan of models with latent attention (MLA): DeepSeek's, and those of the same classes."""

from typing import Any

from penstock_enginecore.forward.cuda.plans import (
    ExpertsPlan,
    GroupedRouting,
    LatentPlan,
    MLPPlan,
)
from penstock_enginecore.forward.cuda.reader import Reader
from penstock_enginecore.forward.proof import UnsuitableError
from penstock_enginecore.models.attention_hook import AttentionCall
from penstock_enginecore.models.rope import query_scale


class LatentReader(Reader):
    """Their layers attend over a latent, and have experts in groups beside shared ones, or an MLP."""

    def attention(self, attention: Any, call: AttentionCall, rotary: int) -> LatentPlan:
        """UnsuitableError for what it does besides."""
        low = attention.q_lora_rank is not None
        queries = ("q_a_proj", "q_a_layernorm", "q_b_proj") if low else ("q_proj",)
        parts = (*queries, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
        self.expect(attention, f"{self.family.prefix}Attention", parts)
        name, params = self.names[attention], call.params
        if query_scale(attention) is not None:
            raise UnsuitableError(f"{name} scales queries by position")
        if (params.sliding_window, params.attention_chunk, params.softcap, params.sinks) != (None,) * 4:
            raise UnsuitableError(f"{name} attends over its latent with a window, a soft cap or sinks")
        (_, num_heads, size), size_v = call.query.shape, call.value.shape[2]
        return LatentPlan(
            down=(
                self.linear(attention.q_a_proj if low else attention.q_proj),
                self.linear(attention.kv_a_proj_with_mqa),
            ),
            up=self.linear(attention.q_b_proj) if low else None,
            expansion=self.linear(attention.kv_b_proj),
            output=self.linear(attention.o_proj),
            norms=(self.norm(attention.q_a_layernorm) if low else None, self.norm(attention.kv_a_layernorm)),
            num_heads=num_heads,
            latent=int(attention.kv_lora_rank),
            rotary_size=int(attention.qk_rope_head_dim),
            plain_size=size - int(attention.qk_rope_head_dim),
            value_size=size_v,
            interleaved=self.family.deepseek_2 or bool(attention.config.rope_interleave),
            rotary=rotary,
            params=params,
        )

    def mlp_or_experts(self, mlp: Any) -> MLPPlan | ExpertsPlan:
        """The first layers have an MLP."""
        prefix = self.family.prefix
        kind = f"{prefix}Moe" if self.family.deepseek_2 else f"{prefix}MoE"
        if type(mlp).__name__ != kind:
            return self.mlp(mlp)
        self.expect(mlp, kind, ("gate", "experts", "shared_experts"))
        gate = mlp.gate
        self.expect(gate, f"{prefix}TopkRouter", (), ("weight",))
        experts, gate_up, down = self.experts(mlp.experts, ("act_fn",), ("gate_up_proj", "down_proj"))
        return ExpertsPlan(
            router=gate.weight,
            gate_up=gate_up,
            down=down,
            top_k=int(gate.top_k),
            renormalize=not self.family.deepseek_2 and bool(gate.norm_topk_prob),
            activation=self.activation(experts, "act_fn"),
            grouped=self._routing(gate),
            shared=self.mlp(mlp.shared_experts),
        )

    def _routing(self, gate: Any) -> GroupedRouting:
        groups, kept, scale = gate.num_group, gate.topk_group, float(gate.routed_scaling_factor)
        if not self.family.deepseek_2:
            return GroupedRouting(lambda: gate.e_score_correction_bias, int(groups), int(kept), scale)
        if gate.topk_method not in ("greedy", "group_limited_greedy"):
            raise UnsuitableError(f"{self.names[gate]} chooses experts by {gate.topk_method!r}")
        if gate.topk_method == "greedy":
            groups = kept = 1
        return GroupedRouting(None, int(groups), int(kept), scale)

"""Reads a plan of a model's layers from transformers' own loaded modules, by the model's family.

A plan says where norms stand and what is added to their weights, which linear layers are one product, how a layer turns and
attends. What a layer asks of attention (scale, window, soft cap) is taken from the call that it made. A module that is not
known by its class, its parts or its parameters is refused by its name: nothing is guessed, and what is read wrongly is found
by the proof.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock_enginecore.forward.cuda.kernel_api import Activation, Norm
from penstock_enginecore.forward.cuda.linear import Linear
from penstock_enginecore.forward.cuda.plans import (
    AttentionPlan,
    ClampedGate,
    ExpertsPlan,
    ExpertsWeight,
    GroupedRouting,
    LatentPlan,
    LayerPlan,
    MLPPlan,
    ModelPlan,
)
from penstock_enginecore.forward.modules import ProbedModel
from penstock_enginecore.forward.proof import UnsuitableError
from penstock_enginecore.models.attention_hook import AttentionCall
from penstock_enginecore.models.quantization.layers import DOWN, GATE_UP, QuantizedExperts, QuantizedLinear
from penstock_enginecore.models.rope import query_scale

# How the classes of the families that the fused decoder knows are called and built.


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


_ACTIVATIONS: Mapping[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
}
"""By the class of transformers' module."""


class Reader:
    """Reads modules of one family, whose names it knows."""

    def __init__(self, family: Family, module: Any) -> None:
        self.family = family
        self.module = module
        self.names = {part: name for name, part in module.named_modules()}

    def model(self, calls: Sequence[AttentionCall]) -> ModelPlan:
        """Of a model that made these ``calls``. UnsuitableError as of all here, with the name of what is not known."""
        module, base = self.module, self.module.model
        self.expect(module, f"{self.family.prefix}ForCausalLM", ("model", "lm_head"))
        self.expect(base, None, ("embed_tokens", "layers", "norm", "rotary_emb"))
        if [call.module for call in calls] != [layer.self_attn for layer in base.layers]:
            raise UnsuitableError("its layers are not called one after the other")
        self.expect(base.rotary_emb, f"{self.family.prefix}RotaryEmbedding", ())
        kinds = self._rotary_kinds(base)
        variants = sorted(set(kinds))
        return ModelPlan(
            embedding=base.embed_tokens.weight,
            embedding_scale=self._embedding_scale(base.embed_tokens),
            input_scale=float(base.embedding_multiplier) if self.family.multipliers else 1.0,
            layers=tuple(
                self._layer(layer, call, variants.index(kind))
                for layer, call, kind in zip(base.layers, calls, kinds, strict=True)
            ),
            norm=self.norm(base.norm),
            head=self.linear(module.lm_head),
            logits_divisor=float(module.config.logits_scaling) if self.family.multipliers else 1.0,
            logits_softcap=getattr(module.config, "final_logit_softcapping", None),
            rotary=base.rotary_emb,
            rotary_variants=tuple(variants),
            rotary_twice=not self.family.gpt_oss,
        )

    def _rotary_kinds(self, base: Any) -> list[tuple[str, ...]]:
        """What the rotary module is told for each layer."""
        if not self.family.rotary_by_type:
            return [()] * len(base.layers)
        return [(layer.self_attn.layer_type,) for layer in base.layers]

    def _layer(self, layer: Any, call: AttentionCall, rotary: int) -> LayerPlan:
        before = ["input_layernorm", "post_attention_layernorm"]
        after: list[str] = []
        if self.family.sandwich:
            before = ["input_layernorm", "pre_feedforward_layernorm"]
            after = ["post_attention_layernorm", "post_feedforward_layernorm"]
        parts = ("self_attn", "mlp", *before, *after, *self.family.extras)
        self.expect(layer, f"{self.family.prefix}DecoderLayer", parts)
        return LayerPlan(
            name=self.names[layer],
            module=layer,
            attention=self.attention(layer.self_attn, call, rotary),
            mlp=self.mlp_or_experts(layer.mlp),
            norms_before=self._norm_pair(layer, before),
            norms_after=self._norm_pair(layer, after) if after else None,
            residual_scale=float(layer.residual_multiplier) if self.family.multipliers else 1.0,
        )

    def attention(self, attention: Any, call: AttentionCall, rotary: int) -> AttentionPlan | LatentPlan:
        """Of a layer's attention, which made ``call``."""
        projections = ("qkv_proj",) if self.family.merged else ("q_proj", "k_proj", "v_proj")
        norms = ("q_norm", "k_norm") if self.family.qk_norm else ()
        own = ("sinks",) if self.family.gpt_oss else ()
        self.expect(attention, f"{self.family.prefix}Attention", (*projections, "o_proj", *norms), own)
        if query_scale(attention) is not None:
            raise UnsuitableError(f"{self.names[attention]} scales queries by position")
        (_, num_heads, head_size), num_kv_heads = call.query.shape, call.key.shape[1]
        if call.value.shape[1:] != (num_kv_heads, head_size):
            raise UnsuitableError(f"in {self.names[attention]}, values are not of the size of keys")
        return AttentionPlan(
            qkv=tuple(self.linear(getattr(attention, name)) for name in projections),
            output=self.linear(attention.o_proj),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            norms=self._norm_pair(attention, norms) if norms else None,
            rotary=rotary,
            params=call.params,
        )

    def mlp_or_experts(self, mlp: Any) -> MLPPlan | ExpertsPlan:
        """A layer has experts if its module is called so; families with experts have layers of both kinds."""
        if self.family.gpt_oss:
            return self._gpt_oss_experts(mlp)
        if type(mlp).__name__ != f"{self.family.prefix}SparseMoeBlock":
            return self.mlp(mlp)
        self.expect(mlp, f"{self.family.prefix}SparseMoeBlock", ("gate", "experts"))
        self.expect(mlp.gate, f"{self.family.prefix}TopKRouter", (), ("weight",))
        experts, gate_up, down = self.experts(mlp.experts, ("act_fn",), (GATE_UP, DOWN))
        return ExpertsPlan(
            router=mlp.gate.weight,
            gate_up=gate_up,
            down=down,
            top_k=int(mlp.gate.top_k),
            renormalize=bool(getattr(mlp.gate, "norm_topk_prob", True)),
            activation=self.activation(experts, "act_fn"),
        )

    def _gpt_oss_experts(self, mlp: Any) -> ExpertsPlan:
        self.expect(mlp, "GptOssMLP", ("router", "experts"))
        router = mlp.router
        self.expect(router, "GptOssTopKRouter", (), ("weight", "bias"))
        biases = ("gate_up_proj_bias", "down_proj_bias")
        experts, gate_up, down = self.experts(mlp.experts, (), (GATE_UP, DOWN, *biases))
        return ExpertsPlan(
            router=router.weight,
            gate_up=gate_up,
            down=down,
            top_k=int(router.top_k),
            renormalize=True,  # what the softmax of the chosen ones alone is
            activation=ClampedGate(float(experts.alpha), float(experts.limit)),
            biases=(router.bias, experts.gate_up_proj_bias, experts.down_proj_bias),
        )

    def experts(
        self, experts: Any, parts: Sequence[str], parameters: Sequence[str]
    ) -> tuple[Any, ExpertsWeight, ExpertsWeight]:
        """The model's own module of experts, and its two weights."""
        quantized = type(experts) is QuantizedExperts
        own = experts.experts if quantized else experts
        self.expect(own, f"{self.family.prefix}Experts", parts, parameters)
        return (own, experts.gate_up, experts.down) if quantized else (own, own.gate_up_proj, own.down_proj)

    def mlp(self, mlp: Any) -> MLPPlan:
        """Of a gated one."""
        act = "activation_fn" if self.family.merged else "act_fn"
        projections = ("gate_up_proj",) if self.family.merged else ("gate_proj", "up_proj")
        self.expect(mlp, f"{self.family.prefix}MLP", (*projections, "down_proj", act))
        gate_up = tuple(self.linear(getattr(mlp, name)) for name in projections)
        return MLPPlan(gate_up, self.linear(mlp.down_proj), self.activation(mlp, act))

    def activation(self, module: Any, name: str) -> Activation:
        """Of the part of ``module`` that is called ``name``."""
        kind = type(getattr(module, name)).__name__
        if kind not in _ACTIVATIONS:
            raise UnsuitableError(f"the activation of {self.names[module]} is {kind}")
        return _ACTIVATIONS[kind]

    def _norm_pair(self, module: Any, names: Sequence[str]) -> tuple[Norm, Norm]:
        first, second = (self.norm(getattr(module, name)) for name in names)
        return first, second

    def norm(self, norm: Any) -> Norm:
        """With its offset."""
        self.expect(norm, f"{self.family.prefix}RMSNorm", (), ("weight",))
        eps = norm.eps if self.family.norm_offset else norm.variance_epsilon
        return Norm(norm.weight, float(eps), self.family.norm_offset)

    def linear(self, linear: Any) -> Linear:
        """As it is, quantized or not."""
        if type(linear) is QuantizedLinear:
            return linear
        self.expect(linear, "Linear", (), ("weight", "bias"), of_torch=True)
        found: torch.nn.Linear = linear
        return found

    def _embedding_scale(self, embedding: Any) -> float:
        """In the precision that the module multiplies in."""
        plain = self.family.embedding == "Embedding"
        self.expect(embedding, self.family.embedding, (), ("weight",), of_torch=plain)
        return 1.0 if plain else float(embedding.embed_scale.to(embedding.weight.dtype))

    def expect(
        self,
        module: torch.nn.Module,
        kind: str | None,
        parts: Iterable[str],
        parameters: Iterable[str] = (),
        *,
        of_torch: bool = False,
    ) -> None:
        """Refuse ``module`` unless it is transformers' (or torch's) class ``kind`` of these ``parts`` and ``parameters``."""
        name = self.names[module] or "the model"
        found = type(module)
        room = "torch.nn." if of_torch else "transformers."
        if (kind is not None and found.__name__ != kind) or not found.__module__.startswith(room):
            raise UnsuitableError(
                f"{name} is a {found.__module__}.{found.__name__}, not a {kind} of {room.rstrip('.')}"
            )
        children = {child for child, _ in module.named_children()}
        if odd := children.symmetric_difference(parts):
            raise UnsuitableError(f"{name} has other parts than are known: {', '.join(sorted(odd))}")
        own = {parameter for parameter, _ in module.named_parameters(recurse=False)}
        if odd := own.difference(parameters):
            raise UnsuitableError(f"{name} has parameters that are not known: {', '.join(sorted(odd))}")


# Reads a plan of models with latent attention (MLA): DeepSeek's, and those of the same classes.


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


def plan_model(probed: ProbedModel) -> ModelPlan:
    """The plan of a loaded model. UnsuitableError with the name of what is not known of it."""
    module: Any = probed.model.module
    family = FAMILIES.get(type(module).__name__)
    if family is None:
        raise UnsuitableError(f"{type(module).__name__} is not one of {', '.join(sorted(FAMILIES))}")
    reader = LatentReader if family.latent else Reader
    return reader(family, module).model(probed.calls)

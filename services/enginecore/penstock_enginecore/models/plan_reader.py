"""Reader of a model's plan from transformers' loaded modules.

The reader inspects the submodules and parameters of modules. ``families.py`` has the properties that modules do not
show. Attention parameters (scale, window, soft cap) come from the call that the layer made. The reader never guesses:
its error names each unknown part. When a decoder is built, its results are compared with those of the model's own
modules, which detects any remaining mistakes.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock_enginecore.models.attention_hook import AttentionCall
from penstock_enginecore.models.decoder_plan import (
    UNROTATED,
    Activation,
    AttentionPlan,
    BesidePlan,
    ClampedGate,
    ExpertsPlan,
    ExpertsWeight,
    GroupedRouting,
    LatentPlan,
    LayerEmbeddingPlan,
    LayerInputsPlan,
    LayerPlan,
    Linear,
    MLPPlan,
    ModelPlan,
    Norm,
    OtherMixture,
    present,
)
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.families import (
    CORRECTED_ROUTER,
    FAMILIES,
    SOFTMAX_ROUTERS,
    Factor,
    Family,
    is_known,
    sums_to_one,
)
from penstock_enginecore.models.latent_hook import LatentHeads
from penstock_enginecore.models.layer_embeddings import has_layer_embeddings, id_of_media
from penstock_enginecore.models.part_names import (
    ATTENTIONS,
    BASES,
    EMBEDDINGS,
    FINAL_NORMS,
    MLPS,
    attention_of,
    base_of,
    mlp_part,
    named_part,
    own_layers,
)
from penstock_enginecore.models.quantization.layers import (
    DOWN,
    GATE_UP,
    QuantizedExperts,
    QuantizedLinear,
)
from penstock_enginecore.models.rope import query_scale, rotary_query_scale
from penstock_enginecore.models.sharing import donor_calls

ACTIVATION_NAMES: Mapping[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}
"""Activations by the class name of the activation module in transformers."""
_ACTIVATION_ATTRIBUTES = ("act_fn", "activation_fn", "act")
_ATTENTION_OUTPUTS = ("o_proj", "dense")
_MERGED, _BY_HEAD = ("qkv_proj",), "query_key_value"
"""Names of merged projections to queries, keys and values. The rows of the last one are grouped by head."""
_QUERY_KEY_NORMS = (
    ("q_norm", "k_norm"),
    ("q_layernorm", "k_layernorm"),
    ("query_layernorm", "key_layernorm"),
    ("qk_norm", "qk_norm"),
)
_VALUE_NORM = "v_norm"
"""Name of Gemma 4's norm of values, which has no weights."""
_BEFORE_ACTIVATION = (
    *(("gate_proj", "up_proj"), ("gate_up_proj",), ("up_proj",), ("fc1",), ("c_fc",)),
    ("dense_h_to_4h",),
)
"""Names of the linear layers of an MLP before its activation."""
_AFTER_ACTIVATION = {"fc1": "fc2", "c_fc": "c_proj", "dense_h_to_4h": "dense_4h_to_h"}
"""Names of the linear layer of an MLP after its activation, if not ``down_proj``."""
_UNGATED = frozenset({"up_proj", "fc1", "c_fc", "dense_h_to_4h"})
"""First names of ``_BEFORE_ACTIVATION`` of MLPs without a gate."""
_NORMS_AFTER = (("post_norm1", "post_norm2"), ("post_self_attn_layernorm", "post_mlp_layernorm"))
"""Names of norms of the outputs of attention and MLP, of HyperCLOVA X and GLM-4. Without these norms, the modules of
HyperCLOVA X are identities.
"""
_BESIDE_PARTS = (
    *("router", "experts", "pre_feedforward_layernorm_2"),
    *("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"),
)
"""Names of a layer's parts that only layers with both an MLP and a mixture of experts have, as in Gemma 4."""
_LAYER_EMBEDDING_PARTS = ("act_fn", "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
"""Names of a layer's parts that add an embedding of the token's id."""
_LAYER_INPUT_PARTS = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")
"""Names of a model's parts that compute the inputs of these layers."""
_NORM_KINDS = {"RMSNorm": False, "L2Norm": False, "LayerNorm": True, "LayerNorm1P": True}
"""Whether norms subtract the mean, by the end of the name of the norm's class."""
_IDLE_PARTS = frozenset(
    {
        *("resid_attn_dropout", "resid_mlp_dropout", "resid_dropout", "hidden_norm"),
        *("post_attention_dropout", "post_mlp_dropout"),
    }
)
"""Names of a layer's parts that inference does not use (dropout), or that belong to an EAGLE head."""


def plan_model(module: Any, calls: Sequence[AttentionCall]) -> ModelPlan:
    """Return the plan of a loaded model. ``calls`` are the attention calls of one of its forward passes. Raises
    UnsuitableError, with the name of the unknown part.
    """
    kind, base = type(module).__name__, base_of(module) if is_known(module) else None
    if base is None:
        raise UnsuitableError(f"{kind} is not one of the supported classes: {', '.join(sorted(FAMILIES))}")
    reader = PlanReader(FAMILIES[kind], base)
    reader.expect(module, "ForCausalLM", (named_part(module, BASES), "lm_head"))
    idle = tuple(name for name in ("embed_dropout", "emb_dropout") if hasattr(base, name))
    more = _LAYER_INPUT_PARTS if has_layer_embeddings(base) else idle
    embedding, norm = named_part(base, EMBEDDINGS), named_part(base, FINAL_NORMS)
    reader.expect(base, "Model", (embedding, "layers", norm, "rotary_emb", *more))
    return reader.model(module.config, module.lm_head, getattr(base, embedding), calls)


def plan_head(head: Any, embedding: torch.nn.Module, calls: Sequence[AttentionCall]) -> ModelPlan:
    """Return the plan of the layers of an EAGLE head. ``embedding`` computes the embeddings of its tokens."""
    return PlanReader(Family(), head).model(head.config, head.lm_head, embedding, calls)


def has_mixtures(module: Any) -> bool:
    """Return whether the model's class is in ``FAMILIES`` and some of the model's layers have mixtures of experts."""
    layers = own_layers(base_of(module)) if is_known(module) else []
    return not all(is_dense(mlp_part(layer)) and not _has_both(layer) for layer in layers)


def embedding_scale(embedding: Any) -> float | None:
    """Return the factor by which an embedding module multiplies its rows, in the precision of the model, or None if the
    module does more than scale.
    """
    if type(embedding) is torch.nn.Embedding:
        return 1.0
    if is_of_transformers(embedding, "TextScaledWordEmbedding"):
        return float(embedding.embed_scale.to(embedding.weight.dtype))
    return None


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """Names of parts of attention modules that differ between models, and whether the query projection has a gate. If
    a name is None, a module has one of the names that the reader knows.
    """

    output: str | None = None
    norms: tuple[str, str] | None = None
    gated: bool = False


class PlanReader:
    """Reads the plan of a model from the modules of ``base``, the model without its head."""

    def __init__(self, family: Family, base: Any) -> None:
        self._family = family
        self._base = base
        self._names = {part: f"model.{name}".rstrip(".") for name, part in base.named_modules()}
        self._donors: dict[torch.nn.Module, int] = {}

    def model(self, config: Any, head: Any, embedding: Any, calls: Sequence[AttentionCall]) -> ModelPlan:
        """Return the plan of a model. ``calls`` are the attention calls of one forward pass, in order."""
        base, layers = self._base, own_layers(self._base)
        if [call.module for call in calls] != list(map(attention_of, layers)):
            raise UnsuitableError("the model does not call its layers in the order in which it lists them")
        order = {call.module: index for index, call in enumerate(calls)}
        self._donors = {reader: order[donor.module] for reader, donor in donor_calls(calls).items()}
        self.expect(base.rotary_emb, "RotaryEmbedding", ())
        kinds = [self._rotary_variant(call) for call in calls]
        variants = sorted(set(kinds))
        has_head = isinstance(head, torch.nn.Linear | QuantizedLinear)
        return ModelPlan(
            family=self._family,
            embedding=embedding.weight,
            embedding_scale=embedding_scale(embedding),
            input_scale=self._factor(config, "inputs", float(getattr(base, "embedding_multiplier", 1.0))),
            layers=tuple(
                self._layer(layer, call, variants.index(kind))
                for layer, call, kind in zip(layers, calls, kinds, strict=True)
            ),
            norm=self.norm(getattr(base, named_part(base, FINAL_NORMS))),
            head=self.linear(head) if has_head else None,
            logits_divisor=float(getattr(config, "logits_scaling", 1.0)) / self._factor(config, "logits"),
            logits_softcap=getattr(config, "final_logit_softcapping", None),
            rotary=base.rotary_emb,
            rotary_variants=tuple(variants),
            layer_inputs=self._layer_inputs() if has_layer_embeddings(base) else None,
        )

    def _layer_inputs(self) -> LayerInputsPlan:
        base = self._base
        return LayerInputsPlan(
            embedding=base.embed_tokens_per_layer,
            projection=self.linear(base.per_layer_model_projection),
            projection_scale=float(base.per_layer_model_projection_scale),
            norm=present(self.norm(base.per_layer_projection_norm), "norm of the inputs of all layers"),
            scale=float(base.per_layer_input_scale),
            id_of_media=id_of_media(base),
        )

    def _factor(self, config: Any, place: Factor, factor: float = 1.0) -> float:
        """Return ``factor`` times the family's factor for ``place``."""
        name = self._family.factors.get(place)
        return factor if name is None else factor * float(getattr(config, name))

    def _rotary_variant(self, call: AttentionCall) -> tuple[str, ...]:
        if self._family.only_windows_rotate and call.params.sliding_window is None:
            return UNROTATED
        return rotary_variant(self._base.rotary_emb, call.module)

    def _layer(self, layer: Any, call: AttentionCall, rotary: int) -> LayerPlan:
        names = [f"{name}_layernorm" for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")]
        after_names = next((pair for pair in _NORMS_AFTER if hasattr(layer, pair[0])), _NORMS_AFTER[0])
        named = [name for name in (*names, *after_names) if getattr(layer, name, None) is not None]
        idle = _IDLE_PARTS & layer._modules.keys()
        mlp, config = mlp_part(layer), self._base.config
        beside = _BESIDE_PARTS if _has_both(layer) else ()
        embedding = _LAYER_EMBEDDING_PARTS if hasattr(layer, "per_layer_input_gate") else ()
        more = (*named, *idle, *beside, *embedding)
        self.expect(layer, "Layer", (named_part(layer, ATTENTIONS), named_part(layer, MLPS), *more))
        first, second, third, last = (self.norm(getattr(layer, name, None)) for name in names)
        after = [self.norm(getattr(layer, name, None)) for name in after_names]
        around = third is not None or last is not None  # in other models, the second norm is before the MLP
        attention = attention_of(layer)
        latent = hasattr(attention, "kv_a_proj_with_mqa")
        parallel = self._family.parallel or bool(getattr(layer, "use_parallel_residual", False))
        before_mlp = third if around else second
        return LayerPlan(
            name=self._names[layer],
            module=layer,
            mlp_module=mlp,
            attention=(self._latent if latent else self.attention)(attention, call, rotary),
            mlp=self.mlp_or_experts(mlp),
            # A parallel layer with one norm uses this norm for both inputs.
            norms_before=(first, first if parallel and before_mlp is None else before_mlp),
            norms_after=(second if around else after[0], last or after[1]),
            residual_scale=self._factor(config, "residual", float(getattr(layer, "residual_multiplier", 1.0))),
            output_scales=(self._factor(config, "attention"), self._factor(config, "mlp")),
            layer_scale=float(getattr(layer, "layer_scalar", 1.0)),
            parallel=parallel,
            beside=self._beside(layer) if beside else None,
            embedding=self._layer_embedding(layer) if embedding else None,
        )

    def _layer_embedding(self, layer: Any) -> LayerEmbeddingPlan:
        return LayerEmbeddingPlan(
            gate=self.linear(layer.per_layer_input_gate),
            projection=self.linear(layer.per_layer_projection),
            norm=present(self.norm(layer.post_per_layer_input_norm), "norm of a layer's embedding"),
            activation=self.activation(layer, "act_fn"),
        )

    def attention(
        self, attention: Any, call: AttentionCall, rotary: int, names: AttentionNames = AttentionNames()
    ) -> AttentionPlan:
        """Return the plan of the attention module that made the attention call ``call``."""
        donor = self._donors.get(attention)
        alternative = bool(getattr(attention, "use_alternative_attention", False)) and not names.gated
        keys_as_values = alternative and donor is None
        separate = ("q_proj",) if donor is not None else ("q_proj", "k_proj", "v_proj")[: 2 if keys_as_values else 3]
        projections = next(((name,) for name in (*_MERGED, _BY_HEAD) if hasattr(attention, name)), separate)
        pair = names.norms or next((each for each in _QUERY_KEY_NORMS if hasattr(attention, each[0])), ())
        norms = [name for name in pair if hasattr(attention, name)]
        value_norm = getattr(attention, _VALUE_NORM, None)
        sinks = () if call.params.sinks is None else ("sinks",)
        output = names.output or named_part(attention, _ATTENTION_OUTPUTS)
        more = norms if value_norm is None else [*norms, _VALUE_NORM]
        name = self._expect_attention(attention, (*projections, output, *more), sinks)
        if getattr(attention.config, "clip_qkv", None) is not None:
            raise UnsuitableError("the model clips queries, keys and values")
        (_, num_heads, head_size), num_kv_heads = call.query.shape, call.key.shape[1]
        if call.value.shape[1:] != (num_kv_heads, head_size):
            raise UnsuitableError(f"in {name}, the head size of values differs from the head size of keys")
        qkv = tuple(self.linear(getattr(attention, projection)) for projection in projections)
        heads = num_heads * (1 + names.gated) + num_kv_heads * (len(separate) - 1)
        if sum(each.out_features for each in qkv) != head_size * heads:
            raise UnsuitableError(f"the sizes of the projections of {name} do not match its number and size of heads")
        by_head = projections == (_BY_HEAD,)
        if by_head and num_heads != num_kv_heads:
            raise UnsuitableError(f"{name} has a merged projection, and fewer heads of keys than of queries")
        query_norm, key_norm = (
            self.norm(getattr(attention, norm), head_size) if norm in norms else None for norm in pair or ("", "")
        )
        if donor is None and (query_norm is None) != (key_norm is None):
            raise UnsuitableError(f"{name} norms either queries or keys, but not both")
        return AttentionPlan(
            qkv=qkv,
            output=self.linear(getattr(attention, output)),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            norms=None if query_norm is None else (query_norm, key_norm),
            rotary=rotary,
            params=call.params,
            gated=names.gated,
            query_scale=rotary_query_scale(attention.config) if self._family.scales_queries else query_scale(attention),
            value_eps=None if value_norm is None else self._plain_norm(value_norm),
            keys_as_values=keys_as_values,
            donor=donor,
            by_head=by_head,
        )

    def _latent(self, attention: Any, call: AttentionCall, rotary: int) -> LatentPlan:
        low = attention.q_lora_rank is not None
        queries = ("q_a_proj", "q_a_layernorm", "q_b_proj") if low else ("q_proj",)
        parts = (*queries, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
        name, params = self._expect_attention(attention, parts, ()), call.params
        if (params.sliding_window, params.attention_chunk, params.softcap, params.sinks) != (None,) * 4:
            raise UnsuitableError(f"{name} uses latent attention with a window, a soft cap or sinks")
        if query_scale(attention) is not None:
            raise UnsuitableError(f"{name} scales queries by position")
        (_, num_heads, size), size_v = call.query.shape, call.value.shape[2]
        return LatentPlan(
            down=(
                self.linear(attention.q_a_proj if low else attention.q_proj),
                self.linear(attention.kv_a_proj_with_mqa),
            ),
            up=self.linear(attention.q_b_proj) if low else None,
            expansion=self.linear(attention.kv_b_proj),
            output=self.linear(attention.o_proj),
            norms=(
                self.norm(attention.q_a_layernorm) if low else None,
                present(self.norm(attention.kv_a_layernorm), "norm of the latent"),
            ),
            num_heads=num_heads,
            latent=int(attention.kv_lora_rank),
            rotary_size=int(attention.qk_rope_head_dim),
            plain_size=size - int(attention.qk_rope_head_dim),
            value_size=size_v,
            interleaved=self._family.deepseek_v2 or bool(attention.config.rope_interleave),
            stays_interleaved=self._family.deepseek_v2,
            rotary=rotary,
            params=params,
        )

    def _expect_attention(self, attention: Any, parts: Iterable[str], parameters: Collection[str]) -> str:
        """Check an attention module and return its name."""
        self.expect(attention, "Attention", parts, parameters)
        return self._names[attention]

    def mlp_or_experts(self, mlp: Any) -> MLPPlan | ExpertsPlan | OtherMixture:
        """Return the plan of an MLP. An MLP with other parts than those of ``mlp`` is a mixture of experts."""
        if is_dense(mlp):
            return self.mlp(mlp)
        try:
            if not hasattr(mlp, "router"):
                return self._experts(mlp)
            return self._scaling_experts(mlp) if hasattr(mlp, "shared_expert") else self._clamped_experts(mlp)
        except UnsuitableError as e:
            return OtherMixture(str(e))

    def mlp(self, mlp: Any) -> MLPPlan:
        """Return the plan of a dense MLP with or without a gate."""
        projections = next(each for each in _BEFORE_ACTIVATION if hasattr(mlp, each[0]))
        act = next((name for name in _ACTIVATION_ATTRIBUTES if hasattr(mlp, name)), _ACTIVATION_ATTRIBUTES[0])
        down = _AFTER_ACTIVATION.get(projections[0], "down_proj")
        self.expect(mlp, "MLP", (*projections, down, act))
        gate_up = tuple(self.linear(getattr(mlp, name)) for name in projections)
        return MLPPlan(
            gate_up, self.linear(getattr(mlp, down)), self.activation(mlp, act), projections[0] not in _UNGATED
        )

    def _experts(self, mlp: Any) -> ExpertsPlan:
        """Return the plan of experts with softmax routing, and possibly a shared expert with a gate. The experts may
        also have DeepSeek's grouped routing and shared experts, or the routing of MiniMax-M2.
        """
        grouped, gated = hasattr(mlp, "shared_experts"), hasattr(mlp, "shared_expert_gate")
        shared = ("shared_experts",) if grouped else ("shared_expert", "shared_expert_gate") if gated else ()
        self.expect(mlp, "", ("gate", "experts", *shared))
        gate, kind = mlp.gate, type(mlp.gate).__name__
        corrected = kind == CORRECTED_ROUTER
        if not grouped and not corrected and kind not in SOFTMAX_ROUTERS:
            raise UnsuitableError(f"{self._names[gate]} is a {kind}, which is not a known router")
        self.expect(gate, "TopkRouter" if grouped else kind, (), ("weight",))
        experts, gate_up, down = self._stacks(mlp.experts, ("act_fn",), ())
        return ExpertsPlan(
            router=gate.weight,
            gate_up=gate_up,
            down=down,
            top_k=int(gate.top_k),
            renormalize=not self._family.deepseek_v2 and sums_to_one(gate),
            activation=self.activation(experts, "act_fn"),
            grouped=self._routing(mlp) if grouped or corrected else None,
            shared=self.mlp(getattr(mlp, shared[0])) if shared else None,
            shared_gate=self.linear(mlp.shared_expert_gate) if gated else None,
            divided=is_divided(mlp.experts),
        )

    def _scaling_experts(self, mlp: Any) -> ExpertsPlan:
        """Return the plan of Llama 4's experts."""
        self.expect(mlp, "Llama4TextMoe", ("router", "experts", "shared_expert"))
        self.expect(mlp.router, "Llama4Router", (), ("weight",))
        experts, gate_up, down = self._stacks(mlp.experts, ("act_fn",), ())
        return ExpertsPlan(
            router=mlp.router.weight,
            gate_up=gate_up,
            down=down,
            top_k=int(mlp.router.top_k),
            renormalize=False,
            activation=self.activation(experts, "act_fn"),
            shared=self.mlp(mlp.shared_expert),
            scales_inputs=True,
        )

    def _beside(self, layer: Any) -> BesidePlan:
        """Return the plan of the experts that a layer has beside its MLP."""
        router, experts = layer.router, layer.experts
        self.expect(router, "TextRouter", ("norm", "proj"), ("scale", "per_expert_scale"))
        self.expect(experts, "TextExperts", ("act_fn",), (GATE_UP, DOWN))
        before, *after = (
            present(self.norm(getattr(layer, name)), name)
            for name in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
        )
        return BesidePlan(
            module=experts,
            router=self.linear(router.proj),
            router_norm=Norm(router.scale, self._plain_norm(router.norm), 0.0),
            router_factor=float(router.scalar_root_size),
            scales=router.per_expert_scale,
            top_k=int(router.config.top_k_experts),
            activation=self.activation(experts, "act_fn"),
            norm_before=before,
            norms_after=(after[0], after[1]),
        )

    def _clamped_experts(self, mlp: Any) -> ExpertsPlan:
        """Return the plan of gpt-oss's experts."""
        self.expect(mlp, "GptOssMLP", ("router", "experts"))
        router = mlp.router
        self.expect(router, "GptOssTopKRouter", (), ("weight", "bias"))
        biases = ("gate_up_proj_bias", "down_proj_bias")
        experts, gate_up, down = self._stacks(mlp.experts, (), biases)
        return ExpertsPlan(
            router=router.weight,
            gate_up=gate_up,
            down=down,
            top_k=int(router.top_k),
            # A softmax over all experts, renormalized over the chosen experts, gives the same weights as gpt-oss: a softmax
            # over only the chosen experts.
            renormalize=True,
            activation=ClampedGate(float(experts.alpha), float(experts.limit)),
            biases=(router.bias, experts.gate_up_proj_bias, experts.down_proj_bias),
            divided=is_divided(mlp.experts),
        )

    def _routing(self, mlp: Any) -> GroupedRouting:
        gate = mlp.gate
        if type(gate).__name__ == CORRECTED_ROUTER:
            return GroupedRouting(lambda: mlp.e_score_correction_bias, 1, 1, 1.0)
        groups, kept, scale = gate.num_group, gate.topk_group, float(gate.routed_scaling_factor)
        if not self._family.deepseek_v2:
            return GroupedRouting(lambda: gate.e_score_correction_bias, int(groups), int(kept), scale)
        if gate.topk_method not in ("greedy", "group_limited_greedy"):
            raise UnsuitableError(f"{self._names[gate]} routes tokens by {gate.topk_method!r}")
        if gate.topk_method == "greedy":
            groups = kept = 1
        return GroupedRouting(None, int(groups), int(kept), scale)

    def _stacks(
        self, experts: Any, parts: Iterable[str], biases: Iterable[str]
    ) -> tuple[Any, ExpertsWeight, ExpertsWeight]:
        """Return the model's own experts module, and the two weights of this module."""
        quantized = type(experts) is QuantizedExperts
        own = experts.experts if quantized else own_experts(experts)
        self.expect(own, "Experts", parts, (GATE_UP, DOWN, *biases))
        return (own, experts.gate_up, experts.down) if quantized else (own, own.gate_up_proj, own.down_proj)

    def activation(self, module: Any, name: str) -> Activation:
        """Return the activation in the attribute ``name`` of ``module``."""
        kind = type(getattr(module, name)).__name__
        if kind not in ACTIVATION_NAMES:
            raise UnsuitableError(
                f"{self._names[module]} uses the activation function {kind}, which this decoder does not support"
            )
        return ACTIVATION_NAMES[kind]

    def norm(self, norm: Any, size: int = 0) -> Norm | None:
        """Return the plan of a norm with the family's offset, or None if there is no norm. ``size`` is the number of
        elements of a norm whose module does not show it.
        """
        if norm is None or type(norm) is torch.nn.Identity:
            return None
        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        if type(norm) is torch.nn.LayerNorm:
            centered = True
        else:
            kind = next((kind for kind in _NORM_KINDS if type(norm).__name__.endswith(kind)), "RMSNorm")
            self.expect(norm, kind, (), ("weight", "bias"))
            centered = _NORM_KINDS[kind]
        if weight is not None and weight.ndim != 1:
            raise UnsuitableError(f"{self._named(norm)} has a separate weight for each head")
        eps = next((getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)), None)
        eps = self._family.norm_eps if eps is None else eps
        if eps is None:
            raise UnsuitableError(f"{self._named(norm)} does not show its epsilon")
        width = 0 if weight is not None else size or norm.normalized_shape[0]
        return Norm(weight, float(eps), self._family.norm_offset, centered, bias, width)

    def _plain_norm(self, norm: Any) -> float:
        """Return the epsilon of a norm without weights."""
        self.expect(norm, "RMSNorm", ())
        return float(norm.eps)

    def linear(self, linear: Any) -> Linear:
        """Return ``linear`` if it is a linear layer, quantized or not. Raises UnsuitableError for other modules."""
        if type(linear) is QuantizedLinear:
            return linear
        if type(linear) is not torch.nn.Linear and not isinstance(linear, LatentHeads):
            raise UnsuitableError(
                f"{self._named(linear)} is a {type(linear).__module__}.{type(linear).__name__}, not a Linear of torch.nn"
            )
        return linear

    def expect(
        self, module: torch.nn.Module, kind: str, parts: Iterable[str], parameters: Collection[str] = ()
    ) -> None:
        """Raise UnsuitableError unless ``module`` is a known module of transformers.

        Its class name must end in ``kind``, its parts must be ``parts``, and it may have no parameters other than
        ``parameters``.
        """
        name, found = self._named(module), type(module)
        if not is_of_transformers(module, kind):
            raise UnsuitableError(f"{name} is a {found.__module__}.{found.__name__}, not a {kind} of transformers")
        children = {child for child, _ in module.named_children()}
        if odd := children.symmetric_difference(parts):
            raise UnsuitableError(f"{name} has unknown or missing parts: {', '.join(sorted(odd))}")
        own = {parameter for parameter, _ in module.named_parameters(recurse=False)}
        if odd := own.difference(parameters):
            raise UnsuitableError(f"{name} has unknown parameters: {', '.join(sorted(odd))}")

    def _named(self, module: torch.nn.Module) -> str:
        return self._names.get(module, "the model")


def is_dense(mlp: torch.nn.Module) -> bool:
    """Return whether ``mlp`` has only up and down projections, and possibly a gate projection. Any other MLP is a mixture
    of experts.
    """
    parts = mlp._modules.keys() - set(_ACTIVATION_ATTRIBUTES)
    return any(parts == {*each, _AFTER_ACTIVATION.get(each[0], "down_proj")} for each in _BEFORE_ACTIVATION)


def own_experts(experts: Any) -> Any:
    """Return the module with this rank's experts, if ``experts`` dispatches tokens to ranks, otherwise ``experts``."""
    return experts.experts if is_divided(experts) else experts


def is_divided(experts: Any) -> bool:
    """Return whether ``experts`` dispatches tokens to ranks, and this rank has only some of the experts."""
    return bool(getattr(experts, "has_routed_experts", False))


def _has_both(layer: Any) -> bool:
    """Return whether a layer has a mixture of experts beside its MLP."""
    return bool({"router", "experts"} & layer._modules.keys())


def rotary_variant(rotary: Any, attention: Any) -> tuple[str, ...]:
    """Return the arguments other than positions with which a layer calls the rotary embedding."""
    # If some layers of an EXAONE 4 model have sliding windows, only these layers have rotary positions.
    windowed = hasattr(attention, "sliding_window_pattern") and attention.sliding_window is not None
    if not getattr(attention, "use_rope", True) or (windowed and not attention.is_sliding):
        return UNROTATED
    if not hasattr(rotary, "layer_types"):
        return ()
    return (attention.layer_type if hasattr(attention, "layer_type") else attention.attention_type,)


def is_of_transformers(module: torch.nn.Module, kind: str) -> bool:
    """Return whether the module's class name ends in ``kind``, and the class belongs to transformers or is one of this
    project's text models.
    """
    found = type(module)
    rooms = ("transformers.", "penstock_enginecore.models.multimodal.")
    return found.__name__.endswith(kind) and found.__module__.startswith(rooms)

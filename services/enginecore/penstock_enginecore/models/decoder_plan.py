"""Plan of a model's layers, read from transformers' loaded modules. All decoders of this project use this plan.

The reader inspects the parts and parameters of modules. ``families.py`` has the properties that modules do not show.
Attention parameters (scale, window, soft cap) come from the call that the layer made. The reader rejects unknown parts
by name and never guesses. The comparison of a decoder with the model's own modules detects any remaining mistakes.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.models.attention_hook import AttentionCall
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.families import FAMILIES, SOFTMAX_ROUTERS, Family, is_known, sums_to_one
from penstock_enginecore.models.quantization.layers import (
    DOWN,
    GATE_UP,
    QuantizedExperts,
    QuantizedLinear,
    QuantizedStack,
)
from penstock_enginecore.models.rope import query_scale

Activation = Literal["silu", "gelu", "gelu_tanh"]
"""Activation of a gate. ``gelu`` is exact; ``gelu_tanh`` is the usual approximation."""
_ACTIVATIONS: Mapping[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
}
"""Activations by class name of transformers' module."""
_ACTIVATION_NAMES = ("act_fn", "activation_fn")
_GATED = (("gate_proj", "up_proj"), ("gate_up_proj",))
"""Linear layers of a gated MLP before its activation."""
_IDLE_PARTS = frozenset({"resid_attn_dropout", "resid_mlp_dropout", "hidden_norm"})
"""Parts of a layer that inference does not use (dropout), or that belong to an EAGLE head."""
UNROTATED = ("unrotated",)
"""Rotary variant of layers without positions."""

T = TypeVar("T")

# Model plan: the layers that a decoder computes, and the modules that have the layers' weights.

Linear = torch.nn.Linear | QuantizedLinear
ExpertsWeight = torch.nn.Parameter | QuantizedStack


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm. The normalized value is multiplied by ``weight + offset``, where Gemma's offset is 1 and others' 0."""

    weight: torch.nn.Parameter
    eps: float
    offset: float


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Attention of a layer. ``qkv`` is one linear layer or three. ``rotary`` is the index of a rotary variant."""

    qkv: tuple[Linear, ...]
    output: Linear
    num_heads: int
    num_kv_heads: int
    head_size: int
    norms: tuple[Norm, Norm] | None
    rotary: int
    params: AttentionParams

    @property
    def linears(self) -> list[Linear]:
        """All linear layers of the attention."""
        return [*self.qkv, self.output]

    @property
    def norms_all_heads(self) -> bool:
        """Whether one norm covers all heads together."""
        return self.norms is not None and len(self.norms[0].weight) != self.head_size


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """Latent attention (MLA) of a layer. ``norms`` are the norm of the low-rank queries, or None, and the norm of the latent.

    Attributes:
        down: Projections of the hidden state to the queries or their low-rank input, and to the latent and rotated
            elements.
        up: Projection of the low-rank input to the queries, or None.
        expansion: Projection of the latent to ``plain_size`` elements of each head's key and ``value_size`` elements of
            each head's value.
    """

    down: tuple[Linear, Linear]
    up: Linear | None
    expansion: Linear
    output: Linear
    norms: tuple[Norm | None, Norm]
    num_heads: int
    latent: int
    rotary_size: int
    plain_size: int
    value_size: int
    interleaved: bool
    rotary: int
    params: AttentionParams

    @property
    def linears(self) -> list[Linear]:
        """All linear layers of the attention."""
        return [*self.down, *(() if self.up is None else (self.up,)), self.expansion, self.output]


@dataclass(frozen=True, slots=True)
class MLPPlan:
    """Gated MLP. ``gate_up`` is one linear layer or two."""

    gate_up: tuple[Linear, ...]
    down: Linear
    activation: Activation

    @property
    def linears(self) -> list[Linear]:
        """All linear layers of the MLP."""
        return [*self.gate_up, self.down]


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """Activation of gpt-oss, for alternating gate and up values.

    The result is ``(up + 1) * gate * sigmoid(alpha * gate)``. Gate values are clamped to ``limit``, up values to
    ``[-limit, limit]``.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class GroupedRouting:
    """Routing of DeepSeek-V3, or of DeepSeek-V2 without a correction.

    In DeepSeek-V3, an expert's score is the sigmoid of its logit. Selection adds the ``correction`` to the score and
    keeps the ``kept`` groups of consecutive experts with the largest sums of their two best scores. In DeepSeek-V2,
    scores are probabilities, and the groups with the largest score are kept. Weights are multiplied by ``scale``.
    ``correction`` returns float32 ``[experts]`` and is called in each step, because it reads a buffer that may move.
    """

    correction: Callable[[], torch.Tensor] | None
    groups: int
    kept: int
    scale: float


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """Mixture of experts.

    The weights of a token's experts are the probabilities of the ``top_k`` most likely experts, scaled to sum to 1 if
    ``renormalize``. ``shared`` computes every token. ``router`` is ``[experts, hidden size]``, ``gate_up`` ``[experts,
    2 * intermediate size, hidden size]`` and ``down`` ``[experts, hidden size, intermediate size]``. With
    ``ClampedGate`` the last two sizes are swapped. ``biases`` are the biases of router, gate_up and down.
    """

    router: torch.nn.Parameter
    gate_up: ExpertsWeight
    down: ExpertsWeight
    top_k: int
    renormalize: bool
    activation: Activation | ClampedGate
    biases: tuple[torch.nn.Parameter, torch.nn.Parameter, torch.nn.Parameter] | None = None
    grouped: GroupedRouting | None = None
    shared: MLPPlan | None = None

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return len(self.router)

    @property
    def is_plain(self) -> bool:
        """Whether a softmax routes the tokens and there are only experts and a router."""
        return self.biases is None and self.grouped is None and self.shared is None


@dataclass(frozen=True, slots=True)
class OtherMixture:
    """Mixture of experts that only the model's own module can compute. ``reason`` names the unknown part."""

    reason: str


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Layer of a model: norm, attention, norm, add, norm, MLP, norm, add. A layer may leave out some of the norms.

    ``norms_before`` are the norms before attention and MLP. ``norms_after`` are the norms before each add.
    ``residual_scale`` multiplies the values that are added.
    """

    name: str
    module: torch.nn.Module
    attention: AttentionPlan | LatentPlan
    mlp: MLPPlan | ExpertsPlan | OtherMixture
    norms_before: tuple[Norm | None, Norm | None]
    norms_after: tuple[Norm | None, Norm | None]
    residual_scale: float


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Plan of a model. ``head`` is None if another stage has it.

    Attributes:
        embedding_scale: Factor of the embedding's rows, or None if the module does more than scale.
        input_scale: Factor of all inputs of the first layer, including embeddings that replace tokens.
        rotary_variants: Arguments of ``rotary`` for each variant.
        rotary_twice: Whether ``rotary`` returns elements for both halves of a head.
    """

    family: Family
    embedding: torch.nn.Parameter
    embedding_scale: float | None
    input_scale: float
    layers: tuple[LayerPlan, ...]
    norm: Norm | None
    head: Linear | None
    logits_divisor: float
    logits_softcap: float | None
    rotary: torch.nn.Module
    rotary_variants: tuple[tuple[str, ...], ...]
    rotary_twice: bool

    @property
    def linears(self) -> list[Linear]:
        """Linear layers of the model that matrix products of the decoder replace."""
        found: list[Linear] = []
        for layer in self.layers:
            found += layer.attention.linears
            mlp = layer.mlp.shared if isinstance(layer.mlp, ExpertsPlan) else layer.mlp
            found += mlp.linears if isinstance(mlp, MLPPlan) else []
        return found

    @property
    def stacks(self) -> list[QuantizedStack]:
        """Quantized weights of experts that matrix products of the decoder replace."""
        experts = [layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertsPlan)]
        weights = [weight for each in experts for weight in (each.gate_up, each.down)]
        return [weight for weight in weights if isinstance(weight, QuantizedStack)]

    @property
    def own_head(self) -> Linear:
        """Head of a model that is not split into stages."""
        if self.head is None:
            raise UnsuitableError("another pipeline stage has the model's head")
        return self.head

    @property
    def norms(self) -> list[Norm]:
        """All norms of hidden states, queries and keys."""
        found: list[Norm | None] = [self.norm]
        for layer in self.layers:
            found += [*layer.norms_before, *layer.norms_after, *(layer.attention.norms or ())]
        return [norm for norm in found if norm is not None]

    def turns(
        self, variant: tuple[str, ...], positions: torch.Tensor, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines float32 ``[tokens, rotary size]`` for a variant, from the model's own rotary
        embedding.

        ``positions`` is int64 ``[tokens]``, or ``[3, tokens]`` in sections.
        """
        if variant == UNROTATED:
            cosines, _ = self.turns((), positions, like)
            return torch.ones_like(cosines), torch.zeros_like(cosines)
        at = positions[None] if positions.ndim == 1 else positions[:, None]
        cosines, sines = (each[0].float().contiguous() for each in self.rotary(like, at, *variant))
        if self.rotary_twice:
            return cosines, sines
        return torch.cat([cosines, cosines], dim=1), torch.cat([sines, sines], dim=1)

    @property
    def rotary_size(self) -> int:
        """Number of elements of a head that are rotated."""
        rotated = next((each for each in self.rotary_variants if each != UNROTATED), UNROTATED)
        device = self.embedding.device
        at, like = torch.zeros(1, dtype=torch.int64, device=device), torch.empty(0, device=device)
        return self.turns(rotated, at, like)[0].shape[1]


def plan_model(module: Any, calls: Sequence[AttentionCall]) -> ModelPlan:
    """Return the plan of a loaded model that made these ``calls``. Raises UnsuitableError, with the name of the unknown
    part.
    """
    kind, base = type(module).__name__, module.model if is_known(module) else None
    if base is None:
        raise UnsuitableError(f"{kind} is not one of the supported classes: {', '.join(sorted(FAMILIES))}")
    reader = _Reader(FAMILIES[kind], base)
    reader.expect(module, "ForCausalLM", ("model", "lm_head"))
    reader.expect(base, "Model", ("embed_tokens", "layers", "norm", "rotary_emb"))
    return reader.model(module.config, module.lm_head, base.embed_tokens, calls)


def plan_head(head: Any, embedding: torch.nn.Module, calls: Sequence[AttentionCall]) -> ModelPlan:
    """Return the plan of the layers of an EAGLE head, whose tokens ``embedding`` embeds."""
    return _Reader(Family(), head).model(head.config, head.lm_head, embedding, calls)


def has_mixtures(module: Any) -> bool:
    """Return whether the model's class is known and some of the model's MLPs are mixtures of experts."""
    return is_known(module) and not all(map(_is_gated, (layer.mlp for layer in _own_layers(module.model))))


def embedding_scale(embedding: Any) -> float | None:
    """Return the factor of an embedding's rows, in the precision of the model, or None if the module does more than
    scale.
    """
    if type(embedding) is torch.nn.Embedding:
        return 1.0
    if _is_of_transformers(embedding, "TextScaledWordEmbedding"):
        return float(embedding.embed_scale.to(embedding.weight.dtype))
    return None


def present(part: T | None, name: str) -> T:
    """Return ``part``. Raises UnsuitableError with the part's ``name`` if it is None."""
    if part is None:
        raise UnsuitableError(f"the model has no {name}")
    return part


class _Reader:
    """Reads the plan of a model from the modules of ``base``, the model without its head."""

    def __init__(self, family: Family, base: Any) -> None:
        self._family = family
        self._base = base
        self._names = {part: f"model.{name}".rstrip(".") for name, part in base.named_modules()}

    def model(self, config: Any, head: Any, embedding: Any, calls: Sequence[AttentionCall]) -> ModelPlan:
        """Return the plan of a model whose layers made these ``calls``."""
        base, layers = self._base, _own_layers(self._base)
        if [call.module for call in calls] != [layer.self_attn for layer in layers]:
            raise UnsuitableError("the model's layers are not called in order")
        self.expect(base.rotary_emb, "RotaryEmbedding", ())
        kinds = [_rotary_variant(base.rotary_emb, layer.self_attn) for layer in layers]
        variants = sorted(set(kinds))
        has_head = isinstance(head, torch.nn.Linear | QuantizedLinear)
        return ModelPlan(
            family=self._family,
            embedding=embedding.weight,
            embedding_scale=embedding_scale(embedding),
            input_scale=float(getattr(base, "embedding_multiplier", 1.0)),
            layers=tuple(
                self._layer(layer, call, variants.index(kind))
                for layer, call, kind in zip(layers, calls, kinds, strict=True)
            ),
            norm=self._norm(base.norm),
            head=self._linear(head) if has_head else None,
            logits_divisor=float(getattr(config, "logits_scaling", 1.0)),
            logits_softcap=getattr(config, "final_logit_softcapping", None),
            rotary=base.rotary_emb,
            rotary_variants=tuple(variants),
            rotary_twice=not self._family.half_turns,
        )

    def _layer(self, layer: Any, call: AttentionCall, rotary: int) -> LayerPlan:
        names = [f"{name}_layernorm" for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")]
        named = [name for name in names if hasattr(layer, name)]
        idle = _IDLE_PARTS & layer._modules.keys()
        self.expect(layer, "DecoderLayer", ("self_attn", "mlp", *named, *idle))
        first, second, third, last = (self._norm(getattr(layer, name, None)) for name in names)
        around = third is not None or last is not None  # otherwise the second norm is before the MLP
        latent = hasattr(layer.self_attn, "kv_a_proj_with_mqa")
        return LayerPlan(
            name=self._names[layer],
            module=layer,
            attention=(self._latent if latent else self._attention)(layer.self_attn, call, rotary),
            mlp=self._mlp_or_experts(layer.mlp),
            norms_before=(first, third if around else second),
            norms_after=(second if around else None, last),
            residual_scale=float(getattr(layer, "residual_multiplier", 1.0)),
        )

    def _attention(self, attention: Any, call: AttentionCall, rotary: int) -> AttentionPlan:
        projections = ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
        norms = [name for name in ("q_norm", "k_norm") if hasattr(attention, name)]
        sinks = () if call.params.sinks is None else ("sinks",)
        name = self._expect_attention(attention, (*projections, "o_proj", *norms), sinks)
        if getattr(attention.config, "clip_qkv", None) is not None:
            raise UnsuitableError("the model clips queries, keys and values")
        (_, num_heads, head_size), num_kv_heads = call.query.shape, call.key.shape[1]
        if call.value.shape[1:] != (num_kv_heads, head_size):
            raise UnsuitableError(f"in {name}, values differ in size from keys")
        qkv = tuple(self._linear(getattr(attention, projection)) for projection in projections)
        if sum(linear.out_features for linear in qkv) != head_size * (num_heads + 2 * num_kv_heads):
            raise UnsuitableError(f"the projections of {name} do not match its heads")
        query_norm, key_norm = (self._norm(getattr(attention, norm, None)) for norm in ("q_norm", "k_norm"))
        return AttentionPlan(
            qkv=qkv,
            output=self._linear(attention.o_proj),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            norms=None if query_norm is None or key_norm is None else (query_norm, key_norm),
            rotary=rotary,
            params=call.params,
        )

    def _latent(self, attention: Any, call: AttentionCall, rotary: int) -> LatentPlan:
        low = attention.q_lora_rank is not None
        queries = ("q_a_proj", "q_a_layernorm", "q_b_proj") if low else ("q_proj",)
        parts = (*queries, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
        name, params = self._expect_attention(attention, parts, ()), call.params
        if (params.sliding_window, params.attention_chunk, params.softcap, params.sinks) != (None,) * 4:
            raise UnsuitableError(f"{name} uses latent attention with a window, a soft cap or sinks")
        (_, num_heads, size), size_v = call.query.shape, call.value.shape[2]
        return LatentPlan(
            down=(
                self._linear(attention.q_a_proj if low else attention.q_proj),
                self._linear(attention.kv_a_proj_with_mqa),
            ),
            up=self._linear(attention.q_b_proj) if low else None,
            expansion=self._linear(attention.kv_b_proj),
            output=self._linear(attention.o_proj),
            norms=(
                self._norm(attention.q_a_layernorm) if low else None,
                present(self._norm(attention.kv_a_layernorm), "norm of the latent"),
            ),
            num_heads=num_heads,
            latent=int(attention.kv_lora_rank),
            rotary_size=int(attention.qk_rope_head_dim),
            plain_size=size - int(attention.qk_rope_head_dim),
            value_size=size_v,
            interleaved=self._family.deepseek_v2 or bool(attention.config.rope_interleave),
            rotary=rotary,
            params=params,
        )

    def _expect_attention(self, attention: Any, parts: Iterable[str], parameters: Collection[str]) -> str:
        """Check an attention module and return its name."""
        self.expect(attention, "Attention", parts, parameters)
        if query_scale(attention) is not None:
            raise UnsuitableError(f"{self._names[attention]} scales queries by position")
        return self._names[attention]

    def _mlp_or_experts(self, mlp: Any) -> MLPPlan | ExpertsPlan | OtherMixture:
        """Return the plan of an MLP. An MLP with other parts than a gated MLP is a mixture of experts."""
        if _is_gated(mlp):
            return self._mlp(mlp)
        try:
            return self._clamped_experts(mlp) if hasattr(mlp, "router") else self._experts(mlp)
        except UnsuitableError as e:
            return OtherMixture(str(e))

    def _mlp(self, mlp: Any) -> MLPPlan:
        projections = next(each for each in _GATED if hasattr(mlp, each[0]))
        act = next((name for name in _ACTIVATION_NAMES if hasattr(mlp, name)), _ACTIVATION_NAMES[0])
        self.expect(mlp, "MLP", (*projections, "down_proj", act))
        gate_up = tuple(self._linear(getattr(mlp, name)) for name in projections)
        return MLPPlan(gate_up, self._linear(mlp.down_proj), self._activation(mlp, act))

    def _experts(self, mlp: Any) -> ExpertsPlan:
        """Return the plan of experts with softmax routing, or with DeepSeek's grouped routing and shared experts."""
        grouped = hasattr(mlp, "shared_experts")
        self.expect(mlp, "", ("gate", "experts", "shared_experts") if grouped else ("gate", "experts"))
        gate, kind = mlp.gate, type(mlp.gate).__name__
        if not grouped and kind not in SOFTMAX_ROUTERS:
            raise UnsuitableError(f"{self._names[gate]} is a {kind}, which is not a known router")
        self.expect(gate, "TopkRouter" if grouped else kind, (), ("weight",))
        experts, gate_up, down = self._stacks(mlp.experts, ("act_fn",), ())
        return ExpertsPlan(
            router=gate.weight,
            gate_up=gate_up,
            down=down,
            top_k=int(gate.top_k),
            renormalize=not self._family.deepseek_v2 and sums_to_one(gate),
            activation=self._activation(experts, "act_fn"),
            grouped=self._routing(gate) if grouped else None,
            shared=self._mlp(mlp.shared_experts) if grouped else None,
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
            renormalize=True,  # a softmax over only the chosen experts gives the same weights
            activation=ClampedGate(float(experts.alpha), float(experts.limit)),
            biases=(router.bias, experts.gate_up_proj_bias, experts.down_proj_bias),
        )

    def _routing(self, gate: Any) -> GroupedRouting:
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
        """Return the model's own module of experts and its two weights."""
        quantized = type(experts) is QuantizedExperts
        own = experts.experts if quantized else experts
        self.expect(own, "Experts", parts, (GATE_UP, DOWN, *biases))
        return (own, experts.gate_up, experts.down) if quantized else (own, own.gate_up_proj, own.down_proj)

    def _activation(self, module: Any, name: str) -> Activation:
        """Return the activation in the attribute ``name`` of ``module``."""
        kind = type(getattr(module, name)).__name__
        if kind not in _ACTIVATIONS:
            raise UnsuitableError(f"the activation of {self._names[module]} is {kind}")
        return _ACTIVATIONS[kind]

    def _norm(self, norm: Any) -> Norm | None:
        """Return a norm with its offset, or None if there is none."""
        if norm is None or type(norm) is torch.nn.Identity:
            return None
        self.expect(norm, "RMSNorm", (), ("weight",))
        eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        return Norm(norm.weight, float(eps), self._family.norm_offset)

    def _linear(self, linear: Any) -> Linear:
        """Return the linear layer, quantized or not. Raises UnsuitableError for other modules."""
        if type(linear) is QuantizedLinear:
            return linear
        if type(linear) is not torch.nn.Linear:
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
        if not _is_of_transformers(module, kind):
            raise UnsuitableError(f"{name} is a {found.__module__}.{found.__name__}, not a {kind} of transformers")
        children = {child for child, _ in module.named_children()}
        if odd := children.symmetric_difference(parts):
            raise UnsuitableError(f"{name} has unknown or missing parts: {', '.join(sorted(odd))}")
        own = {parameter for parameter, _ in module.named_parameters(recurse=False)}
        if odd := own.difference(parameters):
            raise UnsuitableError(f"{name} has unknown parameters: {', '.join(sorted(odd))}")

    def _named(self, module: torch.nn.Module) -> str:
        return self._names.get(module, "the model")


def _own_layers(base: Any) -> list[Any]:
    """Return the layers of a base model, except layers of other pipeline stages."""
    return [layer for layer in base.layers if hasattr(layer, "self_attn")]


def _is_gated(mlp: torch.nn.Module) -> bool:
    """Return whether ``mlp`` has only gate, up and down projections. Any other MLP is a mixture of experts."""
    parts = mlp._modules.keys() - set(_ACTIVATION_NAMES)
    return any(parts == {*each, "down_proj"} for each in _GATED)


def _rotary_variant(rotary: Any, attention: Any) -> tuple[str, ...]:
    """Return the arguments of ``rotary`` for a layer, other than positions."""
    # If EXAONE 4 has layers with windows, only these have rotary positions.
    windowed = hasattr(attention, "sliding_window_pattern") and attention.sliding_window is not None
    if not getattr(attention, "use_rope", True) or (windowed and not attention.is_sliding):
        return UNROTATED
    if not hasattr(rotary, "layer_types"):
        return ()
    return (attention.layer_type if hasattr(attention, "layer_type") else attention.attention_type,)


def _is_of_transformers(module: torch.nn.Module, kind: str) -> bool:
    """Return whether the module's class name ends in ``kind`` and the class is transformers', or one of this project's
    text models.
    """
    found = type(module)
    rooms = ("transformers.", "penstock_enginecore.models.multimodal.")
    return found.__name__.endswith(kind) and found.__module__.startswith(rooms)

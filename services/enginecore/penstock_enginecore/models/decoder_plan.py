"""Reads a plan of a model's layers from transformers' own loaded modules, once for all decoders that compute by it.

A plan says where norms stand and what is added to their weights, which linear layers are one product, how a layer turns and
attends, and how a token's experts are chosen. The reader looks at the parts and parameters of modules, and in ``families.py`` for
what these do not tell. It takes what a layer asks of attention (scale, window, soft cap) from the call that the layer made. It
refuses a part that it does not know, by its name: it guesses nothing, and the proof of a decoder finds what it reads wrongly.
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
"""``gelu`` is exact, ``gelu_tanh`` its usual approximation."""
_ACTIVATIONS: Mapping[str, Activation] = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
}
"""By the class of transformers' module."""
_ACTIVATION_NAMES = ("act_fn", "activation_fn")
_GATED = (("gate_proj", "up_proj"), ("gate_up_proj",))
"""Linear layers of a gated MLP before its activation."""
_IDLE_PARTS = frozenset({"resid_attn_dropout", "resid_mlp_dropout", "hidden_norm"})
"""Parts of a layer that are dropped out of when nothing is trained, or are an EAGLE head's own."""
UNROTATED = ("unrotated",)
"""The rotary variant of layers without positions."""

T = TypeVar("T")

# What a decoder computes, as data: its layers, and the modules that hold their weights.

Linear = torch.nn.Linear | QuantizedLinear
ExpertsWeight = torch.nn.Parameter | QuantizedStack


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm: what is normed is multiplied by ``weight + offset``; Gemma's weights stand around 0, others' around 1."""

    weight: torch.nn.Parameter
    eps: float
    offset: float


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """``qkv``: queries, keys and values, by one linear layer or by three. ``norms``: of queries and keys. ``rotary``: which of
    the model's rotary variants.
    """

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
        """All of it."""
        return [*self.qkv, self.output]

    @property
    def norms_all_heads(self) -> bool:
        """Whether a norm takes all heads as one."""
        return self.norms is not None and len(self.norms[0].weight) != self.head_size


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """Attention over a latent. ``down``: from a token to its queries, or what they are made of by ``up``, and to the latent and
    the numbers that turn; ``expansion``: from the latent to ``plain_size`` numbers of each head's key and ``value_size`` of its
    value. ``norms``: of queries of low rank, and of the latent. ``interleaved``: neighbours turn together. ``rotary``: as of
    ``AttentionPlan``.
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
        """All of it."""
        return [*self.down, *(() if self.up is None else (self.up,)), self.expansion, self.output]


@dataclass(frozen=True, slots=True)
class MLPPlan:
    """``gate_up``: by one linear layer or by two."""

    gate_up: tuple[Linear, ...]
    down: Linear
    activation: Activation

    @property
    def linears(self) -> list[Linear]:
        """All of it."""
        return [*self.gate_up, self.down]


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gpt-oss's activation, of gates and ups in turn: gates, of ``limit`` at most, times their sigmoid at ``alpha``, times ups,
    within ``limit``, plus 1.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class GroupedRouting:
    """DeepSeek-V3's: experts have a score each, the sigmoid of their logit, and are chosen by that and a ``correction`` (float32
    ``[experts]``, asked for at each step: it is a buffer, which moves): of the ``groups`` of neighbours those ``kept`` are the
    ones with the largest sum of two. Weights are multiplied by ``scale``. Without a correction DeepSeek-V2's: scores are
    probabilities, and those groups are kept that have the largest ones.
    """

    correction: Callable[[], torch.Tensor] | None
    groups: int
    kept: int
    scale: float


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """``router`` ``[experts, hidden size]``: the ``top_k`` likeliest experts of a token compute it, and are weighted by their
    probabilities, which sum to 1 if ``renormalize``. ``gate_up`` ``[experts, 2 * intermediate size, hidden size]`` and ``down``
    ``[experts, hidden size, intermediate size]``: an MLP each; of ``ClampedGate`` the last two sizes are the other way round.
    ``biases``: of the router, of gate_up and of down. ``grouped``: another way to choose. ``shared``: what every token
    takes besides.
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
        """How many there are."""
        return len(self.router)

    @property
    def is_plain(self) -> bool:
        """Whether a softmax chooses, and there is nothing beside the experts and their router."""
        return self.biases is None and self.grouped is None and self.shared is None


@dataclass(frozen=True, slots=True)
class OtherMixture:
    """A mixture of experts that only its module computes; ``reason`` names what is not known of it."""

    reason: str


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Norm, attention, norm, add, norm, MLP, norm, add; a layer may leave out some of the norms. ``norms_before`` stand before
    attention and before MLP, ``norms_after`` between each of them and its add. What is added is multiplied by
    ``residual_scale``.
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
    """``embedding`` ``[vocab, hidden size]``, ``embedding_scale`` what its rows are multiplied by, None where the module does
    something else; ``input_scale``: what all that the first layer gets is, vectors that stand for tokens included. ``head``:
    None where another stage has it. ``rotary`` makes cosines and sines; ``rotary_variants``: the arguments that it takes for each
    variant; ``rotary_twice``: whether it gives numbers for both halves of a head. ``logits_softcap``: logits, divided by
    ``logits_divisor``, become ``cap * tanh(logit / cap)``.
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
        """Those of all layers, which products stand for."""
        found: list[Linear] = []
        for layer in self.layers:
            found += layer.attention.linears
            mlp = layer.mlp.shared if isinstance(layer.mlp, ExpertsPlan) else layer.mlp
            found += mlp.linears if isinstance(mlp, MLPPlan) else []
        return found

    @property
    def stacks(self) -> list[QuantizedStack]:
        """Quantized weights of experts, which products stand for."""
        experts = [layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertsPlan)]
        weights = [weight for each in experts for weight in (each.gate_up, each.down)]
        return [weight for weight in weights if isinstance(weight, QuantizedStack)]

    @property
    def own_head(self) -> Linear:
        """The head, of a model that is not cut into stages."""
        if self.head is None:
            raise UnsuitableError("another stage has its head")
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
        """Cosines and sines float32 ``[tokens, rotary size]`` of int64 ``positions`` ``[tokens]``, or ``[3, tokens]`` in
        sections, as the model's own rotary embedding makes them for a variant.
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
        """Numbers of a head that are rotated."""
        rotated = next((each for each in self.rotary_variants if each != UNROTATED), UNROTATED)
        device = self.embedding.device
        at, like = torch.zeros(1, dtype=torch.int64, device=device), torch.empty(0, device=device)
        return self.turns(rotated, at, like)[0].shape[1]


def plan_model(module: Any, calls: Sequence[AttentionCall]) -> ModelPlan:
    """The plan of a loaded model that made these ``calls``. Raises UnsuitableError, with the name of what is not known."""
    kind, base = type(module).__name__, module.model if is_known(module) else None
    if base is None:
        raise UnsuitableError(f"{kind} is not one of {', '.join(sorted(FAMILIES))}")
    reader = _Reader(FAMILIES[kind], base)
    reader.expect(module, "ForCausalLM", ("model", "lm_head"))
    reader.expect(base, "Model", ("embed_tokens", "layers", "norm", "rotary_emb"))
    return reader.model(module.config, module.lm_head, base.embed_tokens, calls)


def plan_head(head: Any, embedding: torch.nn.Module, calls: Sequence[AttentionCall]) -> ModelPlan:
    """The plan of the layers of an EAGLE head, for which ``embedding`` embeds tokens."""
    return _Reader(Family(), head).model(head.config, head.lm_head, embedding, calls)


def has_mixtures(module: Any) -> bool:
    """Whether some MLPs of a model, if it is a known one, are mixtures of experts."""
    return is_known(module) and not all(map(_is_gated, (layer.mlp for layer in _own_layers(module.model))))


def embedding_scale(embedding: Any) -> float | None:
    """The number that an embedding multiplies its rows by, in the precision that it does; None for one that does more."""
    if type(embedding) is torch.nn.Embedding:
        return 1.0
    if _is_of_transformers(embedding, "TextScaledWordEmbedding"):
        return float(embedding.embed_scale.to(embedding.weight.dtype))
    return None


def present(part: T | None, name: str) -> T:
    """A part of a plan that must be there. Raises UnsuitableError, with the ``name`` of the part, where it is not."""
    if part is None:
        raise UnsuitableError(f"it has no {name}")
    return part


class _Reader:
    """Reads modules of one family from ``base``, a model without its head."""

    def __init__(self, family: Family, base: Any) -> None:
        self._family = family
        self._base = base
        self._names = {part: f"model.{name}".rstrip(".") for name, part in base.named_modules()}

    def model(self, config: Any, head: Any, embedding: Any, calls: Sequence[AttentionCall]) -> ModelPlan:
        """Of a model whose layers made these ``calls``."""
        base, layers = self._base, _own_layers(self._base)
        if [call.module for call in calls] != [layer.self_attn for layer in layers]:
            raise UnsuitableError("its layers are not called one after the other")
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
        around = third is not None or last is not None  # else the second one stands before the MLP
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
            raise UnsuitableError("its queries, keys and values are clipped")
        (_, num_heads, head_size), num_kv_heads = call.query.shape, call.key.shape[1]
        if call.value.shape[1:] != (num_kv_heads, head_size):
            raise UnsuitableError(f"in {name}, values are not of the size of keys")
        qkv = tuple(self._linear(getattr(attention, projection)) for projection in projections)
        if sum(linear.out_features for linear in qkv) != head_size * (num_heads + 2 * num_kv_heads):
            raise UnsuitableError(f"the projections of {name} are not those of its heads")
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
            raise UnsuitableError(f"{name} attends over its latent with a window, a soft cap or sinks")
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
        """Its name."""
        self.expect(attention, "Attention", parts, parameters)
        if query_scale(attention) is not None:
            raise UnsuitableError(f"{self._names[attention]} scales queries by position")
        return self._names[attention]

    def _mlp_or_experts(self, mlp: Any) -> MLPPlan | ExpertsPlan | OtherMixture:
        """A layer has experts if its MLP has other parts than a gated one; families with experts have layers of both kinds."""
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
        """Chosen by a softmax, or in groups beside shared ones as DeepSeek's."""
        grouped = hasattr(mlp, "shared_experts")
        self.expect(mlp, "", ("gate", "experts", "shared_experts") if grouped else ("gate", "experts"))
        gate, kind = mlp.gate, type(mlp.gate).__name__
        if not grouped and kind not in SOFTMAX_ROUTERS:
            raise UnsuitableError(f"{self._names[gate]} is a {kind}, which is not known")
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
        """gpt-oss's."""
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
            renormalize=True,  # what the softmax of the chosen ones alone is
            activation=ClampedGate(float(experts.alpha), float(experts.limit)),
            biases=(router.bias, experts.gate_up_proj_bias, experts.down_proj_bias),
        )

    def _routing(self, gate: Any) -> GroupedRouting:
        groups, kept, scale = gate.num_group, gate.topk_group, float(gate.routed_scaling_factor)
        if not self._family.deepseek_v2:
            return GroupedRouting(lambda: gate.e_score_correction_bias, int(groups), int(kept), scale)
        if gate.topk_method not in ("greedy", "group_limited_greedy"):
            raise UnsuitableError(f"{self._names[gate]} chooses experts by {gate.topk_method!r}")
        if gate.topk_method == "greedy":
            groups = kept = 1
        return GroupedRouting(None, int(groups), int(kept), scale)

    def _stacks(
        self, experts: Any, parts: Iterable[str], biases: Iterable[str]
    ) -> tuple[Any, ExpertsWeight, ExpertsWeight]:
        """The model's own module of experts, and its two weights."""
        quantized = type(experts) is QuantizedExperts
        own = experts.experts if quantized else experts
        self.expect(own, "Experts", parts, (GATE_UP, DOWN, *biases))
        return (own, experts.gate_up, experts.down) if quantized else (own, own.gate_up_proj, own.down_proj)

    def _activation(self, module: Any, name: str) -> Activation:
        """Of the part of ``module`` that is called ``name``."""
        kind = type(getattr(module, name)).__name__
        if kind not in _ACTIVATIONS:
            raise UnsuitableError(f"the activation of {self._names[module]} is {kind}")
        return _ACTIVATIONS[kind]

    def _norm(self, norm: Any) -> Norm | None:
        """With its offset; None where there is none."""
        if norm is None or type(norm) is torch.nn.Identity:
            return None
        self.expect(norm, "RMSNorm", (), ("weight",))
        eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        return Norm(norm.weight, float(eps), self._family.norm_offset)

    def _linear(self, linear: Any) -> Linear:
        """As it is, quantized or not."""
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
        """Refuse ``module`` unless its class is transformers', of a name that ends in ``kind``, with these ``parts`` and no other
        parameters.
        """
        name, found = self._named(module), type(module)
        if not _is_of_transformers(module, kind):
            raise UnsuitableError(f"{name} is a {found.__module__}.{found.__name__}, not a {kind} of transformers")
        children = {child for child, _ in module.named_children()}
        if odd := children.symmetric_difference(parts):
            raise UnsuitableError(f"{name} has other parts than are known: {', '.join(sorted(odd))}")
        own = {parameter for parameter, _ in module.named_parameters(recurse=False)}
        if odd := own.difference(parameters):
            raise UnsuitableError(f"{name} has parameters that are not known: {', '.join(sorted(odd))}")

    def _named(self, module: torch.nn.Module) -> str:
        return self._names.get(module, "the model")


def _own_layers(base: Any) -> list[Any]:
    """The layers of a base model, without those of other stages."""
    return [layer for layer in base.layers if hasattr(layer, "self_attn")]


def _is_gated(mlp: torch.nn.Module) -> bool:
    """Whether ``mlp`` is a gate, an up and a down projection and nothing else; else it is a mixture."""
    parts = mlp._modules.keys() - set(_ACTIVATION_NAMES)
    return any(parts == {*each, "down_proj"} for each in _GATED)


def _rotary_variant(rotary: Any, attention: Any) -> tuple[str, ...]:
    """The arguments that ``rotary`` takes for a layer besides positions."""
    # EXAONE 4 has positions in layers with windows alone, where it has such layers.
    windowed = hasattr(attention, "sliding_window_pattern") and attention.sliding_window is not None
    if not getattr(attention, "use_rope", True) or (windowed and not attention.is_sliding):
        return UNROTATED
    if not hasattr(rotary, "layer_types"):
        return ()
    return (attention.layer_type if hasattr(attention, "layer_type") else attention.attention_type,)


def _is_of_transformers(module: torch.nn.Module, kind: str) -> bool:
    """Whether its class is, or is one of ours for a text model that has none there, and of a name that ends in ``kind``."""
    found = type(module)
    rooms = ("transformers.", "penstock_enginecore.models.multimodal.")
    return found.__name__.endswith(kind) and found.__module__.startswith(rooms)

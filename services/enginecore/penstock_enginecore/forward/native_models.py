"""The models that the CPU kernels' decoder computes, and their layers as it takes them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.models.attention_hook import AttentionCall
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.models.rope import query_scale
from penstock_enginecore.native.attention import TILE, params_struct
from penstock_enginecore.native.backend import PackedLayers
from penstock_enginecore.native.experts import PackedExperts, PackedRouter
from penstock_enginecore.native.ffi_structs import Exchange, Layer, Linear, Mixture, Model
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.weights import PackedWeight, interleaved
from penstock_enginecore.parallel.collectives import PIECE
from penstock_enginecore.parallel.part import Part

_ONE_MORE = frozenset({"GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "VaultGemmaForCausalLM"})
"""Their norms multiply with one more than their weights."""
KNOWN = _ONE_MORE | {
    "Dots1ForCausalLM",
    "Exaone4ForCausalLM",
    "FlexOlmoForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "LlamaForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MinistralForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoeForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
}
"""Classes whose layers are attention with rotary halves and a gated MLP or a mixture of experts. What each puts out is added to
the hidden states, with RMS norms before it, behind it or both.
"""
KNOWN_BASES = frozenset({"Qwen2VLTextModel", "Qwen2_5_VLTextModel", "Qwen3VLTextModel"})
"""Classes of base models with such layers, whatever puts a head on them: transformers has no class for that."""
_ACTIVATIONS = {type(ACT2FN["silu"]): 0, torch.nn.SiLU: 0, type(ACT2FN["gelu_pytorch_tanh"]): 1}
"""What the kernels call what a gate passes through."""
_SPLIT = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
"""Linear layers of a gated MLP."""
_MAX_LAYERS = 800
UNROTATED = "unrotated"
"""The rotary embedding of layers without positions, among those that a model has."""


@dataclass(frozen=True, slots=True)
class Norms:
    """Modules of a layer; None where it has none. ``attention_out`` and ``mlp_out``: of what is about to be added."""

    before_attention: Any
    attention_out: Any
    before_mlp: Any
    mlp_out: Any

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, field.name) for field in fields(self))

    @classmethod
    def of(cls, layer: Any) -> "Norms":
        """Those of ``layer``."""
        first, second, before_mlp, mlp_out = (
            getattr(layer, f"{name}_layernorm", None)
            for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )
        if before_mlp is None and mlp_out is None:
            return cls(first, None, second, None)
        return cls(first, second, before_mlp, mlp_out)


def unsuitable(
    library: NativeLibrary,
    module: PreTrainedModel,
    calls: Sequence[AttentionCall],
    specs: Mapping[str, KVCacheSpec],
) -> str | None:
    """Why the decoder does not compute ``module``, None where it does. ``calls``: its attention calls, in order."""
    if not is_known(module):
        return f"{type(module).__name__} is not one of {', '.join(sorted(KNOWN))}"
    model = cast("Any", module).model
    if (dtype := module.get_input_embeddings().weight.dtype) not in (torch.float32, torch.bfloat16):
        return f"its weights are {str(dtype).removeprefix('torch.')}"
    return unsuitable_layers(library, model, calls, specs)


def unsuitable_layers(
    library: NativeLibrary, model: Any, calls: Sequence[AttentionCall], specs: Mapping[str, KVCacheSpec]
) -> str | None:
    """Why the decoder does not compute the layers of a base ``model``, as ``unsuitable`` has it."""
    if odd := [spec.block_size for spec in specs.values() if spec.block_size % TILE]:
        return f"cache.block_size {odd[0]} is no multiple of {TILE}"
    layers = own_layers(model)
    if [call.module for call in calls] != [layer.self_attn for layer in layers] or len(calls) > _MAX_LAYERS:
        return "its layers are not called one after the other"
    if reason := _unsuitable_attention(library, calls):
        return reason
    if len(set(map(norm_eps, _norms(model)))) > 1:
        return "its norms add several epsilons"
    return next((reason for layer in layers if (reason := _unsuitable_mlp(library, layer.mlp))), None)


def unsuitable_part(model: LoadedModel, part: Part | None) -> str | None:
    """Why the decoder does not compute this rank's ``part``, None where it does."""
    if part is None:
        return None
    if part.shared_memory is None:
        return "workers do not exchange in shared memory"
    module: Any = model.module
    if any(getattr(module.config, name, False) for name in ("attention_bias", "mlp_bias")):
        return "its layers have a bias"
    if part.vocabulary is None and len(module.lm_head.weight) not in (model.vocab_size, 0):
        return "its head is in parts"
    if is_mixture(module):
        return "workers have parts of its experts"
    if norms_all_heads(own_layers(module.model)[0].self_attn):
        return "workers have parts of what one norm takes"
    return None


def own_layers(model: Any) -> list[Any]:
    """The layers of a base model, without those of other stages."""
    return [layer for layer in model.layers if hasattr(layer, "self_attn")]


def is_known(module: PreTrainedModel) -> bool:
    """Whether the shape of its layers is known."""
    return type(module).__name__ in KNOWN or type(getattr(module, "model", None)).__name__ in KNOWN_BASES


def is_mixture(module: PreTrainedModel) -> bool:
    """Whether some MLPs of a model, if it is a known one, are mixtures of experts."""
    layers = own_layers(cast("Any", module).model) if is_known(module) else []
    return not all(is_gated(layer.mlp) for layer in layers)


def is_gated(mlp: torch.nn.Module) -> bool:
    """Whether ``mlp`` is a gate, an up and a down projection and nothing else; else it is a mixture."""
    return {name for name, _ in mlp.named_children()} - {"act_fn", "activation_fn"} in _SPLIT


def gate_and_up(mlp: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights ``[intermediate, hidden]`` of a gated MLP."""
    if hasattr(mlp, "gate_proj"):
        return mlp.gate_proj.weight, mlp.up_proj.weight
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    return gate, up


def activation(mlp: Any) -> int:
    """What the kernels call what the gate passes through."""
    return _ACTIVATIONS[type(_activation(mlp))]


def query_key_value(attention: Any) -> list[Any]:
    """The linear layers that give queries, keys and values, one after the other."""
    if hasattr(attention, "qkv_proj"):
        return [attention.qkv_proj]
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def query_key_norms(attention: Any) -> tuple[Any, Any]:
    """None twice where there are none."""
    return getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)


def norms_all_heads(attention: Any) -> bool:
    """Whether these norms take all heads as one."""
    norm, _ = query_key_norms(attention)
    return norm is not None and len(norm.weight) != attention.head_dim


def linears(layer: Any) -> list[Any]:
    """All linear layers whose weights the decoder packs as its own, those of mixtures left out."""
    of_mlp = (
        [child for child in layer.mlp.children() if isinstance(child, torch.nn.Linear)] if is_gated(layer.mlp) else []
    )
    return [*query_key_value(layer.self_attn), layer.self_attn.o_proj, *of_mlp]


def norm_weight(module: PreTrainedModel, norm: Any) -> torch.Tensor:
    """float32 ``[n]``, what a norm of ``module`` multiplies with."""
    weight: torch.Tensor = norm.weight.detach().float()
    return weight + 1.0 if type(module).__name__ in _ONE_MORE else weight.clone()


def norm_eps(norm: Any) -> float:
    """What a norm adds to the mean of the squares."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def epsilon(model: Any) -> float:
    """What all norms of a base model add."""
    return norm_eps(_norms(model)[0])


def is_norm(norm: Any) -> bool:
    """Whether a place for a norm has one."""
    return norm is not None and not isinstance(norm, torch.nn.Identity)


def _norms(model: Any) -> list[Any]:
    """Of a base model, the last one first."""
    of_layers = [norm for layer in own_layers(model) for norm in (*Norms.of(layer), *query_key_norms(layer.self_attn))]
    return list(filter(is_norm, [model.norm, *of_layers]))


def rotary_kinds(model: Any) -> list[str | None]:
    """What the layers of a base model call their rotary embedding, None where all have the same."""
    return [_rotary_kind(model.rotary_emb, layer.self_attn) for layer in own_layers(model)]


def _rotary_kind(rotary: Any, attention: Any) -> str | None:
    # EXAONE 4 has positions in layers with windows alone, where it has such layers.
    windowed = hasattr(attention, "sliding_window_pattern") and attention.sliding_window is not None
    if not getattr(attention, "use_rope", True) or (windowed and not attention.is_sliding):
        return UNROTATED
    if not hasattr(rotary, "layer_types"):
        return None
    kind: str = attention.layer_type if hasattr(attention, "layer_type") else attention.attention_type
    return kind


def _activation(mlp: Any) -> Any:
    return mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn


def _unsuitable_attention(library: NativeLibrary, calls: Sequence[AttentionCall]) -> str | None:
    heads, kv_heads, head_size = calls[0].query.shape[1], calls[0].key.shape[1], calls[0].query.shape[2]
    if head_size % library.lanes or any(call.value.shape[2] != head_size for call in calls):
        return f"a head size of {head_size} is no multiple of {library.lanes}"
    if len({(call.query.shape[1:], call.key.shape[1:]) for call in calls}) > 1:
        return "its layers have heads of several shapes"
    for attention in (cast("Any", call.module) for call in calls):
        if getattr(attention.config, "clip_qkv", None) is not None:
            return "its queries, keys and values are clipped"
        if query_scale(attention) is not None:
            return "it scales queries by position"
        if sum(len(linear.weight) for linear in query_key_value(attention)) != head_size * (heads + 2 * kv_heads):
            return "its projections are not those of its heads"
    return None


def _unsuitable_mlp(library: NativeLibrary, mlp: Any) -> str | None:
    if not is_gated(mlp):
        odd = next((weight.dtype for weight in mlp.parameters() if weight.dtype != torch.float32), None)
        return odd and f"its mixtures compute in {str(odd).removeprefix('torch.')}"
    if type(_activation(mlp)) not in _ACTIVATIONS:
        return f"its activation is {type(_activation(mlp)).__name__}"
    if (width := len(gate_and_up(mlp)[0])) % library.lanes:
        return f"intermediate_size {width} is no multiple of {library.lanes}"
    if any(child.bias is not None for name, child in mlp.named_children() if name.startswith(("gate", "up"))):
        return "its gate has a bias"
    return None


# A model's layers as the CPU kernels' decoder takes them.

_PLAIN_MIXTURES = frozenset(
    {"FlexOlmoSparseMoeBlock", "MixtralSparseMoeBlock", "OlmoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock"}
)
"""Mixtures that are a router and its experts and nothing else."""


_HALVED = frozenset({"GptOssForCausalLM"})
"""Their rotary embedding gives the angles of half a head."""


class DecoderLayers:
    """The layers and head of ``module``, of which nothing is left out: see ``unsuitable``. ``calls``: its attention calls, in
    order. ``struct`` points into what is packed here.

    Projections stay in the module until ``free``. Mixtures of experts are packed in their place, and their own weights are gone
    then: two of them would not fit. Those that are more than experts and a router, or whose experts are shared with other ranks,
    are computed by ``outside``, their modules by layer.
    """

    def __init__(self, library: NativeLibrary, module: Any, calls: Sequence[AttentionCall], part: Part | None) -> None:
        self._library = library
        self._module = module
        self._keep: list[object] = []
        self._packed: list[PackedWeight] = []
        self._mixture_bytes = 0
        self._kinds = rotary_kinds(self._module.model)
        self.rotaries: list[str | None] = list(dict.fromkeys(self._kinds))
        """What the kinds of rotary embedding are called."""
        self.outside: dict[int, Any] = {}
        own = own_layers(self._module.model)
        layers = [self._layer(index, layer, call) for index, (layer, call) in enumerate(zip(own, calls, strict=True))]
        self.struct = self._model(own, layers, calls[0], part)

    @property
    def num_bytes(self) -> int:
        """Bytes of what is packed."""
        return sum(weight.num_bytes for weight in self._packed) + self._mixture_bytes

    def free(self) -> None:
        """Let go of the weights of all projections in the module. q, k and v are rows one after the other of one packed product,
        gate and up rows in turn, some at a time, of another: an adapter's part of a product goes where the projection's rows are.
        """
        for layer in own_layers(self._module.model):
            for linear in linears(layer):
                empty(linear)
        if self._module.lm_head.weight is not self._module.get_input_embeddings().weight:
            empty(self._module.lm_head)

    def _model(self, own: Sequence[Any], layers: Sequence[Layer], call: AttentionCall, part: Part | None) -> Model:
        model, config = self._module.model, self._module.config
        gated = [layer.mlp for layer in own if is_gated(layer.mlp)]
        return Model(
            len(layers),
            config.hidden_size,
            call.query.shape[1],
            call.key.shape[1],
            call.query.shape[2],
            self._rotary_size(),
            max((len(gate_and_up(mlp)[0]) for mlp in gated), default=0),
            activation(gated[0]) if gated else 0,
            norms_all_heads(own[0].self_attn),
            epsilon(model),
            getattr(config, "final_logit_softcapping", None) or 0.0,
            self._kept((Layer * len(layers))(*layers)),
            self.norm(model.norm),
            self.pack(head, None) if len(head := self._module.lm_head.weight) else Linear(),
            _exchange(part),
        )

    def _rotary_size(self) -> int:
        """Numbers of a head that are rotated."""
        rotated = next((kind for kind in self.rotaries if kind != UNROTATED), UNROTATED)
        cosines, _ = turns(self._module, rotated, torch.zeros(1, dtype=torch.int64), torch.empty(0))
        return cosines.shape[1]

    def _layer(self, index: int, layer: Any, call: AttentionCall) -> Layer:
        attention, norms = layer.self_attn, Norms.of(layer)
        projections = query_key_value(attention)
        bias = None if projections[0].bias is None else torch.cat([p.bias for p in projections])
        how, sinks = params_struct(call.params)
        self._keep.append(sinks)
        gate_up, down, mixture = Linear(), Linear(), Mixture()
        qkv = self.pack(torch.cat([p.weight for p in projections]), bias)
        output = self.pack(attention.o_proj.weight, attention.o_proj.bias)
        if is_gated(layer.mlp):
            gate_up = self.pack(interleaved(self._library, *gate_and_up(layer.mlp)), None)
            down = self.pack(layer.mlp.down_proj.weight, layer.mlp.down_proj.bias)
        else:
            mixture = self._mixture(index, layer.mlp)
        return Layer(
            self.norm(norms.before_attention),
            self.norm(norms.attention_out),
            self.norm(norms.before_mlp),
            self.norm(norms.mlp_out),
            *map(self.norm, query_key_norms(attention)),
            qkv,
            output,
            gate_up,
            down,
            mixture,
            how,
            self.rotaries.index(self._kinds[index]),
        )

    def _mixture(self, index: int, mlp: Any) -> Mixture:
        self._mixture_bytes += PackedLayers(mlp, self._library).num_bytes
        plain = type(mlp).__name__ in _PLAIN_MIXTURES and isinstance(mlp.experts, PackedExperts)
        products, router = (mlp.experts.products, mlp.gate) if plain else (None, None)
        if products is None or not isinstance(router, PackedRouter):
            self.outside[index] = mlp
            return Mixture()
        gate_up, down = (self._kept((Linear * len(each))(*(weight.struct for weight in each))) for each in products)
        return Mixture(len(gate_up), router.top, router.normalize, router.packed.struct, gate_up, down)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Of another product beside the layers."""
        packed = PackedWeight(self._library, weight, bias)
        self._packed.append(packed)
        return packed.struct

    def norm(self, norm: Any) -> int | None:
        """What a norm multiplies with, null where there is none."""
        return self._kept(norm_weight(self._module, norm)).data_ptr() if is_norm(norm) else None

    def _kept(self, memory: Any) -> Any:
        """``memory``, which structs point into."""
        self._keep.append(memory)
        return memory


def _exchange(part: Part | None) -> Exchange:
    memory = None if part is None else part.shared_memory
    return Exchange() if memory is None else Exchange(memory.base, memory.rank, memory.size, PIECE)


def turns(
    module: Any, kind: str | None, positions: torch.Tensor, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines float32 ``[tokens, rotary size]`` of int64 ``positions`` ``[tokens]``, or ``[3, tokens]`` in sections, as
    a model's own rotary embedding makes them for layers of a ``kind``, see ``DecoderLayers.rotaries``.
    """
    model = module.model
    if kind == UNROTATED:
        cosines, sines = turns(module, None, positions, like)
        return torch.ones_like(cosines), torch.zeros_like(sines)
    at = positions[None] if positions.ndim == 1 else positions[:, None]
    made = model.rotary_emb(like, at, **({} if kind is None else {"layer_type": kind}))
    cosines, sines = (each[0].float().contiguous() for each in made)
    if type(module).__name__ in _HALVED:
        return torch.cat([cosines, cosines], dim=1), torch.cat([sines, sines], dim=1)
    return cosines, sines


def empty(linear: Any) -> None:
    """Let go of its weight."""
    linear.weight = torch.nn.Parameter(torch.empty(0, dtype=linear.weight.dtype), requires_grad=False)

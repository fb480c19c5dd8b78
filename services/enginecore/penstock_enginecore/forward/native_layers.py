"""A model's layers as the CPU kernels' decoder takes them."""

from collections.abc import Sequence
from typing import Any

import torch

from penstock_enginecore.forward.native_models import (
    UNROTATED,
    Norms,
    activation,
    epsilon,
    gate_and_up,
    is_gated,
    is_norm,
    linears,
    norm_weight,
    norms_all_heads,
    own_layers,
    query_key_norms,
    query_key_value,
    rotary_kinds,
)
from penstock_enginecore.models.attention_hook import AttentionCall
from penstock_enginecore.native.attention import params_struct
from penstock_enginecore.native.experts import PackedExperts
from penstock_enginecore.native.ffi_structs import Exchange, Layer, Linear, Mixture, Model
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.packed_layers import PackedLayers
from penstock_enginecore.native.router import PackedRouter
from penstock_enginecore.native.weights import PackedWeight, interleaved
from penstock_enginecore.parallel.collectives import PIECE
from penstock_enginecore.parallel.part import Part

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

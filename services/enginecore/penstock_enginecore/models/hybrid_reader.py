"""Reader of the plan of models that have recurrent layers as well as attention, for the CPU decoder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock_enginecore.models.attention_hook import AttentionCall
from penstock_enginecore.models.decoder_plan import (
    UNROTATED,
    ExpertsPlan,
    GatedNorm,
    LayerPlan,
    MLPPlan,
    ModelPlan,
    OtherMixture,
    RecurrentPlan,
)
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.families import Family, sums_to_one
from penstock_enginecore.models.plan_reader import (
    AttentionNames,
    PlanReader,
    embedding_scale,
    is_dense,
    is_divided,
    own_experts,
    rotary_variant,
)
from penstock_enginecore.models.quantization.layers import DOWN, QuantizedLinear

_PLAIN = Family()
_LLAMA = AttentionNames()


@dataclass(frozen=True, slots=True)
class MLPNames:
    """Names of the linear layers of a gated MLP. ``activation`` is the name of its activation module, or None if the
    activation is SiLU and has no module.
    """

    gate_up: tuple[str, ...]
    down: str
    activation: str | None


@dataclass(frozen=True, slots=True)
class Hybrid:
    """Names of the parts of a model class with recurrent layers.

    Attributes:
        mixer: Name of the recurrent layer in a decoder layer.
        norms: Names of the norms before attention and before the MLP.
        final_norm: Name of the norm after the last layer.
        mlp_names: Names of the parts of an MLP if they differ from Llama's names, otherwise None.
    """

    mixer: str
    family: Family = _PLAIN
    mlp: str = "mlp"
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    final_norm: str = "norm"
    attention: AttentionNames = _LLAMA
    mlp_names: MLPNames | None = None


NEMOTRON = "NemotronHForCausalLM"
"""Model class in which each block has only one part: a recurrent layer, attention or an MLP."""
_QWEN = Hybrid("linear_attn", Family(norm_offset=1.0, sections=True), attention=AttentionNames(gated=True))
HYBRIDS: Mapping[str, Hybrid] = {
    "GraniteMoeHybridForCausalLM": Hybrid(
        "mamba", mlp="shared_mlp", mlp_names=MLPNames(("input_linear",), "output_linear", "activation")
    ),
    "Lfm2ForCausalLM": Hybrid(
        "conv",
        mlp="feed_forward",
        norms=("operator_norm", "ffn_norm"),
        final_norm="embedding_norm",
        attention=AttentionNames("out_proj", ("q_layernorm", "k_layernorm")),
        mlp_names=MLPNames(("w1", "w3"), "w2", None),
    ),
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
}
"""Classes of models that have attention or a recurrent layer, and an MLP, in each layer."""


def plan_hybrid(module: Any, calls: Sequence[AttentionCall]) -> ModelPlan:
    """Return the plan of a loaded model with recurrent layers. ``calls`` are the attention calls of one of its forward
    passes. Raises UnsuitableError, with the name of the unknown part.
    """
    kind = type(module).__name__
    if kind == NEMOTRON:
        blocks = _BlockReader(Family(), module.model)
        blocks.expect(module, "ForCausalLM", ("model", "lm_head"))
        return blocks.blocks(module.lm_head, calls)
    if kind not in HYBRIDS:
        known = ", ".join(sorted([*HYBRIDS, NEMOTRON]))
        raise UnsuitableError(f"{kind} is not one of the supported classes with recurrent layers: {known}")
    layout = HYBRIDS[kind]
    reader = _HybridReader(layout, module.model)
    reader.expect(module, "ForCausalLM", ("model", "lm_head"))
    return reader.hybrid(module.config, module.lm_head, calls)


def hybrid_has_mixtures(module: Any) -> bool:
    """Return whether the model's class is in ``HYBRIDS`` and some of the model's MLPs are mixtures of experts."""
    if type(module).__name__ == NEMOTRON:
        return any(block.block_type == "moe" for block in module.model.layers)
    layout = HYBRIDS.get(type(module).__name__)
    if layout is None or layout.mlp_names is not None:
        return False
    return not all(is_dense(getattr(layer, layout.mlp)) for layer in module.model.layers)


class _NoRotary(torch.nn.Module):
    """Rotary embedding for models without rotary positions: no elements of a head are rotated."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines ``[1, tokens, 0]``."""
        empty = x.new_empty(*position_ids.shape, 0)
        return empty, empty


class _RecurrentReader(PlanReader):
    """Base of the readers: reads recurrent layers of a kind that several model classes have."""

    def duality(self, mixer: Any, kind: str) -> RecurrentPlan:
        """Return the plan of a layer with Mamba-2's recurrence. The class name of the layer ends in ``kind``."""
        self.expect(mixer, kind, ("in_proj", "conv1d", "act", "norm", "out_proj"), ("A_log", "dt_bias", "D"))
        self.expect(mixer.norm, "RMSNormGated", (), ("weight",))
        inner, channels = int(mixer.intermediate_size), int(mixer.conv_dim)
        least, largest = mixer.time_step_limit
        return RecurrentPlan(
            kind="duality",
            inputs=(self.linear(mixer.in_proj),),
            output=self.linear(mixer.out_proj),
            convolution=(mixer.conv1d.weight, mixer.conv1d.bias),
            activates=self._activates(mixer),
            num_heads=int(mixer.num_heads),
            num_key_heads=int(mixer.n_groups),
            key_size=int(mixer.ssm_state_size),
            value_size=int(mixer.head_dim),
            channels_at=inner,
            gate_at=0,
            step_at=inner + channels,
            beta_at=0,
            decay=mixer.A_log,
            step_bias=mixer.dt_bias,
            skip=mixer.D,
            norm=GatedNorm(
                mixer.norm.weight, float(mixer.norm.variance_epsilon), int(mixer.norm.group_size), gates_first=True
            ),
            step_limits=(float(least), float(largest)),
        )

    def _activates(self, mixer: Any) -> bool:
        """Return True if the activation after the convolution is SiLU. Raises UnsuitableError for other activations."""
        if mixer.activation != "silu":
            raise UnsuitableError(
                f"{self._names[mixer]} uses the activation function {mixer.activation}, which this decoder does not support"
            )
        return True


class _HybridReader(_RecurrentReader):
    """Reads the plan of a model from the modules of ``base``, the model without its head."""

    def __init__(self, layout: Hybrid, base: Any) -> None:
        super().__init__(layout.family, base)
        self._layout = layout

    def hybrid(self, config: Any, head: Any, calls: Sequence[AttentionCall]) -> ModelPlan:
        """Return the plan of the model. ``calls`` are the attention calls of one forward pass, in order."""
        base, layout = self._base, self._layout
        rotary = getattr(base, "rotary_emb", None)
        self.expect(base, "Model", ("embed_tokens", "layers", layout.final_norm, *(("rotary_emb",) if rotary else ())))
        if rotary is not None:
            self.expect(rotary, "RotaryEmbedding", ())
        attentions = [layer.self_attn for layer in base.layers if getattr(layer, "self_attn", None) is not None]
        if [call.module for call in calls] != attentions or not attentions:
            raise UnsuitableError(
                "the model has no attention layers, or does not call them in the order in which it lists them"
            )
        kinds = {each: UNROTATED if rotary is None else rotary_variant(rotary, each) for each in attentions}
        variants, by_module = sorted(set(kinds.values())), {call.module: call for call in calls}

        def layer_plan(layer: Any) -> LayerPlan:
            attention = getattr(layer, "self_attn", None)
            if attention is None:
                return self._layer_plan(layer, layout.mixer, self._recurrent(getattr(layer, layout.mixer)))
            at = variants.index(kinds[attention])
            return self._layer_plan(
                layer, "self_attn", self.attention(attention, by_module[attention], at, layout.attention)
            )

        return ModelPlan(
            family=layout.family,
            embedding=base.embed_tokens.weight,
            embedding_scale=embedding_scale(base.embed_tokens),
            input_scale=float(getattr(base, "embedding_multiplier", 1.0)),
            layers=tuple(layer_plan(layer) for layer in base.layers),
            norm=self.norm(getattr(base, layout.final_norm)),
            head=self.linear(head) if isinstance(head, torch.nn.Linear | QuantizedLinear) else None,
            logits_divisor=float(getattr(config, "logits_scaling", 1.0)),
            logits_softcap=None,
            rotary=_NoRotary() if rotary is None else rotary,
            rotary_variants=tuple(variants),
        )

    def _layer_plan(self, layer: Any, mixer: str, attention: Any) -> LayerPlan:
        layout = self._layout
        self.expect(layer, "DecoderLayer", (mixer, layout.mlp, *layout.norms))
        mlp = getattr(layer, layout.mlp)
        before = tuple(self.norm(getattr(layer, name)) for name in layout.norms)
        return LayerPlan(
            name=self._names[layer],
            module=layer,
            mlp_module=mlp,
            attention=attention,
            mlp=self._hybrid_mlp(mlp),
            norms_before=(before[0], before[1]),
            norms_after=(None, None),
            residual_scale=float(getattr(layer, "residual_multiplier", 1.0)),
        )

    def _hybrid_mlp(self, mlp: Any) -> MLPPlan | ExpertsPlan | OtherMixture:
        names = self._layout.mlp_names
        if names is None:
            return self.mlp_or_experts(mlp)
        activation = () if names.activation is None else (names.activation,)
        self.expect(mlp, "MLP", (*names.gate_up, names.down, *activation))
        return MLPPlan(
            tuple(self.linear(getattr(mlp, name)) for name in names.gate_up),
            self.linear(getattr(mlp, names.down)),
            "silu" if names.activation is None else self.activation(mlp, names.activation),
        )

    def _recurrent(self, mixer: Any) -> RecurrentPlan:
        if hasattr(mixer, "in_proj_qkv"):
            return self._delta_rule(mixer)
        return self.duality(mixer, "MambaLayer") if hasattr(mixer, "A_log") else self._short_convolution(mixer)

    def _delta_rule(self, mixer: Any) -> RecurrentPlan:
        inputs = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        self.expect(mixer, "GatedDeltaNet", (*inputs, "conv1d", "norm", "out_proj"), ("A_log", "dt_bias"))
        self.expect(mixer.norm, "RMSNormGated", (), ("weight",))
        channels, heads, size = int(mixer.conv_dim), int(mixer.num_v_heads), int(mixer.head_v_dim)
        return RecurrentPlan(
            kind="delta rule",
            inputs=tuple(self.linear(getattr(mixer, name)) for name in inputs),
            output=self.linear(mixer.out_proj),
            convolution=(mixer.conv1d.weight, mixer.conv1d.bias),
            activates=self._activates(mixer),
            num_heads=heads,
            num_key_heads=int(mixer.num_k_heads),
            key_size=int(mixer.head_k_dim),
            value_size=size,
            channels_at=0,
            gate_at=channels,
            step_at=channels + heads * size + heads,
            beta_at=channels + heads * size,
            decay=mixer.A_log,
            step_bias=mixer.dt_bias,
            skip=None,
            norm=GatedNorm(mixer.norm.weight, float(mixer.norm.variance_epsilon), size, gates_first=False),
            step_limits=(0.0, float("inf")),
        )

    def _short_convolution(self, mixer: Any) -> RecurrentPlan:
        self.expect(mixer, "ShortConv", ("in_proj", "conv", "out_proj"))
        output = self.linear(mixer.out_proj)
        channels = output.in_features
        return RecurrentPlan(
            kind="short convolution",
            inputs=(self.linear(mixer.in_proj),),
            output=output,
            convolution=(mixer.conv.weight, mixer.conv.bias),
            activates=False,
            num_heads=0,
            num_key_heads=0,
            key_size=0,
            value_size=0,
            channels_at=2 * channels,
            gate_at=channels,
            step_at=0,
            beta_at=0,
            decay=None,
            step_bias=None,
            skip=None,
            norm=None,
            step_limits=(0.0, float("inf")),
        )


class _BlockReader(_RecurrentReader):
    """Reads the plan of a model whose blocks have one part each. A block with an MLP belongs to the layer of the block
    before it.
    """

    def blocks(self, head: Any, calls: Sequence[AttentionCall]) -> ModelPlan:
        """Return the plan of the model. ``calls`` are the attention calls of one forward pass, in order."""
        base = self._base
        self.expect(base, "Model", ("embeddings", "layers", "norm_f"))
        attentions = [block.mixer for block in base.layers if block.block_type == "full_attention"]
        if [call.module for call in calls] != attentions or not attentions:
            raise UnsuitableError(
                "the model has no attention layers, or does not call them in the order in which it lists them"
            )
        by_module = {call.module: call for call in calls}
        layers: list[LayerPlan] = []
        blocks = list(base.layers)
        while blocks:
            first = blocks.pop(0)
            if first.block_type not in ("linear_attention", "full_attention"):
                raise UnsuitableError(f"{self._names[first]} has an MLP after another MLP")
            second = blocks.pop(0) if blocks and blocks[0].block_type in ("mlp", "moe") else None
            layers.append(self._joined(first, second, by_module))
        return ModelPlan(
            family=self._family,
            embedding=base.embeddings.weight,
            embedding_scale=embedding_scale(base.embeddings),
            input_scale=1.0,
            layers=tuple(layers),
            norm=self.norm(base.norm_f),
            head=self.linear(head) if isinstance(head, torch.nn.Linear | QuantizedLinear) else None,
            logits_divisor=1.0,
            logits_softcap=None,
            rotary=_NoRotary(),
            rotary_variants=(UNROTATED,),
        )

    def _joined(self, first: Any, second: Any, calls: Mapping[Any, AttentionCall]) -> LayerPlan:
        for block in filter(None, (first, second)):
            self.expect(block, "Block", ("norm", "mixer"))
        mixer = first.mixer
        recurrent = first.block_type == "linear_attention"
        return LayerPlan(
            name=self._names[first],
            module=first,
            mlp_module=None if second is None else second.mixer,
            attention=self.duality(mixer, "Mamba2Mixer") if recurrent else self.attention(mixer, calls[mixer], 0),
            mlp=None if second is None else self._block_mlp(second.mixer),
            norms_before=(self.norm(first.norm), None if second is None else self.norm(second.norm)),
            norms_after=(None, None),
            residual_scale=1.0,
        )

    def _block_mlp(self, mlp: Any) -> MLPPlan | ExpertsPlan | OtherMixture:
        if not hasattr(mlp, "experts"):
            return self.mlp(mlp)
        try:
            return self._ungated_experts(mlp)
        except UnsuitableError as e:
            return OtherMixture(str(e))

    def _ungated_experts(self, mlp: Any) -> ExpertsPlan:
        """Return the plan of experts without gates, with DeepSeek's grouped routing and a shared expert."""
        latent = ("fc1_latent_proj", "fc2_latent_proj")
        self.expect(mlp, "NemotronHMoE", ("gate", "experts", "shared_experts", *latent))
        if any(type(getattr(mlp, name)) is not torch.nn.Identity for name in latent):
            raise UnsuitableError(f"the experts of {self._names[mlp]} have latent inputs and outputs")
        gate, experts = mlp.gate, own_experts(mlp.experts)
        self.expect(gate, "TopkRouter", (), ("weight",))
        self.expect(experts, "Experts", ("act_fn",), ("up_proj", DOWN))
        return ExpertsPlan(
            router=gate.weight,
            gate_up=experts.up_proj,
            down=experts.down_proj,
            top_k=int(gate.top_k),
            renormalize=sums_to_one(gate),
            activation=self.activation(experts, "act_fn"),
            grouped=self._routing(mlp),
            shared=self.mlp(mlp.shared_experts),
            gated=False,
            divided=is_divided(mlp.experts),
        )

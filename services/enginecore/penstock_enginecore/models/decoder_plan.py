"""Plan of a model's layers: the layers that a decoder computes, and the modules that have the layers' weights. The CPU
decoder and the GPU decoder use this plan.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.families import Family, Turned
from penstock_enginecore.models.quantization.layers import QuantizedLinear, QuantizedStack
from penstock_enginecore.models.rope import QueryScale

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""Name of the activation function of an MLP. ``gelu`` is the exact function; ``gelu_tanh`` is the usual approximation.
``relu2`` is the squared ReLU.
"""
UNROTATED = ("unrotated",)
"""Rotary variant of layers that do not rotate queries and keys."""

T = TypeVar("T")

Linear = torch.nn.Linear | QuantizedLinear
ExpertsWeight = torch.nn.Parameter | QuantizedStack


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm, or LayerNorm if ``centered``, which subtracts the mean first. The normalized value is multiplied by
    ``weight + offset``. The offset is 1 in Gemma models, and 0 in others. ``width`` is the number of elements of a norm
    without a weight.
    """

    weight: torch.nn.Parameter | None
    eps: float
    offset: float
    centered: bool = False
    bias: torch.nn.Parameter | None = None
    width: int = 0

    @property
    def size(self) -> int:
        """Number of elements that the norm covers."""
        return self.width if self.weight is None else len(self.weight)

    @property
    def is_plain(self) -> bool:
        """Whether the norm is an RMSNorm with a weight."""
        return self.weight is not None and not self.centered

    @property
    def factors(self) -> torch.Tensor:
        """Factors of the normalized values, float32 ``[size]``."""
        return torch.ones(self.size) if self.weight is None else self.weight.detach().float() + self.offset

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of float32 ``x`` ``[..., size]``."""
        x = x - x.mean(-1, keepdim=True) if self.centered else x
        y = self.factors * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))
        return y if self.bias is None else y + self.bias.float()


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Attention of a layer.

    Attributes:
        qkv: Projections to queries, keys and values: one linear layer for all three, or three linear layers.
        rotary: Index of a rotary variant in ``ModelPlan.rotary_variants``.
        gated: Whether the query projection has, for each head, first the rows of the query and then the rows of a gate.
            The head's output is multiplied by the logistic function of the gate.
        query_scale: Scaling of queries by position, or None.
        value_eps: Epsilon of an RMSNorm without weights that is applied to values, or None.
        keys_as_values: Whether ``qkv`` has no projection to values. The values are then the keys before their norm and
            rotation.
        by_head: Whether ``qkv`` is one projection that has, for each head, first the rows of the query, then those of the
            key and of the value.
        norms: Norms of queries and keys, or None. The norm of keys is None if there is a ``donor``.
        donor: Index of the layer whose keys and values this layer reads, or None. With a donor, ``qkv`` is only the
            projection to queries.
    """

    qkv: tuple[Linear, ...]
    output: Linear
    num_heads: int
    num_kv_heads: int
    head_size: int
    norms: tuple[Norm, Norm | None] | None
    rotary: int
    params: AttentionParams
    gated: bool = False
    query_scale: QueryScale | None = None
    value_eps: float | None = None
    keys_as_values: bool = False
    donor: int | None = None
    by_head: bool = False

    @property
    def linears(self) -> list[Linear]:
        """All linear layers of the attention."""
        return [*self.qkv, self.output]

    @property
    def own_norms(self) -> tuple[Norm, Norm] | None:
        """Norms of queries and keys of a layer with keys of its own, or None."""
        if self.norms is None:
            return None
        query_norm, key_norm = self.norms
        return query_norm, present(key_norm, "norm of keys")

    @property
    def norms_all_heads(self) -> bool:
        """Whether the norm of queries covers all heads together, and not each head separately. The same applies to
        keys.
        """
        return self.norms is not None and self.norms[0].size != self.head_size


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """Latent attention (MLA) of a layer. ``norms`` are the norm of the low-rank queries, or None, and the norm of the latent.

    Attributes:
        down: Two projections of the hidden state: one to the queries or to their low-rank input, one to the latent and
            to the elements of keys that are rotated.
        up: Projection of the low-rank input to the queries, or None if ``down`` computes the queries.
        interleaved: Whether neighbours are rotated together, and not elements of the two halves.
        stays_interleaved: Whether the model's own modules store rotated neighbours as neighbours, and not in halves.
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
    stays_interleaved: bool
    rotary: int
    params: AttentionParams

    @property
    def linears(self) -> list[Linear]:
        """All linear layers of the attention."""
        return [*self.down, *(() if self.up is None else (self.up,)), self.expansion, self.output]


RecurrenceKind = Literal["delta rule", "duality", "short convolution"]
"""Kind of a recurrent layer: gated delta rule, Mamba-2's state space duality, or a short convolution between two
gates.
"""


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """RMSNorm over groups of ``size`` elements, with a gate that multiplies the input or the output of the norm.

    Attributes:
        weight: ``[heads * value size]``, or ``[value size]`` if all heads have the same weight.
        gates_first: Whether the gate multiplies the input, and not the output.
    """

    weight: torch.nn.Parameter
    eps: float
    size: int
    gates_first: bool


@dataclass(frozen=True, slots=True)
class RecurrentPlan:
    """Recurrent layer that replaces the attention of a layer. The outputs of all linear layers in ``inputs``,
    concatenated, are one row for each token. ``channels_at``, ``gate_at``, ``step_at`` and ``beta_at`` are the indices
    in a row at which the convolution's inputs, the gate, the steps and the beta values of the recurrence begin. A short
    convolution multiplies its inputs by the ``channels`` elements at ``step_at``.

    Attributes:
        convolution: Weight ``[channels, 1, kernel]`` of the convolution, and its bias ``[channels]`` or None.
        decay: Parameter ``A_log`` ``[heads]`` of the decays, or None.
        step_bias: Bias ``[heads]`` of the steps, or None.
        skip: Parameter ``D`` ``[heads]``, the factor with which inputs are added to the output, or None.
        step_limits: Minimum and maximum value of steps.
    """

    kind: RecurrenceKind
    inputs: tuple[Linear, ...]
    output: Linear
    convolution: tuple[torch.nn.Parameter, torch.nn.Parameter | None]
    activates: bool
    num_heads: int
    num_key_heads: int
    key_size: int
    value_size: int
    channels_at: int
    gate_at: int
    step_at: int
    beta_at: int
    decay: torch.nn.Parameter | None
    step_bias: torch.nn.Parameter | None
    skip: torch.nn.Parameter | None
    norm: GatedNorm | None
    step_limits: tuple[float, float]

    @property
    def linears(self) -> list[Linear]:
        """All linear layers of the recurrent layer."""
        return [*self.inputs, self.output]

    @property
    def norms(self) -> None:
        """Return None, because a recurrent layer has no norms of queries and keys."""
        return None


@dataclass(frozen=True, slots=True)
class MLPPlan:
    """MLP. ``gate_up`` is one linear layer for gate and up values, or two linear layers. If the MLP is not ``gated``,
    ``gate_up`` is only the up projection.
    """

    gate_up: tuple[Linear, ...]
    down: Linear
    activation: Activation
    gated: bool = True

    @property
    def is_merged(self) -> bool:
        """Whether one linear layer computes gate and up values."""
        return self.gated and len(self.gate_up) == 1

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
    """Routing of DeepSeek-V3, or of DeepSeek-V2 if ``correction`` is None.

    In DeepSeek-V3, an expert's score is the sigmoid of its logit. Selection adds the ``correction`` to the score and
    keeps the ``kept`` groups of consecutive experts with the largest sums of their two best scores. In DeepSeek-V2,
    scores are probabilities, and the router keeps the groups whose best score is largest. The weights of the chosen
    experts are multiplied by ``scale``. ``correction`` returns float32 ``[experts]`` and is called in each step,
    because the buffer with the correction may move.
    """

    correction: Callable[[], torch.Tensor] | None
    groups: int
    kept: int
    scale: float


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """Mixture of experts.

    The weights of a token's experts are the probabilities of the ``top_k`` most likely experts, scaled to sum to 1 if
    ``renormalize``. The MLP ``shared`` computes every token in addition to these experts. ``router`` is ``[experts,
    hidden size]``, ``gate_up`` ``[experts, 2 * intermediate size, hidden size]`` and ``down`` ``[experts, hidden size,
    intermediate size]``. With ``ClampedGate`` or ``scales_inputs`` the last two sizes are swapped. ``biases`` are the
    biases of router, gate_up and down.

    The output of ``shared`` is multiplied by the logistic function of the output of ``shared_gate``, if the mixture has
    this linear layer. If ``scales_inputs``, as in Llama 4, the weight of an expert is the logistic function of its
    logit, and multiplies the input of the expert instead of its output. If the experts are not ``gated``, ``gate_up`` is
    only the up projection, ``[experts, intermediate size, hidden size]``. If the experts are ``divided`` among ranks,
    ``gate_up`` and ``down`` have only this rank's experts.
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
    shared_gate: Linear | None = None
    scales_inputs: bool = False
    gated: bool = True
    divided: bool = False

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return len(self.router)


@dataclass(frozen=True, slots=True)
class OtherMixture:
    """Mixture of experts that only the model's own module can compute. ``reason`` names the part that decoders do not
    know.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class BesidePlan:
    """Mixture of experts that a layer has beside its MLP, as in Gemma 4. MLP, router and experts read the same hidden
    states, each after a separate norm. The layer adds the normed outputs of MLP and experts, and continues with the norm
    after the MLP.

    The weights of a token's experts are the probabilities of the ``top_k`` most likely experts, scaled to sum to 1, and
    then multiplied by ``scales``.

    Attributes:
        module: Module of the experts.
        router: Linear layer from hidden states to one logit for each expert.
        router_norm: Norm of the router's input. Its output is multiplied by ``router_factor``.
        scales: Factor of the weight of each expert, ``[experts]``.
        norm_before: Norm of the experts' input.
        norms_after: Norms of the outputs of MLP and experts.
    """

    module: torch.nn.Module
    router: Linear
    router_norm: Norm
    router_factor: float
    scales: torch.nn.Parameter
    top_k: int
    activation: Activation
    norm_before: Norm
    norms_after: tuple[Norm, Norm]

    @property
    def norms(self) -> list[Norm]:
        """All norms of router, experts and outputs."""
        return [self.router_norm, self.norm_before, *self.norms_after]


@dataclass(frozen=True, slots=True)
class LayerEmbeddingPlan:
    """Embedding of token ids that a layer adds to its output, as in Gemma 4 E2B. ``gate`` computes a few numbers from the
    hidden states. The activation is applied to them, and they are multiplied by the token's inputs for this layer; see
    ``LayerInputsPlan``. ``projection`` and then ``norm`` compute the addition.
    """

    gate: Linear
    projection: Linear
    norm: Norm
    activation: Activation

    @property
    def linears(self) -> list[Linear]:
        """All linear layers of the embedding."""
        return [self.gate, self.projection]


@dataclass(frozen=True, slots=True)
class LayerInputsPlan:
    """Inputs of the embeddings of all layers, ``[layers, size]`` for each token: the sum of the token's row in the
    table of ``embedding``, and of the normed output of ``projection`` for the first layer's input, times ``scale``.

    Attributes:
        embedding: Module that returns rows ``[layers * size]``.
        projection_scale: Factor of the output of ``projection`` before the norm.
        norm: Norm of the ``size`` outputs for a layer.
        id_of_media: Token id whose row belongs to tokens with media.
    """

    embedding: torch.nn.Module
    projection: Linear
    projection_scale: float
    norm: Norm
    scale: float
    id_of_media: int


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Layer of a model. The order of operations is: norm, attention, norm, add, norm, MLP, norm, add. A layer may leave
    out some of the norms.

    ``norms_before`` are the norms before attention and MLP. ``norms_after`` are the norms before each add.
    ``residual_scale`` multiplies the outputs of attention and MLP before each add. ``output_scales`` are further
    factors of the output of attention and of the output of the MLP. ``layer_scale`` multiplies the result of the last
    add. A recurrent layer may replace attention. A layer without MLP ends after the first addition. In a ``parallel``
    layer, the input of the norm before the MLP is the layer's input. ``beside`` is a mixture of experts in a layer that
    also has an MLP. ``embedding`` is added after the MLP.
    """

    name: str
    module: torch.nn.Module
    mlp_module: torch.nn.Module | None
    attention: AttentionPlan | LatentPlan | RecurrentPlan
    mlp: MLPPlan | ExpertsPlan | OtherMixture | None
    norms_before: tuple[Norm | None, Norm | None]
    norms_after: tuple[Norm | None, Norm | None]
    residual_scale: float
    output_scales: tuple[float, float] = (1.0, 1.0)
    layer_scale: float = 1.0
    parallel: bool = False
    beside: BesidePlan | None = None
    embedding: LayerEmbeddingPlan | None = None


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Plan of a model. ``head`` is None if another pipeline stage has the output head.

    Attributes:
        embedding_scale: Factor by which the module multiplies embeddings, or None if the module does more than scale.
        input_scale: Factor of all inputs of the first layer, also of embeddings that the client or an encoder computed.
        rotary_variants: Arguments of ``rotary`` for each variant.
        layer_inputs: Inputs of the layers' embeddings of token ids, or None if the layers have no such embeddings.
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
    layer_inputs: LayerInputsPlan | None = None

    @property
    def linears(self) -> list[Linear]:
        """Linear layers of the model that the decoder replaces by its own matrix products."""
        found: list[Linear] = []
        for layer in self.layers:
            found += layer.attention.linears
            mlp = layer.mlp.shared if isinstance(layer.mlp, ExpertsPlan) else layer.mlp
            found += mlp.linears if isinstance(mlp, MLPPlan) else []
            if isinstance(layer.mlp, ExpertsPlan) and layer.mlp.shared_gate is not None:
                found.append(layer.mlp.shared_gate)
            found += layer.embedding.linears if layer.embedding else []
        return [*found, self.layer_inputs.projection] if self.layer_inputs else found

    @property
    def stacks(self) -> list[QuantizedStack]:
        """Quantized weights of experts that the decoder multiplies with its own matrix products."""
        experts = [layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertsPlan)]
        weights = [weight for each in experts for weight in (each.gate_up, each.down)]
        return [weight for weight in weights if isinstance(weight, QuantizedStack)]

    @property
    def own_head(self) -> Linear:
        """Output head of a model that is not split into pipeline stages."""
        if self.head is None:
            raise UnsuitableError("another pipeline stage has the model's head")
        return self.head

    @property
    def norms(self) -> list[Norm]:
        """All norms of hidden states, queries and keys."""
        found: list[Norm | None] = [self.norm, self.layer_inputs.norm if self.layer_inputs else None]
        for layer in self.layers:
            found += [*layer.norms_before, *layer.norms_after, *(layer.attention.norms or ())]
            found += layer.beside.norms if layer.beside else []
            found += [layer.embedding.norm] if layer.embedding else []
        return [norm for norm in found if norm is not None]

    def turns(
        self, variant: tuple[str, ...], positions: torch.Tensor, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines float32 ``[tokens, rotary size]`` for a rotary variant, computed by the model's own
        rotary embedding.

        ``positions`` is int64 ``[tokens]``, or ``[3, tokens]`` if each token has three rotary positions.
        """
        if variant == UNROTATED:
            cosines, _ = self.turns((), positions, like)
            return torch.ones_like(cosines), torch.zeros_like(cosines)
        at = positions[None] if positions.ndim == 1 else positions[:, None]
        turns, turned = self.rotary(like, at, *variant), self.family.turned
        if isinstance(turns, torch.Tensor):  # one complex number for each pair of rotated elements
            turns, turned = (turns.real, turns.imag), "half"
        cosines, sines = (self._spread(each[0].float(), turned) for each in turns)
        return cosines, sines

    def _spread(self, turns: torch.Tensor, turned: Turned) -> torch.Tensor:
        """Return cosines or sines for each rotated element of a head."""
        if self.family.pairs and turned != "pairs":
            half = turns if turned == "half" else turns[:, : turns.shape[1] // 2]
            return half.repeat_interleave(2, dim=1)
        return torch.cat([turns, turns], dim=1) if turned == "half" else turns.contiguous()

    def rotary_size(self, variant: int) -> int:
        """Return the number of elements of a head that are rotated, for the rotary variant with this index."""
        device = self.embedding.device
        at, like = torch.zeros(1, dtype=torch.int64, device=device), torch.empty(0, device=device)
        return self.turns(self.rotary_variants[variant], at, like)[0].shape[1]


def present(part: T | None, name: str) -> T:
    """Return ``part``. If ``part`` is None, raises UnsuitableError with the part's ``name``."""
    if part is None:
        raise UnsuitableError(f"the model has no {name}")
    return part

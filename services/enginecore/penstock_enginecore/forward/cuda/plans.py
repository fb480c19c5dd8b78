"""What the fused decoder computes for a model, as data: its layers, and the modules that hold their weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.forward.cuda.kernel_api import Activation, Norm
from penstock_enginecore.forward.cuda.linear import Linear
from penstock_enginecore.models.quantization.layers import QuantizedStack

ExpertsWeight = torch.nn.Parameter | QuantizedStack


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


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Norm, attention, add, norm, MLP, add. ``norms_after`` stand between attention and its add, and MLP and its. What is added
    is multiplied by ``residual_scale``.
    """

    name: str
    module: torch.nn.Module
    attention: AttentionPlan | LatentPlan
    mlp: MLPPlan | ExpertsPlan
    norms_before: tuple[Norm, Norm]
    norms_after: tuple[Norm, Norm] | None
    residual_scale: float


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """``embedding`` ``[vocab, hidden size]``, ``embedding_scale`` what its rows are multiplied by; ``input_scale``: what all that
    the first layer gets is, vectors that stand for tokens included. ``rotary`` makes cosines and sines; ``rotary_variants``:
    the arguments that it takes for each variant; ``rotary_twice``: whether it gives numbers for both halves of a head.
    ``logits_softcap``: logits, divided by ``logits_divisor``, become ``cap * tanh(logit / cap)``.
    """

    embedding: torch.nn.Parameter
    embedding_scale: float
    input_scale: float
    layers: tuple[LayerPlan, ...]
    norm: Norm
    head: Linear
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
            mlp = layer.mlp if isinstance(layer.mlp, MLPPlan) else layer.mlp.shared
            if mlp is not None:
                found += [*mlp.gate_up, mlp.down]
        return found

    @property
    def stacks(self) -> list[QuantizedStack]:
        """Quantized weights of experts, which products stand for."""
        experts = [layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertsPlan)]
        weights = [weight for each in experts for weight in (each.gate_up, each.down)]
        return [weight for weight in weights if isinstance(weight, QuantizedStack)]

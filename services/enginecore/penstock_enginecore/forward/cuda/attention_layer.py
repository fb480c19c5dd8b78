"""The attention of a layer of the fused decoder, products included."""

from dataclasses import dataclass
from typing import Protocol

import torch

from penstock_enginecore.attention.kv_cache import LayerCache
from penstock_enginecore.forward.cuda.activations import Activations
from penstock_enginecore.forward.cuda.adapted_products import Adapt, unadapted
from penstock_enginecore.forward.cuda.buffers import StepInputs
from penstock_enginecore.forward.cuda.kernel_api import Kernels, RotaryTable
from penstock_enginecore.forward.cuda.linear import Held, Product, merged
from penstock_enginecore.forward.cuda.plans import AttentionPlan


class Attention(Protocol):
    """Part of a layer."""

    @property
    def held(self) -> tuple[Held, ...]:
        """What it holds of the model's weights."""

    @property
    def first(self) -> Product:
        """The product whose output is ``Activations.qkv``."""

    @property
    def output(self) -> Product:
        """The last product: of ``Activations.attended``."""

    def run(
        self,
        x: torch.Tensor,
        inputs: StepInputs,
        activations: Activations,
        cache: LayerCache,
        rotary: RotaryTable,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """From ``x`` into ``out``, both ``[tokens, hidden size]``, times ``scale``. Writes new tokens into ``cache``."""


@dataclass(frozen=True, slots=True)
class HeadsAttention:
    """Queries, keys and values of one product; keys and values of each head are cached."""

    plan: AttentionPlan
    first: Product
    output: Product
    kernels: Kernels

    @classmethod
    def of(cls, plan: AttentionPlan, kernels: Kernels, adapt: Adapt = unadapted) -> "HeadsAttention":
        """Merges the weights that ``plan`` names."""
        first = adapt(plan.qkv, merged(plan.qkv, kernels))
        return cls(plan, first, adapt([plan.output], merged([plan.output], kernels)), kernels)

    @property
    def held(self) -> tuple[Held, ...]:
        """Two products."""
        return self.first, self.output

    def run(
        self,
        x: torch.Tensor,
        inputs: StepInputs,
        activations: Activations,
        cache: LayerCache,
        rotary: RotaryTable,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Within ``activations``."""
        plan = self.plan
        group, keys, values = inputs.groups[cache.group], cache.cache.keys, cache.cache.values
        heads = (-1, plan.num_heads, plan.head_size)
        query, attended = activations.query.view(heads), activations.attended.view(heads)
        self.first.product(x, activations.qkv)
        self.kernels.prologue(
            activations.qkv,
            self.first.bias,
            plan.norms,
            rotary,
            inputs.positions,
            group.slots,
            keys,
            values,
            query,
            cache.cache.scales,
        )
        self.kernels.attend(query, keys, values, group, plan.params, attended, cache.cache.scales)
        self.output.affine(activations.attended, out, scale)

"""What stands behind a layer's second norm: a gated MLP, or experts of which each token takes some.

Experts compute by grouped products: tokens in the order of their experts, and on the device where each expert's end. So nothing
is read on the host, and a step with experts can be captured; what it needs in between is allocated. Batch-invariant kernels have
sums of their own, as torch's go by how many tokens there are.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from penstock_enginecore.forward.cuda.activations import Activations
from penstock_enginecore.forward.cuda.adapted_products import Adapt, unadapted
from penstock_enginecore.forward.cuda.buffers import StepInputs
from penstock_enginecore.forward.cuda.grouped import GroupedProduct, grouped
from penstock_enginecore.forward.cuda.grouped_routing import grouped_route
from penstock_enginecore.forward.cuda.kernel_api import Kernels
from penstock_enginecore.forward.cuda.linear import Held, Product, merged
from penstock_enginecore.forward.cuda.plans import ClampedGate, ExpertsPlan, MLPPlan


class MLP(Protocol):
    """Part of a layer."""

    @property
    def held(self) -> tuple[Held, ...]:
        """What it holds of the model's weights."""

    def run(
        self, x: torch.Tensor, inputs: StepInputs, activations: Activations, kernels: Kernels, out: torch.Tensor
    ) -> None:
        """From ``x`` into ``out``, both ``[tokens, hidden size]``."""


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """An activation of one product times another. What it puts out is multiplied by ``scale``."""

    plan: MLPPlan
    gate_up: Product
    down: Product
    scale: float

    @classmethod
    def of(cls, plan: MLPPlan, scale: float, kernels: Kernels, adapt: Adapt = unadapted) -> "GatedMLP":
        """Merges the weights that ``plan`` names."""
        gate_up = adapt(plan.gate_up, merged(plan.gate_up, kernels))
        return cls(plan, gate_up, adapt([plan.down], merged([plan.down], kernels)), scale)

    @property
    def held(self) -> tuple[Held, ...]:
        """Two products."""
        return self.gate_up, self.down

    def run(
        self,
        x: torch.Tensor,
        inputs: StepInputs,  # noqa: ARG002 - every token is computed
        activations: Activations,
        kernels: Kernels,
        out: torch.Tensor,
    ) -> None:
        """Within ``activations``."""
        self.compute(x, activations.gate_up, activations.gated, kernels, out)

    def compute(
        self, x: torch.Tensor, gate_up: torch.Tensor, gated: torch.Tensor, kernels: Kernels, out: torch.Tensor
    ) -> None:
        """As ``run``. ``gate_up`` and ``gated``: room for what flows through."""
        self.gate_up.affine(x, gate_up)
        kernels.gated(gate_up, self.plan.activation, gated)
        self.down.affine(gated, out, self.scale)


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts chosen by a router. Dense weights stay in the model's modules, which keep them as they are needed here."""

    plan: ExpertsPlan
    gate_up: GroupedProduct
    down: GroupedProduct
    shared: GatedMLP | None
    scale: float

    @classmethod
    def of(cls, plan: ExpertsPlan, scale: float, kernels: Kernels) -> "Experts":
        """With the products of the weights that ``plan`` names."""
        transposed = isinstance(plan.activation, ClampedGate)
        _, gate_up, down = plan.biases or (None, None, None)
        return cls(
            plan,
            grouped(plan.gate_up, gate_up, kernels, transposed=transposed),
            grouped(plan.down, down, kernels, transposed=transposed),
            None if plan.shared is None else GatedMLP.of(plan.shared, scale, kernels),
            scale,
        )

    @property
    def held(self) -> tuple[Held, ...]:
        """Quantized weights, and those of shared experts."""
        shared = () if self.shared is None else self.shared.held
        return *self.gate_up.held, *self.down.held, *shared

    def run(
        self,
        x: torch.Tensor,
        inputs: StepInputs,
        activations: Activations,  # noqa: ARG002 - rows are as many as experts that tokens take
        kernels: Kernels,
        out: torch.Tensor,
    ) -> None:
        """Tokens of padding have no expert, and what stands in their rows of ``out`` then is of no meaning."""
        plan = self.plan
        weights, chosen = self._route(x, kernels)
        count = inputs.groups[0].query_start_loc[-1]
        is_padding = torch.arange(len(x), device=x.device) >= count
        ids, order = chosen.masked_fill(is_padding[:, None], plan.num_experts).view(-1).sort(stable=True)
        ends = torch.searchsorted(ids, torch.arange(plan.num_experts, device=x.device), right=True, out_int32=True)
        rows = x.index_select(0, order // plan.top_k)
        owners = ids.clamp(max=plan.num_experts - 1)  # rows of no expert are not computed
        gate_up = self.gate_up.run(rows, ends, owners)
        down = self.down.run(self._gate(gate_up, kernels), ends, owners)
        if kernels.batch_invariant:
            places = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=x.device))
            scale = self.scale * (1.0 if plan.grouped is None else plan.grouped.scale)
            kernels.weighted_sum(down, places.view_as(chosen), weights, scale, out, renormalize=plan.renormalize)
        else:
            by_token = torch.empty_like(down).index_copy_(0, order, down).view(len(x), plan.top_k, -1)
            torch.bmm(weights.to(x.dtype)[:, None], by_token, out=out[:, None])
        if self.shared is not None:
            self._add_shared(self.shared, x, kernels, out)

    @staticmethod
    def _add_shared(shared: GatedMLP, x: torch.Tensor, kernels: Kernels, out: torch.Tensor) -> None:
        gated = x.new_empty(len(x), shared.down.in_features)
        own = torch.empty_like(out)
        shared.compute(x, x.new_empty(len(x), shared.gate_up.out_features), gated, kernels, own)
        out.add_(own)

    def _gate(self, gate_up: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        how = self.plan.activation
        if isinstance(how, ClampedGate):
            gate, up = gate_up[:, ::2].clamp(max=how.limit), gate_up[:, 1::2].clamp(min=-how.limit, max=how.limit)
            return (up + 1) * (gate * torch.sigmoid(gate * how.alpha))
        gated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        kernels.gated(gate_up, how, gated)
        return gated

    def _route(self, x: torch.Tensor, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, float32, and experts of each token ``[tokens, top_k]``. Batch-invariant ones are scaled later."""
        if self.plan.grouped is not None:
            return grouped_route(x, self.plan, self.plan.grouped, self.scale, kernels)
        bias = None if self.plan.biases is None else self.plan.biases[0]
        if kernels.batch_invariant:
            logits = x.new_empty(len(x), self.plan.num_experts)
            kernels.product(x, self.plan.router, bias, 1.0, logits)
            # Stable: of experts that are as likely the first is taken, however many rows are sorted.
            ranked, order = torch.softmax(logits, dim=-1, dtype=torch.float32).sort(
                dim=-1, descending=True, stable=True
            )
            return ranked[:, : self.plan.top_k].contiguous(), order[:, : self.plan.top_k].contiguous()
        logits = torch.nn.functional.linear(x, self.plan.router, bias)
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.plan.top_k, dim=-1)
        if self.plan.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * self.scale, chosen


def mlp_of(plan: MLPPlan | ExpertsPlan, scale: float, kernels: Kernels, adapt: Adapt = unadapted) -> MLP:
    """What computes ``plan``. ``scale``: of what is added to the residual. ``adapt``: products, but those beside experts."""
    if isinstance(plan, ExpertsPlan):
        return Experts.of(plan, scale, kernels)
    return GatedMLP.of(plan, scale, kernels, adapt)

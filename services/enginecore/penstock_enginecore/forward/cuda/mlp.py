"""Last part of a layer of the fused decoder: a gated MLP, or a mixture of experts.

Experts use grouped matrix products. Tokens are sorted by expert, and a tensor on the device contains the end of each
expert's tokens. Therefore the host reads nothing from the device, and CUDA graphs can capture steps with experts. Each
step allocates its intermediate tensors. Batch-invariant kernels compute the sums themselves, because the order of
torch's sums depends on the number of tokens.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from penstock_enginecore.forward.cuda.adapters import Adapt, unadapted
from penstock_enginecore.forward.cuda.buffers import Activations, StepInputs
from penstock_enginecore.forward.cuda.kernel_api import Float8Weight, Int4Weight, Mxfp4Weight, StackedWeight
from penstock_enginecore.forward.cuda.linear import Held, Product, int4_weight, joined, keeps, merged
from penstock_enginecore.models.decoder_plan import ClampedGate, ExpertsPlan, GroupedRouting, MLPPlan, OtherMixture
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.quantization.awq_gptq import Awq, Gptq, Packed
from penstock_enginecore.models.quantization.float8 import Float8
from penstock_enginecore.models.quantization.layers import QuantizedStack
from penstock_enginecore.models.quantization.mxfp4 import Mxfp4

if TYPE_CHECKING:  # Triton is imported only if there is a device for its kernels
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels

# DeepSeek's routing selects the best experts of the best groups. DeepSeek-V3 adds a correction to the scores for load
# balance.

_COUNTED = 2
"""Number of a group's best scores whose sum is the score of the group."""


def grouped_route(
    x: torch.Tensor, plan: ExpertsPlan, how: GroupedRouting, scale: float, kernels: "TritonKernels"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts' weights, float32 and multiplied by ``scale``, and the experts' indices, for each token of
    ``x``. Both tensors are ``[tokens, top_k]``.

    For batch-invariant kernels, a later kernel scales and normalizes the weights. If scores are equal, the expert with
    the lower index wins, for any number of tokens.
    """
    logits = _logits(x.float(), plan.router.float(), kernels)
    if how.correction is None:
        scores = logits.softmax(dim=-1)
        groups = scores.view(len(x), how.groups, -1)
        of_groups = groups.amax(dim=-1)
    else:
        scores = logits.sigmoid()
        groups = (scores + how.correction()).view(len(x), how.groups, -1)
        of_groups = groups.topk(_COUNTED, dim=-1)[0].sum(dim=-1)
    order = of_groups.argsort(dim=-1, descending=True, stable=True)
    ranks = order.argsort(dim=-1)
    left = groups.masked_fill((ranks >= how.kept)[:, :, None], float("-inf")).flatten(1)
    chosen = left.argsort(dim=-1, descending=True, stable=True)[:, : plan.top_k].contiguous()
    weights = scores.gather(1, chosen)
    if kernels.batch_invariant:
        return weights, chosen
    if plan.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * (scale * how.scale), chosen


def _logits(x: torch.Tensor, router: torch.Tensor, kernels: "TritonKernels") -> torch.Tensor:
    """Return the router's float32 logits ``[tokens, experts]``."""
    if not kernels.batch_invariant:
        return torch.nn.functional.linear(x, router)
    logits = x.new_empty(len(x), len(router))
    kernels.product(x, router, None, 1.0, logits)
    return logits


# Matrix products of experts: each expert's rows times the expert's weight. Each call allocates its output.

_MXFP4_HALF = 32


class GroupedProduct(Protocol):
    """Grouped matrix product: the rows of each expert are multiplied by the weight of this expert."""

    @property
    def held(self) -> tuple[Held, ...]:
        """Objects that own the weight, or an empty tuple if a module of the model owns the weight."""

    def run(self, rows: torch.Tensor, ends: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """Multiply the rows of each expert by the expert's weight, and add the expert's bias. Returns ``[rows,
        out_features]``.

        Args:
            rows: ``[rows, in_features]``, sorted by expert.
            ends: int32 ``[experts]``, the end of each expert's rows.
            owners: ``[rows]``, the expert of each row. Rows after the last expert's end belong to no expert and are not
                computed.
        """


class DenseGroups:
    """Grouped matrix product with dense weights, by torch or by batch-invariant ``kernels``.

    Args:
        weight: ``[experts, out_features, in_features]``, as in the model's module.
        bias: ``[experts, out_features]``, or None.
        transposed: Whether the last two dimensions of ``weight`` are swapped.
    """

    held: tuple[Held, ...] = ()

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, kernels: "TritonKernels", *, transposed: bool
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._kernels = kernels
        self._transposed = transposed

    def run(self, rows: torch.Tensor, ends: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """Return the result ``[rows, out_features]``; see ``GroupedProduct.run``."""
        weight, transposed = self._weight, self._transposed
        if self._kernels.batch_invariant:
            product = rows.new_empty(len(rows), weight.shape[2 if transposed else 1])
            self._kernels.grouped_product(rows, weight, self._bias, ends, product, transposed=transposed)
            return product
        product = torch.nn.functional.grouped_mm(rows, weight if transposed else weight.transpose(1, 2), offs=ends)
        if self._bias is not None:
            product.add_(self._bias.index_select(0, owners))
        return product


class QuantizedGroups(Held):
    """Grouped matrix product with a weight that stays quantized in memory, by the project's kernels. The model's module
    owns ``bias``; see ``DenseGroups``.
    """

    def __init__(self, weight: StackedWeight, bias: torch.Tensor | None, kernels: "TritonKernels") -> None:
        self._weight = weight
        self._bias = bias
        self._kernels = kernels

    @property
    def held(self) -> tuple[Held, ...]:
        """This object, which owns the quantized weight."""
        return (self,)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The quantized elements, and the zero points and scales if they exist."""
        return list(self._weight.tensors)

    def to(self, device: torch.device) -> None:
        """Move the weight to ``device``."""
        self._weight = self._weight.to(device)

    def run(self, rows: torch.Tensor, ends: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Return the result ``[rows, out_features]``; see ``GroupedProduct.run``."""
        product = rows.new_empty(len(rows), self._weight.numbers.shape[1])
        self._kernels.quantized_grouped_product(rows, self._weight, self._bias, ends, product)
        return product


def grouped(
    weight: torch.nn.Parameter | QuantizedStack,
    bias: torch.Tensor | None,
    kernels: "TritonKernels",
    *,
    transposed: bool,
) -> GroupedProduct:
    """Return the grouped matrix product with ``weight``. Raises UnsuitableError for an unsupported quantization."""
    if isinstance(weight, QuantizedStack):
        return QuantizedGroups(_stacked(weight), bias, kernels)
    return DenseGroups(weight, bias, kernels, transposed=transposed)


@torch.inference_mode(False)
@torch.no_grad()
def _stacked(stack: QuantizedStack) -> StackedWeight:
    """Return the weight of all experts in the kernels' layout.

    8-bit floats are stored once: the weights of the projections become views of the joined weight. 4-bit elements are
    repacked, so a second copy exists until the tensors of the model's module are freed.
    """
    scheme = stack.scheme
    if keeps(scheme) and stack.merged == isinstance(scheme, Mxfp4):
        if isinstance(scheme, Mxfp4):
            return _mxfp4(stack.projections[0])
        if isinstance(scheme, Float8):
            return _float8(stack, scheme)
        if isinstance(scheme, Awq | Gptq | Packed):
            count = len(next(iter(stack.projections[0].values())))
            weights = (joined([int4_weight(each, scheme) for each in stack.of_expert(i)]) for i in range(count))
            return _int4(list(weights))
    raise UnsuitableError(f"quantized experts' weights of type {scheme.name} are not supported")


def _float8(stack: QuantizedStack, scheme: Float8) -> Float8Weight:
    numbers = stack.projections[0][""].data
    count, width, scales = len(numbers), 0, []
    for expert in range(count):
        found = [scheme.by_rows(each) for each in stack.of_expert(expert)]
        scales.append(torch.cat([each for each, _ in found], dim=1))
        width = found[0][1]
    if len(stack.projections) > 1:
        numbers = torch.cat([each[""] for each in stack.projections], dim=1)
        start = 0
        for i, each in enumerate(stack.projections):
            end = start + each[""].shape[1]
            stack.replace(i, "", numbers[:, start:end])
            start = end
    return Float8Weight(numbers, torch.stack(scales), width)


def _int4(weights: list[Int4Weight]) -> Int4Weight:
    """Return one weight that stacks the ``weights`` of all experts."""
    numbers, zeros, scales = (torch.stack(parts) for parts in zip(*(each.tensors for each in weights), strict=True))
    return Int4Weight(numbers, zeros, scales, weights[0].width, weights[0].half)


def _mxfp4(tensors: dict[str, torch.Tensor]) -> Mxfp4Weight:
    blocks, scales = tensors["_blocks"], tensors["_scales"]
    experts, out_features, count, _ = blocks.shape
    half = _MXFP4_HALF if count % 2 == 0 else _MXFP4_HALF // 2
    numbers = blocks.new_empty(experts, out_features, count * _MXFP4_HALF // 2)
    for packed, target in zip(blocks, numbers, strict=True):
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).view(out_features, -1, 2, half)
        target.copy_((codes[:, :, 0] | codes[:, :, 1] << 4).view(out_features, -1))
    return Mxfp4Weight(numbers, scales.transpose(1, 2).contiguous(), half)


class MLP(Protocol):
    """MLP of one layer: a gated MLP or a mixture of experts."""

    @property
    def held(self) -> tuple[Held, ...]:
        """Objects that own the weights of the MLP."""

    def run(
        self, x: torch.Tensor, inputs: StepInputs, activations: Activations, kernels: "TritonKernels", out: torch.Tensor
    ) -> None:
        """Compute the MLP's output ``out`` from its input ``x``, both ``[tokens, hidden size]``."""


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """Gated MLP: a down projection of the activated gate projection times the up projection. The output is multiplied
    by ``scale``.
    """

    plan: MLPPlan
    gate_up: Product
    down: Product
    scale: float

    @classmethod
    def of(cls, plan: MLPPlan, scale: float, kernels: "TritonKernels", adapt: Adapt = unadapted) -> "GatedMLP":
        """Return the MLP that computes ``plan``, with the weights of its gate and up projections merged."""
        gate_up = adapt(plan.gate_up, merged(plan.gate_up, kernels))
        return cls(plan, gate_up, adapt([plan.down], merged([plan.down], kernels)), scale)

    @property
    def held(self) -> tuple[Held, ...]:
        """The merged product of gate and up, and the product of down."""
        return self.gate_up, self.down

    def run(
        self,
        x: torch.Tensor,
        inputs: StepInputs,  # noqa: ARG002 - every token is computed
        activations: Activations,
        kernels: "TritonKernels",
        out: torch.Tensor,
    ) -> None:
        """Compute the MLP, with the buffers of ``activations`` for intermediate results."""
        self.compute(x, activations.gate_up, activations.gated, kernels, out)

    def compute(
        self, x: torch.Tensor, gate_up: torch.Tensor, gated: torch.Tensor, kernels: "TritonKernels", out: torch.Tensor
    ) -> None:
        """Compute the MLP like ``run``, but with the given buffers for intermediate results."""
        self.gate_up.affine(x, gate_up)
        kernels.gated(gate_up, self.plan.activation, gated)
        self.down.affine(gated, out, self.scale)


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts with a router. Dense weights stay in the model's modules, because the modules already store
    them in the required layout.
    """

    plan: ExpertsPlan
    gate_up: GroupedProduct
    down: GroupedProduct
    shared: GatedMLP | None
    scale: float

    @classmethod
    def of(cls, plan: ExpertsPlan, scale: float, kernels: "TritonKernels") -> "Experts":
        """Return the mixture that computes ``plan``, with grouped products for the experts' weights."""
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
        """Objects that own quantized weights and the weights of shared experts."""
        shared = () if self.shared is None else self.shared.held
        return *self.gate_up.held, *self.down.held, *shared

    def run(
        self,
        x: torch.Tensor,
        inputs: StepInputs,
        activations: Activations,  # noqa: ARG002 - experts need buffers of other sizes
        kernels: "TritonKernels",
        out: torch.Tensor,
    ) -> None:
        """Compute the mixture's output ``out`` from its input ``x``. Padding tokens have no expert, and their rows of
        ``out`` are undefined.
        """
        plan = self.plan
        weights, chosen = self._route(x, kernels)
        count = inputs.groups[0].query_start_loc[-1]
        is_padding = torch.arange(len(x), device=x.device) >= count
        ids, order = chosen.masked_fill(is_padding[:, None], plan.num_experts).view(-1).sort(stable=True)
        ends = torch.searchsorted(ids, torch.arange(plan.num_experts, device=x.device), right=True, out_int32=True)
        rows = x.index_select(0, order // plan.top_k)
        owners = ids.clamp(max=plan.num_experts - 1)  # rows without an expert are not computed
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
    def _add_shared(shared: GatedMLP, x: torch.Tensor, kernels: "TritonKernels", out: torch.Tensor) -> None:
        gated = x.new_empty(len(x), shared.down.in_features)
        own = torch.empty_like(out)
        shared.compute(x, x.new_empty(len(x), shared.gate_up.out_features), gated, kernels, own)
        out.add_(own)

    def _gate(self, gate_up: torch.Tensor, kernels: "TritonKernels") -> torch.Tensor:
        how = self.plan.activation
        if isinstance(how, ClampedGate):
            gate, up = gate_up[:, ::2].clamp(max=how.limit), gate_up[:, 1::2].clamp(min=-how.limit, max=how.limit)
            return (up + 1) * (gate * torch.sigmoid(gate * how.alpha))
        gated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        kernels.gated(gate_up, how, gated)
        return gated

    def _route(self, x: torch.Tensor, kernels: "TritonKernels") -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts' weights, float32, and the experts' indices for each token, both ``[tokens, top_k]``. With
        batch-invariant kernels, the weights are scaled later.
        """
        if self.plan.grouped is not None:
            return grouped_route(x, self.plan, self.plan.grouped, self.scale, kernels)
        bias = None if self.plan.biases is None else self.plan.biases[0]
        if kernels.batch_invariant:
            logits = x.new_empty(len(x), self.plan.num_experts)
            kernels.product(x, self.plan.router, bias, 1.0, logits)
            # With a stable sort, the expert with the lower index wins a tie, for any number of rows.
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


def mlp_of(
    plan: MLPPlan | ExpertsPlan | OtherMixture, scale: float, kernels: "TritonKernels", adapt: Adapt = unadapted
) -> MLP:
    """Return the MLP that computes ``plan``. Raises UnsuitableError for unsupported plans.

    The MLP's output is multiplied by ``scale`` before it is added to the residual. ``adapt`` replaces matrix products,
    except the products of experts, by products to which LoRA adapters can be added.
    """
    if isinstance(plan, OtherMixture):
        raise UnsuitableError(plan.reason)
    if isinstance(plan, ExpertsPlan):
        others = {
            "scales the inputs of its experts": plan.scales_inputs,
            "has a gate for its shared expert": plan.shared_gate is not None,
            "is divided among ranks": plan.divided,
            "has experts without gates": not plan.gated,
        }
        if odd := next((part for part, applies in others.items() if applies), None):
            raise UnsuitableError(f"a mixture of experts {odd}")
        return Experts.of(plan, scale, kernels)
    if not plan.gated:
        raise UnsuitableError("the model's MLPs have no gate")
    return GatedMLP.of(plan, scale, kernels, adapt)

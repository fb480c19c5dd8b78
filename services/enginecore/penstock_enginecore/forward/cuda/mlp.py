"""Last part of a layer of the fused decoder: a gated MLP, or a mixture of experts.

Experts use grouped matrix products. Pairs of a token and an expert are sorted by expert, and a tensor on the device
contains the end of each expert's pairs. Therefore the host reads nothing from the device, and CUDA graphs can capture
steps with experts. Each step allocates its intermediate tensors.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from penstock_enginecore.forward.cuda.adapters import Adapt, unadapted
from penstock_enginecore.forward.cuda.buffers import Activations, StepInputs
from penstock_enginecore.forward.cuda.kernel_api import (
    MAX_ASSIGNED_EXPERTS,
    MAX_ASSIGNED_PAIRS,
    MAX_ASSIGNED_TOKENS,
    Activation,
    ExpertRows,
    Float8Weight,
    Int4Weight,
    Mxfp4Weight,
    Routing,
    SharedProduct,
    StackedWeight,
    WeightedRows,
)
from penstock_enginecore.forward.cuda.linear import (
    Dense,
    Held,
    Product,
    int4_weight,
    joined,
    keeps,
    merged,
    packed_float8,
)
from penstock_enginecore.forward.cuda.packing import PackedFloat8, pack_e2m1, part_of_4_bits, words_of_4_bits
from penstock_enginecore.models.decoder_plan import ClampedGate, ExpertsPlan, MLPPlan, OtherMixture
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.quantization.awq_gptq import Awq, Gptq, Packed
from penstock_enginecore.models.quantization.float8 import Float8
from penstock_enginecore.models.quantization.layers import QuantizedStack
from penstock_enginecore.models.quantization.mxfp4 import Mxfp4

if TYPE_CHECKING:  # Triton is imported only if there is a device for its kernels
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels


def routing_of(plan: ExpertsPlan, scale: float) -> Routing:
    """Return how the mixture chooses experts. The experts' weights are multiplied by ``scale``.

    DeepSeek's routing selects the best experts of the best groups. DeepSeek-V3 adds a correction to the scores for load
    balance, and the score of a group is the sum of its two best scores.
    """
    how = plan.grouped
    if how is None:
        return Routing(plan.top_k, plan.renormalize, scale)
    sigmoid = how.correction is not None
    return Routing(
        plan.top_k,
        plan.renormalize,
        scale * how.scale,
        sigmoid=sigmoid,
        groups=how.groups,
        kept=how.kept,
        counted=2 if sigmoid else 1,
        float32=True,
    )


# Matrix products of experts: each expert's rows times the expert's weight. Each call allocates its output.

_MXFP4_BLOCK = 32
"""Number of columns that share a scale."""


_LIBRARY_ROWS = 64
"""Rows per expert, on average, from which torch's grouped product is used where it is fast. It pads the rows of each
expert to at least 64.
"""
_FAST_CAPABILITIES = (9, 10)
"""Major compute capabilities on which torch's grouped product is one kernel. On others, torch reads the ends of the
experts' rows on the host and launches one product for each expert, which CUDA graphs cannot capture.
"""


class GroupedProduct(Protocol):
    """Grouped matrix product: the rows of each expert are multiplied by the weight of this expert, and the expert's
    bias is added.
    """

    @property
    def held(self) -> tuple[Held, ...]:
        """Objects that own the weight, or an empty tuple if a module of the model owns the weight."""

    @property
    def out_features(self) -> int:
        """Number of elements of a row's product."""

    def gather(
        self, x: torch.Tensor, rows: ExpertRows, activation: Activation | ClampedGate, out: torch.Tensor
    ) -> None:
        """Multiply the rows of ``x`` ``[tokens, in_features]`` that ``rows`` selects. Write the activated results to
        ``out`` ``[rows, out_features / 2]``, sorted by expert.
        """

    def scatter(self, x: torch.Tensor, rows: ExpertRows, out: torch.Tensor) -> None:
        """Multiply ``x`` ``[rows, in_features]``, sorted by expert. Write the result of each row to the row of ``out``
        ``[rows, out_features]`` of the row's pair.
        """


class DenseGroups:
    """Grouped matrix product with dense weights, by ``kernels`` or by torch.

    Torch computes large bfloat16 steps on the GPUs on which torch has a fast kernel, unless ``kernels`` are
    batch-invariant.

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

    @property
    def out_features(self) -> int:
        """Number of elements of a row's product."""
        return self._weight.shape[2 if self._transposed else 1]

    def gather(
        self,
        x: torch.Tensor,
        rows: ExpertRows,
        activation: Activation | ClampedGate,
        out: torch.Tensor,
        shared: SharedProduct | None = None,
    ) -> None:
        """Compute the product, and ``shared`` in the same launch; see ``GroupedProduct.gather``."""
        if shared is None and self._is_fast(rows) and not isinstance(activation, ClampedGate):
            gate_up = self._by_torch(x.index_select(0, rows.order // rows.top_k), rows)
            self._kernels.gated(gate_up, activation, out)
            return
        self._kernels.grouped_product(
            x,
            self._weight,
            self._bias,
            rows.ends,
            out,
            order=rows.order,
            top_k=rows.top_k,
            activation=activation,
            transposed=self._transposed,
            shared=shared,
        )

    def scatter(
        self, x: torch.Tensor, rows: ExpertRows, out: torch.Tensor, shared: SharedProduct | None = None
    ) -> None:
        """Compute the product, and ``shared`` in the same launch; see ``GroupedProduct.scatter``."""
        if shared is None and self._is_fast(rows):
            out.index_copy_(0, rows.order.long(), self._by_torch(x, rows))
            return
        self._kernels.grouped_product(
            x, self._weight, self._bias, rows.ends, out, order=rows.order, transposed=self._transposed, shared=shared
        )

    def _is_fast(self, rows: ExpertRows) -> bool:
        """Return whether torch's grouped product computes ``rows`` in one kernel, and the rows are many."""
        weight = self._weight
        if self._kernels.batch_invariant or self._bias is not None or self._transposed:
            return False
        return len(rows.order) // len(weight) > _LIBRARY_ROWS and torch_is_fast(weight)

    def _by_torch(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        return torch.nn.functional.grouped_mm(x, self._weight.transpose(1, 2), offs=rows.ends)


def torch_is_fast(weight: torch.Tensor) -> bool:
    """Return whether torch computes grouped products with ``weight`` ``[experts, out_features, in_features]`` in one
    kernel, without a read on the host.
    """
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16 or any(size % 8 for size in weight.shape[1:]):
        return False
    return torch.cuda.get_device_capability(weight.device)[0] in _FAST_CAPABILITIES


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

    @property
    def out_features(self) -> int:
        """Number of elements of a row's product."""
        return self._weight.numbers.shape[1]

    def to(self, device: torch.device) -> None:
        """Move the weight to ``device``."""
        self._weight = self._weight.to(device)

    def gather(
        self, x: torch.Tensor, rows: ExpertRows, activation: Activation | ClampedGate, out: torch.Tensor
    ) -> None:
        """Compute the product; see ``GroupedProduct.gather``."""
        self._kernels.quantized_grouped_product(
            x, self._weight, self._bias, rows.ends, out, order=rows.order, top_k=rows.top_k, activation=activation
        )

    def scatter(self, x: torch.Tensor, rows: ExpertRows, out: torch.Tensor) -> None:
        """Compute the product; see ``GroupedProduct.scatter``."""
        self._kernels.quantized_grouped_product(x, self._weight, self._bias, rows.ends, out, order=rows.order)


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

    8-bit floats are stored once: they are rearranged in their own memory, and the weights of the projections become
    views of the joined weight. 4-bit elements are repacked, so a second copy exists until the tensors of the model's
    module are freed.
    """
    scheme = stack.scheme
    if keeps(scheme) and stack.merged == isinstance(scheme, Mxfp4):
        if isinstance(scheme, Mxfp4):
            return _mxfp4(stack.projections[0])
        if isinstance(scheme, Float8 | PackedFloat8):
            return _float8(stack, scheme)
        if isinstance(scheme, Awq | Gptq | Packed):
            count = len(next(iter(stack.projections[0].values())))
            weights = (joined([int4_weight(each, scheme) for each in stack.of_expert(i)]) for i in range(count))
            return _int4(list(weights))
    raise UnsuitableError(f"quantized experts' weights of type {scheme.name} are not supported")


def _float8(stack: QuantizedStack, scheme: Float8 | PackedFloat8) -> Float8Weight:
    numbers = stack.projections[0][""].data
    count, width, scales = len(numbers), 0, []
    for expert in range(count):
        found = [scheme.by_rows(each) for each in stack.of_expert(expert)]
        scales.append(torch.cat([each for each, _ in found], dim=1))
        width = found[0][1]
    if len(stack.projections) > 1:
        numbers = torch.cat([each[""] for each in stack.projections], dim=1)
    numbers, packed = packed_float8(scheme, numbers, width)
    start = 0
    for i, each in enumerate(stack.projections):
        end = start + each[""].shape[1]
        stack.replace(i, "", numbers[:, start:end])
        start = end
    stack.scheme = packed
    return Float8Weight(numbers, torch.stack(scales), width, packed.part)


def _int4(weights: list[Int4Weight]) -> Int4Weight:
    """Return one weight that stacks the ``weights`` of all experts."""
    numbers, zeros, scales = (torch.stack(parts) for parts in zip(*(each.tensors for each in weights), strict=True))
    first = weights[0]
    return Int4Weight(numbers, zeros, scales, first.width, first.part, first.in_features)


def _mxfp4(tensors: dict[str, torch.Tensor]) -> Mxfp4Weight:
    blocks, scales = tensors["_blocks"], tensors["_scales"]
    experts, out_features, count, _ = blocks.shape
    columns = count * _MXFP4_BLOCK
    part = part_of_4_bits(columns, _MXFP4_BLOCK)
    numbers = blocks.new_empty(experts, out_features, words_of_4_bits(columns, part), dtype=torch.int16)
    for packed, target in zip(blocks, numbers, strict=True):
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).view(out_features, columns)
        target.copy_(pack_e2m1(codes, part))
    return Mxfp4Weight(numbers, scales.transpose(1, 2).contiguous(), part, columns)


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
class _DenseProducts:
    """Products of experts and of a shared MLP, all with dense weights and without biases of the shared MLP."""

    gate_up: DenseGroups
    down: DenseGroups
    shared_gate_up: Dense
    shared_down: Dense


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts with a router. Dense weights stay in the model's modules, because the modules already store
    them in the required layout.

    A step of few tokens has three launches: the router and the two grouped products. Larger steps and batch-invariant
    kernels have separate launches for logits, choice of experts and order of rows. A shared MLP has three more, except
    in small steps with dense weights: then the launches of the experts compute it. The kernel of the next norm computes
    the weighted sum.
    """

    plan: ExpertsPlan
    routing: Routing
    gate_up: GroupedProduct
    down: GroupedProduct
    shared: GatedMLP | None

    @classmethod
    def of(cls, plan: ExpertsPlan, scale: float, kernels: "TritonKernels") -> "Experts":
        """Return the mixture that computes ``plan``, with grouped products for the experts' weights. The output is
        multiplied by ``scale``.
        """
        transposed = isinstance(plan.activation, ClampedGate)
        _, gate_up, down = plan.biases or (None, None, None)
        return cls(
            plan,
            routing_of(plan, scale),
            grouped(plan.gate_up, gate_up, kernels, transposed=transposed),
            grouped(plan.down, down, kernels, transposed=transposed),
            None if plan.shared is None else GatedMLP.of(plan.shared, scale, kernels),
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
        kernels.weighted_sum(self.rows(x, inputs, kernels), out)

    def rows(self, x: torch.Tensor, inputs: StepInputs, kernels: "TritonKernels") -> WeightedRows:
        """Return the output of ``run`` before its last sum, so that the next kernel can compute this sum."""
        plan, pairs = self.plan, len(x) * self.plan.top_k
        weights, rows = self._routed(x, inputs.groups[0].query_start_loc, kernels)
        gated = x.new_empty(pairs, self.gate_up.out_features // 2)
        down = x.new_empty(pairs, x.shape[1])
        shared, dense = self.shared, self._dense(len(x), kernels)
        if dense is None:
            self.gate_up.gather(x, rows, plan.activation, gated)
            self.down.scatter(gated, rows, down)
            return WeightedRows(down, weights, None if shared is None else _shared(shared, x, kernels))
        shared_gated, shared_out = x.new_empty(len(x), dense.shared_down.in_features), torch.empty_like(x)
        first = SharedProduct(x, dense.shared_gate_up.weight, shared_gated)
        dense.gate_up.gather(x, rows, plan.activation, gated, first)
        last = SharedProduct(shared_gated, dense.shared_down.weight, shared_out)
        dense.down.scatter(gated, rows, down, last)
        return WeightedRows(down, weights, shared_out)

    def _dense(self, tokens: int, kernels: "TritonKernels") -> "_DenseProducts | None":
        """Return the products of experts and shared MLP if two launches can compute them. Otherwise, or without a
        shared MLP, return None.

        Steps must be small. In larger steps, each weight of the shared MLP is used so often that torch's products are
        faster.
        """
        shared = self.shared
        if shared is None or kernels.batch_invariant or tokens > MAX_ASSIGNED_TOKENS:
            return None
        if shared.plan.activation != self.plan.activation or shared.scale != 1.0:
            return None
        match self.gate_up, self.down, shared.gate_up, shared.down:
            case DenseGroups() as gate_up, DenseGroups() as down, Dense(bias=None) as first, Dense(bias=None) as last:
                return _DenseProducts(gate_up, down, first, last)
        return None

    def _routed(
        self, x: torch.Tensor, starts: torch.Tensor, kernels: "TritonKernels"
    ) -> tuple[torch.Tensor, ExpertRows]:
        """Return the weights of each token's experts, float32 ``[tokens, top_k]``, and the rows by expert."""
        plan, pairs = self.plan, len(x) * self.plan.top_k
        correction = None if plan.grouped is None or plan.grouped.correction is None else plan.grouped.correction()
        weights = x.new_empty((len(x), plan.top_k), dtype=torch.float32)
        rows = ExpertRows(
            x.new_empty(plan.num_experts, dtype=torch.int32), x.new_empty(pairs, dtype=torch.int32), plan.top_k
        )
        if not kernels.batch_invariant and _is_small(len(x), pairs, plan.num_experts):
            bias = None if plan.biases is None else plan.biases[0]
            kernels.assign(x, plan.router, bias, correction, starts, self.routing, weights, rows.ends, rows.order)
            return weights, rows
        chosen = x.new_empty((len(x), plan.top_k), dtype=torch.int32)
        kernels.route(self._logits(x, kernels), correction, starts, self.routing, weights, chosen)
        kernels.align(chosen, rows.ends, rows.order)
        return weights, rows

    def _logits(self, x: torch.Tensor, kernels: "TritonKernels") -> torch.Tensor:
        """Return the router's logits ``[tokens, experts]``: float32 if the routing needs it, otherwise of the model's
        dtype.
        """
        plan = self.plan
        router: torch.Tensor = plan.router
        bias = None if plan.biases is None else plan.biases[0]
        needs_float32 = self.routing.float32
        if needs_float32 and x.dtype != router.dtype:
            x, router = x.float(), router.float()
        if not kernels.batch_invariant and (not needs_float32 or x.dtype == torch.float32):
            return torch.nn.functional.linear(x, router, bias)
        # The kernel adds products of 16-bit numbers in float32, so the numbers need not be converted first.
        logits = x.new_empty((len(x), plan.num_experts), dtype=torch.float32 if needs_float32 else x.dtype)
        kernels.product(x, router, bias, 1.0, logits)
        return logits


def _is_small(tokens: int, pairs: int, experts: int) -> bool:
    """Return whether one kernel can compute the router of a step."""
    return tokens <= MAX_ASSIGNED_TOKENS and pairs <= MAX_ASSIGNED_PAIRS and experts <= MAX_ASSIGNED_EXPERTS


def _shared(shared: GatedMLP, x: torch.Tensor, kernels: "TritonKernels") -> torch.Tensor:
    """Return the output of the MLP that computes every token."""
    out = torch.empty_like(x)
    gate_up = x.new_empty(len(x), shared.gate_up.out_features)
    shared.compute(x, gate_up, x.new_empty(len(x), shared.down.in_features), kernels, out)
    return out


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

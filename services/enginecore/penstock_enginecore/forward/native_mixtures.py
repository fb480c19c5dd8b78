"""Mixtures of experts with packed weights, which the CPU kernels compute as part of a decoder.

If the experts are distributed over ranks, the mixture's module calls the same kernels between calls of the decoder. Its
results are then bit-identical to the results inside the decoder.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from penstock_common.memory import give_back_free
from penstock_enginecore.experts.layer import DispatchedExperts
from penstock_enginecore.forward.native_support import ACTIVATIONS, GATE_ACTIVATIONS
from penstock_enginecore.models.decoder_plan import Activation, ClampedGate, ExpertsPlan, GroupedRouting, MLPPlan
from penstock_enginecore.models.quantization.layers import DOWN, GATE_UP, QuantizedLinear, QuantizedStack
from penstock_enginecore.native.backend import PackedLayers
from penstock_enginecore.native.experts import MAX_EXPERTS, PackedExperts, choose, free, gate_of, grouped_product
from penstock_enginecore.native.ffi_structs import BesideNorms, Gate, Linear, Mixture, Routing
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.weights import PackedWeight, fits_bfloat16, interleaved, multiply

_SOFTMAX, _LOGISTIC = 0, 1
"""Numbers that stand for the scores of experts in the kernels' interface."""
_NOT_SHARED, _SHARED, _GATED_SHARED = 0, 1, 2
"""Numbers that stand for kinds of shared experts in the kernels' interface."""
_UNGATED: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
}
"""Activations of experts without gates. The kernels and PyTorch compute them with the same bits."""

Products = tuple[Sequence[PackedWeight], Sequence[PackedWeight]]
"""Packed weights of experts: for each expert gate and up, and down."""


class PackedMixture(torch.nn.Module):
    """Mixture of experts ``mlp`` with packed weights. ``plan`` is the plan of ``mlp``. The constructor frees the weights
    of ``mlp``. Call ``takes`` first.

    The rows of the router are followed by the row of the shared expert's gate, so that one matrix product computes both.
    """

    def __init__(self, library: NativeLibrary, plan: ExpertsPlan, mlp: Any) -> None:
        super().__init__()
        gate = _gate(library, plan, mlp.experts)
        if gate is None:
            raise TypeError(f"the kernels do not compute the activation of {type(mlp.experts).__name__}")
        self._library, self._gate = library, gate
        self._activate = None if plan.gated or isinstance(plan.activation, ClampedGate) else _UNGATED[plan.activation]
        self._hidden = plan.router.shape[1]
        self.router = _packed_router(library, plan)
        self._shared = None if plan.shared is None else _packed_mlp(library, plan.shared)
        self._correction = _correction(plan.grouped)
        self.routing = _routing(plan, self._correction)
        self._scales_inputs = plan.scales_inputs
        self._own: Products | None = None
        for name in [name for name, _ in _router(mlp).named_parameters(recurse=False)]:
            free(_router(mlp), name)
        if plan.scales_inputs:
            self._own = _packed_transposed(library, mlp.experts)
        elif isinstance(mlp.experts, DispatchedExperts):
            PackedLayers(mlp.experts, library)
        else:
            packed = PackedExperts(library, mlp.experts)
            packed.free()
            mlp.experts = packed
            self._own = packed.products
        self._experts = (mlp.experts,)  # a tuple, so that the module is not registered twice
        give_back_free()  # without this call, the C library would keep freed blocks of this size

    @staticmethod
    def takes(library: NativeLibrary, plan: ExpertsPlan, mlp: Any) -> bool:
        """Return whether the kernels compute the experts, the routing and the shared expert of a mixture."""
        if isinstance(plan.gate_up, QuantizedStack) or plan.num_experts > MAX_EXPERTS:
            return False
        gate = _gate(library, plan, mlp.experts)
        return (
            gate is not None
            and _takes_groups(plan)
            and (plan.shared is None or (plan.shared.gated == plan.gated and _takes_shared(library, plan.shared, gate)))
            and not isinstance(plan.shared_gate, QuantizedLinear)
        )

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all experts, so that the kernels can compute the mixture inside a decoder."""
        return self._own is not None

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the packed weights."""
        own = [weight for weights in self._own or () for weight in weights]
        dispatched: int = 0 if self._own is not None else self._experts[0].experts.num_bytes
        weights: list[PackedWeight] = [self.router, *(self._shared or ()), *own]
        return dispatched + sum(weight.num_bytes for weight in weights)

    @property
    def struct(self) -> Mixture:
        """Struct for the kernels, which points into the packed weights."""
        gate_up, down = (list(weights) for weights in self._own or ((), ()))
        if self._shared is not None:
            gate_up, down = [*gate_up, self._shared[0]], [*down, self._shared[1]]
        self._structs = [(Linear * len(each))(*(weight.struct for weight in each)) for each in (gate_up, down)]
        return Mixture(self.routing, self._gate, self._scales_inputs, BesideNorms(), self.router.struct, *self._structs)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the outputs ``[..., hidden]`` of the mixture for float32 inputs of the same shape.

        The experts are added in the order in which the router returns them, and then the shared expert, as in the
        kernels' decoder.
        """
        states = hidden_states.reshape(-1, self._hidden)
        weights, chosen = choose(self._library, self.routing, multiply(self._library, self.router, states))
        top = self.routing.top
        out: torch.Tensor = self._experts[0](states, chosen[:, :top].contiguous(), weights[:, :top].contiguous())
        if self._shared is not None and len(states):
            ends = np.array([len(states)])
            gate = None if self._activate else self._gate
            inner = grouped_product(self._library, self._shared[:1], states, ends, gate=gate)
            inner = self._activate(inner) if self._activate else inner
            out = out + grouped_product(self._library, self._shared[1:], inner, ends) * weights[:, top:]
        return out.view(hidden_states.shape)


def _router(mlp: Any) -> Any:
    return mlp.router if hasattr(mlp, "router") else mlp.gate


def _gate(library: NativeLibrary, plan: ExpertsPlan, experts: Any) -> Gate | None:
    """Return the gate of a mixture's experts, or None if the kernels do not compute these experts."""
    own: Any = experts.experts if isinstance(experts, DispatchedExperts) else experts
    activation = None if isinstance(plan.activation, ClampedGate) else plan.activation
    if not plan.gated:
        takes = activation in _UNGATED and PackedExperts.takes(own) and not own.has_bias
        return Gate(ACTIVATIONS[activation]) if takes and activation else None
    if not plan.scales_inputs:
        return gate_of(library, own) if PackedExperts.takes(own) else None
    if activation is None or activation not in GATE_ACTIVATIONS or own.gate_up_proj.shape[2] % (2 * library.lanes):
        return None
    return Gate(GATE_ACTIVATIONS[activation])


def _takes_groups(plan: ExpertsPlan) -> bool:
    how = plan.grouped
    if how is None or how.groups == 1:
        return plan.top_k <= plan.num_experts
    size, odd = divmod(plan.num_experts, how.groups)
    return not odd and how.kept <= how.groups and plan.top_k <= how.kept * size and (how.correction is None or size > 1)


def _takes_shared(library: NativeLibrary, shared: MLPPlan, gate: Gate) -> bool:
    plain = not any(isinstance(linear, QuantizedLinear) or linear.bias is not None for linear in shared.linears)
    number = (GATE_ACTIVATIONS if shared.gated else ACTIVATIONS).get(shared.activation)
    return plain and number == gate.activation and not (shared.gated and shared.down.in_features % library.lanes)


def _packed_router(library: NativeLibrary, plan: ExpertsPlan) -> PackedWeight:
    bias = None if plan.biases is None else plan.biases[0]
    if plan.shared_gate is None:
        return PackedWeight(library, plan.router, bias)
    gate: Any = plan.shared_gate
    packed = PackedWeight(library, torch.cat([plan.router, gate.weight]), bias)
    free(gate, "weight")
    return packed


def _packed_mlp(library: NativeLibrary, mlp: MLPPlan) -> list[PackedWeight]:
    """Pack the weights of a shared expert, and free the original weights."""
    weights: list[Any] = [linear.weight for linear in mlp.gate_up]
    first, down = weights[0], cast("torch.Tensor", mlp.down.weight)
    if mlp.gated:
        first = interleaved(library, *(weights if len(weights) > 1 else first.chunk(2)))
    packed = [PackedWeight(library, first), PackedWeight(library, down)]
    for linear in mlp.linears:
        free(linear, "weight")
    return packed


def _packed_transposed(library: NativeLibrary, experts: Any) -> Products:
    """Pack experts whose weights are ``[experts, inputs, outputs]``, first the outputs of gate and then those of up, and
    free the original weights.
    """
    gate_up, down = getattr(experts, GATE_UP), getattr(experts, DOWN)
    halves = fits_bfloat16(gate_up), fits_bfloat16(down)
    # Index instead of iterating, because iteration would convert all experts to float32 at once.
    packed = (
        [
            PackedWeight(library, interleaved(library, *gate_up[i].T.chunk(2)), half=halves[0])
            for i in range(len(gate_up))
        ],
        [PackedWeight(library, down[i].T, half=halves[1]) for i in range(len(down))],
    )
    free(experts, GATE_UP)
    free(experts, DOWN)
    return packed


def _correction(how: GroupedRouting | None) -> torch.Tensor | None:
    return None if how is None or how.correction is None else how.correction().float().contiguous().clone()


def _routing(plan: ExpertsPlan, correction: torch.Tensor | None) -> Routing:
    how, shared = plan.grouped, plan.shared
    return Routing(
        num_experts=plan.num_experts,
        top=plan.top_k,
        scoring=_LOGISTIC if plan.scales_inputs or correction is not None else _SOFTMAX,
        normalize=plan.renormalize,
        groups=1 if how is None else how.groups,
        kept=1 if how is None else how.kept,
        shared=_NOT_SHARED if shared is None else _SHARED if plan.shared_gate is None else _GATED_SHARED,
        factor=1.0 if how is None else how.scale,
        correction=None if correction is None else correction.data_ptr(),
    )

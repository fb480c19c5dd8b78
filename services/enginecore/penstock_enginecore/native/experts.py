"""Mixtures of experts that the CPU kernels compute: routers, and experts with packed weights."""

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from transformers.activations import ACT2FN
from transformers.integrations.moe import _default_apply_gate

from penstock_enginecore.models.dtypes import NarrowWeight, widened
from penstock_enginecore.models.families import CLAMPED_ROUTER, SOFTMAX_ROUTERS, sums_to_one
from penstock_enginecore.native.ffi_structs import Gate, Grouped, Linear, Route, Routing
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.weights import VECTORS, PackedWeight, fits_bfloat16, interleaved, multiply

# Routers that the kernels compute. The experts of a token, and the experts' weights, do not depend on other tokens.

MAX_EXPERTS = 1024
"""Maximum number of experts that the kernels' router supports (``kMaxExperts``)."""


class PackedRouter(torch.nn.Module):
    """Replacement for the module ``router``, with a packed weight and the same hooks.

    ``top`` is the number of experts per token. If ``normalize`` is true, the weights of these experts are scaled to sum
    to 1.
    """

    def __init__(self, library: NativeLibrary, router: Any) -> None:
        super().__init__()
        self._forward_pre_hooks, self._forward_hooks = router._forward_pre_hooks, router._forward_hooks
        self._library = library
        self.packed = PackedWeight(library, router.weight, getattr(router, "bias", None))
        self.top: int = router.top_k
        self.normalize = sums_to_one(router)

    @staticmethod
    def takes(module: torch.nn.Module) -> bool:
        """Return whether ``module`` is a router of a supported class, with float32 weights on the CPU."""
        if type(module).__name__ not in {*SOFTMAX_ROUTERS, CLAMPED_ROUTER}:
            return False
        weight: Any = module.weight
        return weight.dtype == torch.float32 and weight.device.type == "cpu" and len(weight) <= MAX_EXPERTS

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the packed weight."""
        return self.packed.num_bytes

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return, for float32 inputs ``[..., hidden]``, the router's logits ``[tokens, experts]``, the experts' weights
        float32 ``[tokens, top]``, and the experts' indices int64 ``[tokens, top]``.
        """
        logits = multiply(self._library, self.packed, hidden_states.reshape(-1, self.packed.k))
        routing = Routing(num_experts=self.packed.n, top=self.top, normalize=self.normalize, factor=1.0)
        weights, experts = choose(self._library, routing, logits)
        return logits, weights, experts


def choose(library: NativeLibrary, routing: Routing, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of each token's experts, float32, and the experts, int64. Both are ``[tokens, top]``, or
    ``[tokens, top + 1]`` if a shared expert follows the chosen experts. ``logits`` is float32 ``[tokens, outputs of the
    router]``.
    """
    places = routing.top + bool(routing.shared)
    weights = logits.new_empty(len(logits), places)
    experts = torch.empty(len(logits), places, dtype=torch.int64)
    route = Route(len(logits), routing, logits.data_ptr(), logits.stride(0), experts.data_ptr(), weights.data_ptr())
    library.call("route", ctypes.byref(route))
    return weights, experts


# Weight of a router, by which the kernels multiply inputs. The experts of a token do not depend on other tokens.


class RouterWeight(torch.nn.Parameter):
    """Weight ``[experts, hidden]`` of a router that calls ``torch.nn.functional.linear`` itself. All other functions of
    torch treat this weight as a normal tensor.
    """

    packed: PackedWeight
    library: NativeLibrary

    @classmethod
    def of(cls, library: NativeLibrary, weight: torch.Tensor) -> Self:
        """Return a ``RouterWeight`` for ``weight``, which must be float32 on the CPU."""
        made = cls(widened(weight.detach()), requires_grad=False)
        made.library, made.packed = library, PackedWeight(library, weight)
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute the products of ``torch.nn.functional.linear`` with the kernels, and all other functions with torch."""
        if func is torch.nn.functional.linear:
            return _linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002 - torch's
    if not isinstance(weight, RouterWeight):
        raise TypeError("the weight of a router can only be the second argument of a product")
    out = multiply(weight.library, weight.packed, input, apart=True)
    return out if bias is None else out + bias


_SAID = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")
"""Names of the attributes that transformers' ``use_experts_implementation`` sets on a class of experts."""
_ONE_THREAD = 32768
"""Maximum number of elements of a tensor that torch computes on one thread. torch splits larger tensors among threads."""
_GATES: Mapping[type, int] = {
    torch.nn.SiLU: 0,
    type(ACT2FN["silu"]): 0,
    type(ACT2FN["gelu_pytorch_tanh"]): 1,
}
"""Numbers that stand for activations of gates in the kernels' interface, by the class of the activation module."""
_CLAMPED = 6
"""Number that stands for the gate of gpt-oss in the kernels' interface."""


class PackedExperts(torch.nn.Module):
    """Replacement for the module ``experts``, with packed weights and the same hooks, for classes with
    ``use_experts_implementation``.

    The original module is kept, because its activation function is used. ``free`` frees the original module's weights.
    The output of an expert for a token depends only on the expert and the token. The output of a token is the sum of
    the outputs of its experts, in the order that the router returns.
    """

    def __init__(self, library: NativeLibrary, experts: Any) -> None:
        super().__init__()
        self._forward_pre_hooks, self._forward_hooks = experts._forward_pre_hooks, experts._forward_hooks
        self._library = library
        self._activate = experts._apply_gate if experts.has_gate else experts.act_fn
        self._names = [name for name, _ in experts.named_parameters(recurse=False)]
        self._unpacked = (experts,)  # a tuple, so that the module is not registered
        self._up_name = up = "gate_up_proj" if experts.has_gate else "up_proj"
        self.gate = gate_of(library, experts)
        self._half = {name: fits_bfloat16(getattr(experts, name)) for name in (up, "down_proj")}
        self._up = [self._pack(experts, up, expert) for expert in range(len(experts.down_proj))]
        self._down = [self._pack(experts, "down_proj", expert) for expert in range(len(experts.down_proj))]

    def write(self, expert: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Write ``weights``, by their names in the module, into the memory of ``expert``.

        Raises ValueError if a weight has the wrong shape, or if the packed dtype cannot store its elements exactly.
        """
        self._up[expert].overwrite(self._library, *self._rows(weights, self._up_name))
        self._down[expert].overwrite(self._library, *self._rows(weights, "down_proj"))

    def packed(self, weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the packed ``weights`` as new tensors in the format of ``slot_memory``.

        Raises ValueError if a weight has the wrong shape, or if the packed dtype cannot store its elements exactly.
        Another thread may call this method during computation.
        """
        library = self._library.beside
        up = self._up[0].like(library, *self._rows(weights, self._up_name))
        return up.memory + self._down[0].like(library, *self._rows(weights, "down_proj")).memory

    @staticmethod
    def takes(module: torch.nn.Module) -> bool:
        """Return whether ``module`` has a supported class of experts, with float32 weights on the CPU."""
        experts: Any = module
        if not all(hasattr(module, name) for name in (*_SAID, "down_proj")) or experts.has_post_expert_norm:
            return False
        parameters = dict(module.named_parameters(recurse=False))
        known = {"gate_up_proj" if experts.has_gate else "up_proj", "down_proj"}
        if experts.has_bias:
            known |= {f"{name}_bias" for name in known}
        return parameters.keys() == known and all(
            parameter.dtype == torch.float32 and parameter.device.type == "cpu" for parameter in parameters.values()
        )

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the packed weights."""
        return sum(weight.num_bytes for weight in (*self._up, *self._down))

    def slot_memory(self, expert: int) -> list[torch.Tensor]:
        """Return the memory of an expert's packed weights as writable uint8 tensors. See ``PackedWeight.memory``."""
        return self._up[expert].memory + self._down[expert].memory

    @property
    def products(self) -> tuple[list[PackedWeight], list[PackedWeight]]:
        """Packed weights of each expert: one weight for gate and up, and the weight of down. If the kernels compute the
        gate, the rows of gate and up are interleaved.
        """
        return self._up, self._down

    @property
    def layout(self) -> str:
        """Name of the format of the packed weights. If two experts have equal layouts, the memory of one may be copied
        to the other.
        """
        weights = f"{self._up[0].layout}, {self._down[0].layout}"
        return f"{weights}, {self._library.lanes} lanes, {'plain' if self.gate is None else 'gated'}"

    def free(self) -> None:
        """Free the weights of the original module, also for other objects that refer to these weights."""
        for name in self._names:
            free(self._unpacked[0], name)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sums of the experts' outputs, ``[tokens, hidden]``.

        ``hidden_states`` is float32 ``[tokens, hidden]``. The experts' indices and weights for each token are
        ``[tokens, top]``.
        """
        top, width = top_k_index.shape[-1], self._up[0].k
        if hidden_states.dtype != torch.float32 or hidden_states.shape[1:] != (width,):
            raise TypeError(
                f"packed experts need float32 [tokens, {width}], not {hidden_states.dtype} {list(hidden_states.shape)}"
            )
        if not len(hidden_states):
            return torch.zeros_like(hidden_states)
        chosen = top_k_index.reshape(-1).numpy()
        order = np.argsort(chosen, kind="stable")
        ends = np.cumsum(np.bincount(chosen, minlength=len(self._up)))
        up = self._product(self._up, hidden_states, ends, order // top, gate=self.gate)
        if self.gate is None:
            up = self._activated(up)
        sorted_outputs = self._product(self._down, up, ends)
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        outputs = sorted_outputs[torch.from_numpy(places)].view(*top_k_index.shape, sorted_outputs.shape[1])
        return weighted_sum(outputs, top_k_weights)

    def _activated(self, up: torch.Tensor) -> torch.Tensor:
        """Return the activation of ``up``, computed in pieces whose size is a multiple of the SIMD vector length. Each
        piece runs on one thread.

        torch computes elements after the last complete SIMD vector of a tensor, or of a thread's part, differently. The
        pieces have no such elements.
        """
        whole = VECTORS // math.gcd(VECTORS, up.shape[1])  # smallest number of rows
        padded = torch.nn.functional.pad(up, (0, 0, 0, -len(up) % whole))
        pieces = torch.split(padded, max(_ONE_THREAD // up.shape[1] // whole, 1) * whole)
        return torch.cat([self._activate(piece) for piece in pieces])[: len(up)]

    def _product(
        self,
        weights: list[PackedWeight],
        x: torch.Tensor,
        ends: npt.NDArray[np.int64],
        from_rows: npt.NDArray[np.int64] | None = None,
        *,
        gate: Gate | None = None,
    ) -> torch.Tensor:
        return grouped_product(self._library, weights, x, ends, from_rows, gate=gate)

    def _pack(self, experts: Any, name: str, expert: int) -> PackedWeight:
        weights = {each: getattr(experts, each)[expert] for each in self._names}
        return PackedWeight(self._library, *self._rows(weights, name), half=self._half[name])

    def _rows(self, weights: Mapping[str, torch.Tensor], name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight ``name`` of an expert with its rows in the order that the kernels need, and the bias."""
        weight, bias = weights[name], weights.get(f"{name}_bias")
        if self._unpacked[0].is_transposed:
            weight = weight.T
        if self.gate is not None and name == "gate_up_proj":
            weight = interleaved(self._library, *self._halves(weight))
            if bias is not None:
                bias = interleaved(self._library, *self._halves(bias[:, None]))[:, 0]
        return weight, bias

    def _halves(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of gate, and the rows of up."""
        if not self._unpacked[0].is_concatenated:
            return rows[::2], rows[1::2]
        gate, up = rows.chunk(2)
        return gate, up


def free(module: Any, name: str) -> None:
    """Free the parameter ``name`` of ``module``, also for other objects that refer to this parameter, such as a plan."""
    parameter = getattr(module, name)
    if isinstance(parameter, NarrowWeight):
        parameter.kept = parameter.kept.new_empty(0)
    else:
        parameter.data = parameter.data.new_empty(0)
    setattr(module, name, torch.nn.Parameter(torch.empty(0), requires_grad=False))


def grouped_product(
    library: NativeLibrary,
    weights: Sequence[PackedWeight],
    x: torch.Tensor,
    ends: npt.NDArray[np.int64],
    from_rows: npt.NDArray[np.int64] | None = None,
    *,
    gate: Gate | None = None,
) -> torch.Tensor:
    """Return products of groups of rows. The rows of ``x`` are taken in the order ``from_rows``. Group i ends before row
    ``ends[i]``, and is multiplied by ``weights[i]``. If ``gate`` is not None, the kernels also compute this activation.
    """
    x = x.contiguous()
    out = x.new_empty(int(ends[-1]), weights[0].n // (1 if gate is None else 2))
    grouped = Grouped(
        len(weights),
        (Linear * len(weights))(*(weight.struct for weight in weights)),
        ends.ctypes.data,
        None if from_rows is None else from_rows.ctypes.data,
        x.data_ptr(),
        x.shape[1],
        out.data_ptr(),
        out.shape[1],
        gate is not None,
        gate or Gate(),
    )
    library.call("grouped", ctypes.byref(grouped))
    return out


def weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum over each token's experts of ``outputs`` ``[tokens, top, hidden]`` times ``weights``: ``[tokens,
    hidden]``. ``outputs`` is overwritten.

    The outputs are added in the order that the router returns, so that the result is bit-identical on every rank.
    """
    outputs.mul_(weights[..., None])
    total = outputs[:, 0].clone()
    for position in range(1, outputs.shape[1]):
        total += outputs[:, position]
    return total


def gate_of(library: NativeLibrary, experts: Any) -> Gate | None:
    """Return the gate of experts, if the kernels can compute it as part of the first matrix product, otherwise None."""
    if type(experts).__name__ == "GptOssExperts":
        rows = experts.gate_up_proj.shape[2]
        return None if rows % (2 * library.lanes) else Gate(_CLAMPED, float(experts.alpha), float(experts.limit))
    plain = (
        experts.has_gate
        and experts.is_concatenated
        and not experts.has_bias
        and not experts.is_transposed
        and type(experts)._apply_gate is _default_apply_gate
        and experts.gate_up_proj.shape[1] % (2 * library.lanes) == 0
    )
    activation = _GATES.get(type(experts.act_fn)) if plain else None
    return None if activation is None else Gate(activation)

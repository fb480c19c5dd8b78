"""Memory of recurrent states: closed states in slots, and open rows (stored inputs of recent tokens) in a ring for each
running request.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import groupby

import torch

from penstock_enginecore.huge_pages import huge_empty
from penstock_enginecore.states.core.spec import SPAN, StateNeeds, StatePoolConfig, StateSpec


@dataclass(frozen=True, slots=True)
class StateLayer:
    """Memory of the states of one layer. Rings are indexed by ring number and by position modulo the ring length.

    Attributes:
        tails: The last inputs of the convolution before each closed state, oldest first: ``[slots, kernel - 1,
            channels]``.
        inputs: Inputs of the convolution in open rows: ``[rings, ring length, channels]``.
        closed: Closed states, float32 ``[slots, heads, key size, value size]``, or None for a short convolution.
        keys: Keys of open rows, float32 ``[rings, ring length, key heads, key size]``, or None.
        updates: Updates of open rows, float32 ``[rings, ring length, heads, value size]``, or None.
        decays: Sums of decays since the start of the span, float32 ``[rings, ring length, heads]``, or ``[rings, ring
            length, heads, key size]`` if each row of the state has its own decay. If the layer has constant rates, the
            decay of each token instead of a sum. None for a short convolution.
    """

    spec: StateSpec
    tails: torch.Tensor
    inputs: torch.Tensor
    closed: torch.Tensor | None
    keys: torch.Tensor | None
    updates: torch.Tensor | None
    decays: torch.Tensor | None

    @property
    def slot_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors with closed states, by name. The first dimension of these tensors is the slot. There are always
        more slots than rings.
        """
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        return {
            name: part
            for name, part in parts.items()
            if isinstance(part, torch.Tensor) and len(part) == len(self.tails) and part[0].numel()
        }

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors of the layer."""
        parts = (self.tails, self.inputs, self.closed, self.keys, self.updates, self.decays)
        return [part for part in parts if part is not None]


StateLayers = dict[str, StateLayer]
"""Memory of the states of each layer, by module name. Empty if no memory is allocated."""


class StateMemory:
    """Allocator of the memory for the recurrent states of a model.

    Args:
        specs: Specs of the layers' states by module name, in execution order.
        dtype: The dtype of the inputs of convolutions.
        device: Device of the memory.
    """

    def __init__(self, specs: Mapping[str, StateSpec], dtype: torch.dtype, device: torch.device) -> None:
        self.specs = dict(specs)
        self._dtype = dtype
        self._device = device

    @property
    def needs(self) -> StateNeeds | None:
        """Memory needs of all layers, or None for a model without recurrent layers."""
        if not self.specs:
            return None
        specs = self.specs.values()
        return StateNeeds(
            num_layers=len(specs),
            slot_bytes=sum(spec.slot_bytes for spec in specs),
            row_bytes=sum(spec.row_bytes for spec in specs),
        )

    def allocate(self, config: StatePoolConfig) -> StateLayers:
        """Allocate the slots and rings. Only the zero slot is filled with zeros, because no other slot is read before
        it is written.
        """
        return {
            name: self._layer(spec, config.num_slots, config.num_requests, config.rows_per_request)
            for name, spec in self.specs.items()
        }

    def _layer(self, spec: StateSpec, slots: int, rings: int, length: int) -> StateLayer:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            if self._device.type == "cpu":
                return huge_empty(*shape, dtype=dtype)
            return torch.empty(shape, dtype=dtype, device=self._device)

        tails = empty(slots, spec.kernel - 1, spec.channels, dtype=self._dtype)
        inputs = empty(rings, length, spec.channels, dtype=self._dtype)
        tails[0] = 0
        if not spec.num_heads:
            return StateLayer(spec, tails, inputs, None, None, None, None)
        closed = empty(slots, spec.num_heads, spec.key_size, spec.value_size)
        closed[0] = 0
        return StateLayer(
            spec=spec,
            tails=tails,
            inputs=inputs,
            closed=closed,
            keys=empty(rings, length, spec.num_key_heads, spec.key_size),
            updates=empty(rings, length, spec.num_heads, spec.value_size),
            decays=empty(rings, length, spec.num_heads, *((spec.key_size,) if spec.decay == "row" else ())),
        )


def slot_memory(layers: StateLayers) -> list[torch.Tensor]:
    """Return the memory of closed states as tensors uint8 ``[slots, bytes]``. Row ``i`` of a tensor is one layer's part
    of slot ``i``.
    """
    tensors = [tensor for layer in layers.values() for tensor in layer.slot_tensors.values()]
    return [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in tensors]


def slot_order(layers: StateLayers) -> str:
    """Return a text that describes the content of a slot: the size of a span, and the parts of each layer with dtypes
    and shapes. Consecutive equal layers are described once.
    """

    def described(layer: StateLayer) -> str:
        parts = (f"{name} {part.dtype} {list(part.shape[1:])}" for name, part in layer.slot_tensors.items())
        return "; ".join(parts).replace("torch.", "")

    runs = groupby(described(layer) for layer in layers.values())
    return ", ".join([f"span {SPAN}", *(f"{len(list(same))} x ({text})" for text, same in runs)])


def num_bytes(layers: StateLayers) -> int:
    """Return the total size in bytes of the memory of states."""
    return sum(tensor.untyped_storage().nbytes() for layer in layers.values() for tensor in layer.tensors())

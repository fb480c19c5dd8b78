"""States of a model's recurrent layers, as its modules use them."""

from collections.abc import Mapping
from typing import Protocol

import torch

from penstock_enginecore.states.base import StateContext, StateMetadata
from penstock_enginecore.states.core.spec import StateSpec
from penstock_enginecore.states.memory import StateLayer, StateLayers, StateMemory
from penstock_enginecore.states.reference import ReferenceStates
from penstock_enginecore.states.rows import RowStates


class StateKernels(Protocol):
    """Kernels that compute recurrent layers."""

    def takes(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether the kernels support states whose convolution inputs have this dtype and place."""

    def context(self, layers: Mapping[torch.nn.Module, StateLayer], step: StateMetadata) -> StateContext:
        """Return the context of a step."""


class BoundStates:
    """States that the recurrent layers of a module use from step to step.

    Args:
        module: The module that contains the layers.
        specs: Specs of the layers by module name. Empty for a model without recurrent layers.
        dtype: The dtype of the computation.
        device: Device of the states.
        from_start: Compute recurrences token by token, for sequences that begin in the step.
        kernels: Kernels to use if they support the states, or None for torch.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        specs: Mapping[str, StateSpec],
        dtype: torch.dtype,
        device: torch.device,
        *,
        from_start: bool = False,
        kernels: StateKernels | None = None,
    ) -> None:
        self.memory = StateMemory(specs, dtype, device)
        self._modules = {name: each for name, each in module.named_modules() if name in specs}
        self._device = device
        self._from_start = from_start
        self._kernels = kernels if kernels is not None and kernels.takes(dtype, device) else None
        self._layers: Mapping[torch.nn.Module, StateLayer] = {}

    def bind(self, layers: StateLayers) -> None:
        """Use these states from now on. An empty dictionary releases the current states."""
        self._layers = {self._modules[name]: layer for name, layer in layers.items()}

    def context(self, step: StateMetadata | None) -> StateContext | None:
        """Return the context of a step's recurrent layers, or None for a model without them.

        Raises RuntimeError if the step has no states, because its logits would be wrong.
        """
        if not self.memory.specs:
            return None
        if step is None:
            raise RuntimeError("the step has no states for the model's recurrent layers")
        if self._from_start:
            return ReferenceStates(step)
        if self._kernels is not None:
            return self._kernels.context(self._layers, step)
        return RowStates(self._layers, step, self._device)

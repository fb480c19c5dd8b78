"""States of a model's recurrent layers, connected to the modules that use the states."""

from collections.abc import Mapping
from typing import Protocol

import torch

from penstock_enginecore.states.base import StateContext, StateMetadata
from penstock_enginecore.states.core.spec import StateSpec
from penstock_enginecore.states.cuda.context import StateKernels, TritonStates
from penstock_enginecore.states.cuda.indices import StateIndices
from penstock_enginecore.states.memory import StateLayer, StateLayers, StateMemory
from penstock_enginecore.states.reference import ReferenceStates
from penstock_enginecore.states.rows import RowStates


class HostStateKernels(Protocol):
    """Interface of kernels that compute recurrent layers on the CPU."""

    def takes(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether the kernels support states whose convolution inputs have this dtype and are on this device."""

    def context(self, layers: Mapping[torch.nn.Module, StateLayer], step: StateMetadata) -> StateContext:
        """Return the StateContext for a step."""


class BoundStates:
    """Memory of states that the recurrent layers of a module use in all steps.

    Args:
        module: The module that contains the layers.
        specs: Specs of the states of the layers, by module name. Empty for a model without recurrent layers.
        dtype: The dtype of the computation.
        device: Device of the states.
        kernels: Kernels that compute on the device, or None to compute with torch.
        from_start: Whether to compute recurrences token by token, without stored states. This works only for sequences
            that begin in the step.
        on_host: Kernels that compute on the CPU. They are used if they support the states.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        specs: Mapping[str, StateSpec],
        dtype: torch.dtype,
        device: torch.device,
        kernels: StateKernels | None = None,
        *,
        from_start: bool = False,
        on_host: HostStateKernels | None = None,
    ) -> None:
        self.memory = StateMemory(specs, dtype, device)
        self._modules = {name: each for name, each in module.named_modules() if name in specs}
        self._device = device
        self._kernels = kernels
        self._from_start = from_start
        self._on_host = on_host if on_host is not None and on_host.takes(dtype, device) else None
        self._layers: Mapping[torch.nn.Module, StateLayer] = {}

    def bind(self, layers: StateLayers) -> None:
        """Replace the memory of states. An empty dictionary releases the current memory."""
        self._layers = {self._modules[name]: layer for name, layer in layers.items()}

    def context(self, step: StateMetadata | None, num_tokens: int) -> StateContext | None:
        """Return the StateContext for the recurrent layers in a step, or None for a model without recurrent layers.

        Raises RuntimeError if the step has no states, because the logits would be wrong without states.
        """
        if not self.memory.specs:
            return None
        if step is None:
            raise RuntimeError("the step has no states for the model's recurrent layers")
        if self._from_start:
            return ReferenceStates(step)
        if self._on_host is not None:
            return self._on_host.context(self._layers, step)
        if self._kernels is None:
            return RowStates(self._layers, step, self._device, late=self._device.type != "cpu")
        indices = StateIndices.of(step, num_tokens, self._device)
        step.flags.append(indices.broken)
        return TritonStates(self._kernels, self._layers, indices, step, self._device)

    def captured(self, indices: StateIndices) -> StateContext | None:
        """Return the StateContext for a step whose metadata is only on the device, or None for a model without
        recurrent layers.

        Raises RuntimeError if there are no kernels, because the torch implementation needs the metadata on the host.
        """
        if not self.memory.specs:
            return None
        if self._kernels is None:
            raise RuntimeError(
                "torch computes the model's recurrent layers, so the step cannot be captured as a CUDA graph"
            )
        return TritonStates(self._kernels, self._layers, indices, None, self._device)

"""Triton kernels of recurrent layers for a model, and the tensors with indices of states that captured steps read."""

from collections.abc import Mapping

import torch

from penstock_enginecore.forward.cuda.buffers import HostSlots, StepShape, VectorLayout
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.states.base import StateMetadata
from penstock_enginecore.states.core.spec import StateSpec
from penstock_enginecore.states.cuda.context import StateKernels, why_not
from penstock_enginecore.states.cuda.indices import NOBODY, StateIndices, index_vectors


def open_kernels(specs: Mapping[str, StateSpec]) -> StateKernels:
    """Return the kernels for the recurrent layers of ``specs``. Raises UnsuitableError if the kernels do not support a
    layer or the machine.
    """
    if reason := why_not(specs):
        raise UnsuitableError(reason)
    try:  # Triton is imported only if there is a device for its kernels.
        from penstock_enginecore.states.cuda.triton_kernels import TritonStateKernels
    except ModuleNotFoundError as e:
        raise UnsuitableError(f"the kernels of recurrent layers cannot be compiled: {e}") from e
    return TritonStateKernels()


class StateBuffers:
    """Tensors with the indices of recurrent states, whose addresses never change, for steps that are captured as CUDA
    graphs.

    Args:
        max_shape: Shape of the largest step.
        device: Device of the tensors.
    """

    def __init__(self, max_shape: StepShape, device: torch.device) -> None:
        requests, tokens = max_shape.requests, max_shape.tokens
        self._layout = VectorLayout([(length, torch.int32) for length in (*[requests] * 5, tokens, tokens)])
        self._slots = HostSlots.on(device)
        with torch.inference_mode(False):
            self._flat = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=device)
            self._broken = torch.zeros(requests, dtype=torch.int32, device=device)
        self._views = self._layout.views(self._flat)

    def of(self, shape: StepShape, *, decodes: bool) -> StateIndices:
        """Return the tensors for a step of ``shape``. Each call returns tensors in the same memory."""
        firsts, starts, counts, rings, slots = (view[: shape.requests] for view in self._views[:5])
        owners, writes = (view[: shape.tokens] for view in self._views[5:])
        broken = self._broken[: shape.requests]
        return StateIndices(firsts, starts, counts, rings, slots, owners, writes, broken, decodes=decodes, padded=True)

    def load(self, step: StateMetadata, num_tokens: int, shape: StepShape) -> None:
        """Start copying the indices of the recurrent states of ``step`` to the device, padded to ``shape``. Does not
        wait for the copy.
        """
        host = self._slots.take(self._layout.num_bytes)
        views = [view.numpy() for view in self._layout.views(host.memory)]
        for index, (view, vector) in enumerate(zip(views, index_vectors(step, num_tokens), strict=True)):
            length, padding = (shape.requests, 0) if index < 5 else (shape.tokens, NOBODY)
            view[: len(vector)] = vector
            view[len(vector) : length] = padding
        self._flat.copy_(host.send(self._layout.num_bytes))

"""Computation of recurrent layers with the CPU kernels (``csrc/states.h``)."""

import ctypes
from collections.abc import Mapping

import numpy as np
import torch

from penstock_enginecore.native.ffi_structs import Convolution, Scan, StateMemory, StateStep
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.states.base import ConvCall, ScanCall, StateContext, StateMetadata
from penstock_enginecore.states.memory import StateLayer
from penstock_enginecore.states.rows import RowStates

_ACTIVATIONS = {None: 0, "silu": 1, "swish": 1}
"""Activation functions after a convolution that the kernels support, by transformers' names."""


class NativeStateKernels:
    """Factory of ``StateContext`` objects for steps whose recurrent layers the kernels of ``library`` compute."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def takes(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether the kernels support states whose stored inputs of convolutions have this dtype and device."""
        return dtype == torch.float32 and device.type == "cpu"

    def context(self, layers: Mapping[torch.nn.Module, StateLayer], step: StateMetadata) -> StateContext:
        """Return the context in which the recurrent layers of a step are computed."""
        return NativeStates(self._library, layers, step)


class NativeStates:
    """``StateContext`` of an engine step. The results of a token are bit-identical in a prompt and in a decode step.

    Args:
        library: The kernels.
        layers: Memory for the states of each recurrent layer, by the layer's module. Stored inputs of convolutions are
            float32.
        step: Indices of the recurrent states of the step's requests.
    """

    def __init__(
        self, library: NativeLibrary, layers: Mapping[torch.nn.Module, StateLayer], step: StateMetadata
    ) -> None:
        self._library = library
        self._layers = layers
        self.step = step
        self._arrays = StepArrays(step)

    def convolve(self, call: ConvCall) -> torch.Tensor:
        """Compute a layer's convolution for all requests. Stores the new inputs, and the tails: the last inputs before
        the end of a span.
        """
        layer = self._layers[call.mixer]
        if call.activation not in _ACTIVATIONS:
            return RowStates(self._layers, self.step, call.inputs.device).convolve(call)
        inputs = _rows(call.inputs)
        weight = call.weight.float().T.contiguous()
        bias = None if call.bias is None else call.bias.float().contiguous()
        output = torch.empty_like(inputs)
        convolution = Convolution(
            memory_struct(layer),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            _ACTIVATIONS[call.activation],
            inputs.data_ptr(),
            inputs.stride(0),
            output.data_ptr(),
            output.stride(0),
        )
        self._library.call("convolve", ctypes.byref(self._arrays.struct), ctypes.byref(convolution))
        self._arrays.tell_broken(self.step)
        return output.to(call.inputs.dtype)

    def scan(self, call: ScanCall) -> torch.Tensor:
        """Compute a layer's recurrence for all requests. Stores the open rows (data of the tokens after the last span)
        and the states at the ends of spans.
        """
        query, key, value, decay = (_rows(each) for each in (call.query, call.key, call.value, call.decay))
        beta = None if call.beta is None else _rows(call.beta)
        rates = None if call.rates is None else _rows(call.rates)
        output = torch.empty_like(value)
        scan = Scan(
            memory_struct(self._layers[call.mixer]),
            *(query.data_ptr(), query.stride(0)),
            *(key.data_ptr(), key.stride(0)),
            *(value.data_ptr(), value.stride(0)),
            *(decay.data_ptr(), decay.stride(0)),
            *((None, 0) if beta is None else (beta.data_ptr(), beta.stride(0))),
            None if rates is None else rates.data_ptr(),
            *(output.data_ptr(), output.stride(0)),
        )
        self._library.call("scan", ctypes.byref(self._arrays.struct), ctypes.byref(scan))
        self._arrays.tell_broken(self.step)
        return output


class StepArrays:
    """Indices of the recurrent states of a step, in arrays that the kernels read. ``struct`` points into these arrays."""

    def __init__(self, step: StateMetadata) -> None:
        sequences: list[tuple[int, ...]] = []
        writes: list[tuple[int, int]] = []
        for each in step.sequences:
            state, begin = each.state, len(writes)
            writes += state.writes
            sequences.append((each.first, each.start, each.count, state.rows, state.closed, begin, len(writes)))
        self._sequences = np.array(sequences, dtype=np.int64).reshape(-1, 7)
        self._writes = np.array(writes, dtype=np.int64).reshape(-1, 2)
        self._broken = np.zeros(len(sequences), dtype=np.int64)
        self.struct = StateStep(
            len(sequences), self._sequences.ctypes.data, self._writes.ctypes.data, self._broken.ctypes.data
        )

    def tell_broken(self, step: StateMetadata) -> None:
        """Add the indices of the requests with a NaN or infinity in their new states to ``step.broken``."""
        if self._broken.any():
            step.broken.update(np.flatnonzero(self._broken).tolist())


def memory_struct(layer: StateLayer) -> StateMemory:
    """Return the struct that describes the memory for the states of ``layer`` to the kernels. The memory must outlive
    the struct.
    """
    spec = layer.spec
    parts = (layer.tails, layer.inputs, layer.closed, layer.keys, layer.updates, layer.decays)
    return StateMemory(
        *(None if part is None else part.data_ptr() for part in parts),
        layer.inputs.shape[1],
        spec.channels,
        spec.kernel,
        spec.num_heads,
        spec.num_key_heads,
        spec.key_size,
        spec.value_size,
        spec.decay_size,
    )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` ``[tokens, ...]`` as a contiguous float32 tensor."""
    return tensor.float().contiguous()

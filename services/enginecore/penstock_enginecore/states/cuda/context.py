"""Context that computes the recurrent layers of a step with Triton kernels."""

import dataclasses
import functools
import logging
from collections.abc import Mapping
from typing import Protocol

import torch

from penstock_enginecore.states.base import ConvCall, ScanCall, StateContext, StateMetadata
from penstock_enginecore.states.core.spec import StateSpec
from penstock_enginecore.states.cuda.indices import StateIndices
from penstock_enginecore.states.memory import StateLayer
from penstock_enginecore.states.rows import RowStates

logger = logging.getLogger(__name__)

_SILU = ("silu", "swish")
"""Names of SiLU, the activation function that the kernels compute."""
MAX_KEY_SIZE = 256
"""Maximum number of rows of a head's state. A program keeps all rows of its columns in registers."""
_CONVOLUTION = frozenset(("mixer", "inputs", "weight", "bias", "activation"))
_SCAN = frozenset(("mixer", "query", "key", "value", "decay", "beta"))
"""Names of the fields of a ``ScanCall`` that the kernels use."""


class StateKernels(Protocol):
    """Functions that launch the kernels of recurrent layers. ``convolution.convolve`` and ``scan.scan`` document the
    arguments.
    """

    def convolve(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        layer: StateLayer,
        indices: StateIndices,
        *,
        activated: bool,
    ) -> None:
        """Compute a layer's convolution into ``out``, and store the new inputs, which later steps need."""

    def scan(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None,
        out: torch.Tensor,
        layer: StateLayer,
        indices: StateIndices,
    ) -> None:
        """Compute a layer's recurrence into ``out``, and store the new open rows and the states at the ends of spans."""


class TritonStates:
    """``StateContext`` of an engine step, which launches kernels. The host waits for no result.

    ``RowStates`` computes the calls that the kernels do not support. The kernels and ``RowStates`` use the same memory
    for the states of a layer.

    Args:
        kernels: Functions that launch the kernels.
        layers: Memory for the states of each recurrent layer, by the layer's module.
        indices: Indices of the states of the step's requests, on the device.
        step: Indices of the states of the step's requests, on the host, or None if only the device has the indices.
        device: Device of the memory for states.
    """

    def __init__(
        self,
        kernels: StateKernels,
        layers: Mapping[torch.nn.Module, StateLayer],
        indices: StateIndices,
        step: StateMetadata | None,
        device: torch.device,
    ) -> None:
        self._kernels = kernels
        self._layers = layers
        self._indices = indices
        self._step = step
        self._device = device
        self._rows: RowStates | None = None

    def convolve(self, call: ConvCall) -> torch.Tensor:
        """Compute a layer's convolution for all requests at once, and store the new inputs, which later steps need."""
        if reason := unknown_convolution(call):
            return self._other(reason).convolve(call)
        out = call.inputs.new_empty(call.inputs.shape)
        weight = call.weight.contiguous()
        bias = None if call.bias is None else call.bias.to(weight.dtype).contiguous()
        layer = self._layers[call.mixer]
        self._kernels.convolve(
            call.inputs, weight, bias, out, layer, self._indices, activated=call.activation is not None
        )
        return out

    def scan(self, call: ScanCall) -> torch.Tensor:
        """Compute a layer's recurrence for all requests at once. Stores the open rows (data of the tokens after the
        last span) and the states at the ends of spans.
        """
        if reason := unknown_scan(call):
            return self._other(reason).scan(call)
        query, key, value, decay = (each.contiguous() for each in (call.query, call.key, call.value, call.decay))
        beta = None if call.beta is None else call.beta.contiguous()
        out = torch.empty_like(value)
        self._kernels.scan(query, key, value, decay, beta, out, self._layers[call.mixer], self._indices)
        return out

    def _other(self, reason: str) -> StateContext:
        """Return the context that computes the step's calls with torch. Raises RuntimeError if only the device has the
        step's indices.
        """
        if self._step is None:
            raise RuntimeError(f"{reason}, so the step cannot be captured as a CUDA graph")
        _log_once(reason)
        if self._rows is None:
            self._rows = RowStates(self._layers, self._step, self._device, late=self._device.type != "cpu")
        return self._rows


@functools.cache
def _log_once(reason: str) -> None:
    logger.warning(
        "computing some operations of recurrent layers with PyTorch instead of the state kernels (slower) reason=%s",
        reason,
    )


def unknown_convolution(call: ConvCall) -> str:
    """Return why the kernels do not support the convolution of ``call``, or an empty text."""
    if call.activation not in (None, *_SILU):
        return f"the state kernels do not compute the activation {call.activation!r}"
    return _unknown_fields(call, _CONVOLUTION)


def unknown_scan(call: ScanCall) -> str:
    """Return why the kernels do not support the recurrence of ``call``, or an empty text."""
    if call.decay.dim() != 2:
        return f"the state kernels do not compute decays of shape {list(call.decay.shape)}"
    if call.value.dtype != torch.float32:
        return f"the state kernels do not scan values of {call.value.dtype}"
    return _unknown_fields(call, _SCAN)


def _unknown_fields(call: ConvCall | ScanCall, known: frozenset[str]) -> str:
    """Return text that names an input of ``call`` that the kernels would ignore, or an empty text."""
    names = (field.name for field in dataclasses.fields(call))
    unknown = [name for name in names if name not in known and getattr(call, name) is not None]
    return f"the state kernels do not know the input {unknown[0]!r} of recurrent layers" if unknown else ""


def why_not(specs: Mapping[str, StateSpec]) -> str:
    """Return text that names the first layer of ``specs`` that the kernels do not support, and the reason, or an empty
    text.
    """
    for name, spec in specs.items():
        if spec.key_size > MAX_KEY_SIZE:
            return (
                f"{name}: its states have {spec.key_size} rows per head, but the kernels support at most {MAX_KEY_SIZE}"
            )
    return ""

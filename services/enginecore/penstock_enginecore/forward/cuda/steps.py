"""What steps of the fused decoder run on: tensors for their inputs, and for what flows through the layers."""

from dataclasses import dataclass

import torch

from penstock_enginecore.forward.cuda.activations import ActivationBuffers, Activations, Widths
from penstock_enginecore.forward.cuda.buffers import (
    CAPTURED,
    MAX_CAPTURED_TOKENS,
    HostSlots,
    InputBuffers,
    StepInputs,
    StepShape,
)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What of a KV cache the inputs depend on: its groups, and the most blocks that a sequence fills in one of them."""

    num_groups: int
    max_blocks: int


@dataclass(frozen=True, slots=True)
class Step:
    """The tensors of steps of ``shape``: the same memory for each of them, where they are padded. ``buffers`` brings inputs."""

    shape: StepShape
    buffers: InputBuffers
    inputs: StepInputs
    activations: Activations


class StepMemory:
    """Tensors of steps: those of padded shapes are allocated once and never move, those of larger ones when a step first needs so
    much.
    """

    def __init__(self, cache: CacheShape, widths: Widths, dtype: torch.dtype, device: torch.device) -> None:
        self.cache = cache
        self._widths = widths
        self._dtype = dtype
        self._device = device
        self._slots = HostSlots.on(device)
        self._captured = self._allocate(CAPTURED)
        self._large: tuple[InputBuffers, ActivationBuffers] | None = None
        self._steps: dict[StepShape, Step] = {}

    def step(self, shape: StepShape) -> Step:
        """For a step of ``shape``."""
        if shape.is_large:
            return _step(shape, *self._room_for(shape))
        if shape not in self._steps:
            self._steps[shape] = _step(shape, *self._captured)
        return self._steps[shape]

    def _room_for(self, shape: StepShape) -> tuple[InputBuffers, ActivationBuffers]:
        """That of earlier large steps, if it is enough. What is too small is freed before more is taken."""
        held = StepShape(0, 0) if self._large is None else self._large[0].max_shape
        if self._large is None or shape.tokens > held.tokens or shape.requests > held.requests:
            self._large = None
            wanted = zip((held.tokens, held.requests), (shape.tokens, shape.requests), strict=True)
            self._large = self._allocate(StepShape(*(_whole(max(one, other)) for one, other in wanted)))
        return self._large

    @torch.inference_mode(False)
    def _allocate(self, shape: StepShape) -> tuple[InputBuffers, ActivationBuffers]:
        inputs = InputBuffers(shape, self.cache.num_groups, self.cache.max_blocks, self._slots, self._device)
        return inputs, ActivationBuffers(shape, self._widths, self._dtype, self._device)


def _step(shape: StepShape, inputs: InputBuffers, activations: ActivationBuffers) -> Step:
    return Step(shape, inputs, inputs.of(shape), activations.of(shape))


def _whole(count: int) -> int:
    """The next multiple of the largest padded size, so that steps of slowly growing sizes do not allocate each time."""
    return -(-count // MAX_CAPTURED_TOKENS) * MAX_CAPTURED_TOKENS

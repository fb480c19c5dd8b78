"""An engine whose steps find NaN in every slot and open row that their requests may not read."""

from collections.abc import Callable
from typing import Any

import torch

from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.generation.runner import GenerationRunner
from penstock_enginecore.forward.base import ForwardBatch, ForwardOutput
from penstock_enginecore.states.base import StateMetadata
from penstock_enginecore.states.core.spec import SPAN, ZERO_SLOT


class PoisonedStates:
    """Fills states with NaN during every step, except for the closed states and open rows that the step reads.

    Slots and rows that the step writes begin with NaN as well. All others are restored after the step, so kept states
    stay valid for the steps that read them. ``steps`` counts the steps.
    """

    def __init__(self, engine: EngineCore) -> None:
        self.steps = 0
        executor: Any = engine.executor
        self._runner: GenerationRunner = executor._worker.runner
        self._run: Callable[..., ForwardOutput] = self._runner._forward.run
        self._runner._forward.run = self._poisoned

    def _poisoned(self, batch: ForwardBatch, rows: Any, **named: Any) -> ForwardOutput:
        assert batch.states is not None
        saved = []
        for layer in self._runner._state_layers.values():
            of_slots = [part for part in (layer.tails, layer.closed) if part is not None]
            for part in layer.tensors():
                is_of_slots = any(part is each for each in of_slots)
                length = layer.inputs.shape[1]
                read, written = (_slots if is_of_slots else _rows)(batch.states, length)
                flat = part if is_of_slots else part.flatten(0, 1)
                old, unread = flat.clone(), _others(len(flat), read)
                flat[unread] = torch.nan
                saved.append((flat, _others(len(flat), read | written), old))
        output = self._run(batch, rows, **named)
        for flat, untouched, old in saved:
            assert flat[untouched].isnan().all(), "the step wrote a state that is not its own"
            flat[untouched] = old[untouched]
        self.steps += 1
        return output


def _slots(step: StateMetadata, length: int) -> tuple[set[int], set[int]]:
    """Return the slots that a step reads, and those that it writes."""
    states = [sequence.state for sequence in step.sequences]
    return {ZERO_SLOT, *(state.closed for state in states)}, {slot for state in states for _, slot in state.writes}


def _rows(step: StateMetadata, length: int) -> tuple[set[int], set[int]]:
    """Return the places in rings of ``length`` that a step reads, and those that it writes."""
    read: set[int] = set()
    written: set[int] = set()
    for sequence in step.sequences:
        ring = sequence.state.rows * length
        read.update(ring + position % length for position in range(sequence.base, sequence.start))
        first = max(sequence.start, sequence.end - SPAN)
        written.update(ring + position % length for position in range(first, sequence.end))
    return read, written


def _others(count: int, places: set[int]) -> torch.Tensor:
    return torch.tensor([place for place in range(count) if place not in places], dtype=torch.int64)

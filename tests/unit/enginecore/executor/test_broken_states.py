"""Requests whose states are not finite are found without waiting for the device before the step's results."""

import torch

from penstock_enginecore.executor.broken_states import NO_BROKEN_STATES, BrokenStates
from penstock_enginecore.states.base import SequenceStep, StateMetadata
from penstock_enginecore.states.core.spec import StateStep
from penstock_enginecore.worker.device_thread import begin_copy


class Slow:
    """A copy that counts how often somebody waits for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.numbers = tensor.clone().numpy()
        self.waits = 0

    def arrived(self) -> bool:
        return False

    def wait(self) -> object:
        self.waits += 1
        return self.numbers


def step(count: int) -> StateMetadata:
    return StateMetadata([SequenceStep(i, 0, 1, StateStep(i, 0)) for i in range(count)])


def test_flags_are_read_once_and_only_when_somebody_waits() -> None:
    copies: list[Slow] = []

    def begin(tensor: torch.Tensor) -> Slow:
        copies.append(Slow(tensor))
        return copies[-1]

    states = step(4)
    states.broken.add(0)
    states.flags.extend([torch.tensor([0, 0, 1, 0], dtype=torch.int32), torch.tensor([0, 0, 1, 7], dtype=torch.int32)])
    broken = BrokenStates.of(["a", "b", "c", "d"], states, begin)
    assert [copy.waits for copy in copies] == [0, 0]
    for flags in states.flags:
        flags.zero_()  # the next step uses the same flags
    assert broken.wait() == ["a", "c", "d"]
    assert [copy.waits for copy in copies] == [1, 1]


def test_steps_without_states_have_no_broken_ones() -> None:
    assert NO_BROKEN_STATES.wait() == BrokenStates.of(["a"], None, begin_copy).wait() == []
    assert BrokenStates.of(["a"], step(1), begin_copy).wait() == []

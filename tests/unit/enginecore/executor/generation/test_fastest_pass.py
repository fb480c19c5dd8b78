"""How long a step takes: of as many passes as a worker was told to make, the fastest."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock_enginecore.executor.generation.runner import fastest_pass


class SlowForward:
    """Takes a minute, the first time two."""

    def __init__(self) -> None:
        self.specs = {"layer": SimpleNamespace(block_size=16)}
        self.memory = SimpleNamespace(throwaway=lambda block_size, num_blocks: (block_size, num_blocks))
        self.now = 0.0
        self.passes: list[int] = []

    def bind(self, caches: Any) -> None:
        """There is nothing to attend to."""

    def run(self, batch: Any, rows: Any) -> Any:
        self.now += 60.0 if self.passes else 120.0
        self.passes.append(len(batch.token_ids))
        return SimpleNamespace(logits=torch.zeros(len(rows), 4))


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_a_worker_makes_all_passes_that_it_is_told_to_however_long_they_take(passes: int) -> None:
    """Workers that share layers wait for each other in each pass: one that stopped by its own clock would leave the others."""
    forward: Any = SlowForward()
    assert fastest_pass(forward, 4, passes, lambda: float(forward.now)) == (60.0 if passes > 1 else 120.0)
    assert forward.passes == [4] * passes

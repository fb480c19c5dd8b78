"""Which steps are timed at the start, how often, and what of it counts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock_enginecore.executor.generation.step_timing import time_steps

ROWS = (1, 2, 4, 8, 16, 32, 64)


class SlowForward:
    """Takes ``seconds`` by rows, the first time of each twice as long."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.specs = {"layer": SimpleNamespace(block_size=16)}
        self.memory = SimpleNamespace(throwaway=lambda block_size, num_blocks: (block_size, num_blocks))
        self.now = 0.0
        self.passes: dict[int, int] = {}
        self._seconds = seconds

    def bind(self, caches: Any) -> None:
        """There is nothing to attend to."""

    def run(self, batch: Any, rows: Any) -> Any:
        count = len(batch.token_ids)
        self.passes[count] = self.passes.get(count, 0) + 1
        self.now += self._seconds[count] * (2 if self.passes[count] == 1 else 1)
        return SimpleNamespace(logits=torch.zeros(len(rows), 4))


def timed(forward: Any, max_len: int = 100) -> dict[int, float]:
    return time_steps(forward, ROWS, max_len, lambda: float(forward.now))


def test_what_the_first_pass_takes_does_not_count():
    seconds = {rows: 0.001 + 0.0002 * rows for rows in ROWS}
    assert timed(SlowForward(seconds)) == pytest.approx(seconds)


def test_steps_of_many_rows_are_timed_in_fewer_passes_where_that_takes_long():
    """100 million parameters on two cores."""
    forward = SlowForward(dict(zip(ROWS, (0.012, 0.012, 0.013, 0.014, 0.021, 0.036, 0.067), strict=True)))
    assert list(timed(forward)) == list(ROWS)
    assert forward.now < 0.6
    assert forward.passes == {1: 3, 2: 3, 4: 3, 8: 3, 16: 2, 32: 2, 64: 2}


def test_a_slow_engine_times_a_token_and_starts():
    forward = SlowForward(dict.fromkeys(ROWS, 0.3))
    assert list(timed(forward)) == [1]
    assert forward.now < 1.5


def test_no_step_is_longer_than_the_model_allows():
    assert list(timed(SlowForward(dict.fromkeys(ROWS, 0.001)), max_len=20)) == [1, 2, 4, 8, 16]

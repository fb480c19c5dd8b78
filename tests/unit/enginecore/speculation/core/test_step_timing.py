"""Which steps are timed at the start, how often, and what of it counts."""

import pytest

from penstock_enginecore.speculation.core.policy import time_steps

ROWS = (1, 2, 4, 8, 16, 32, 64)


class SlowWorkers:
    """Take ``seconds`` by rows, the first time of each twice as long."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.now = 0.0
        self.passes: dict[int, int] = {}
        self._seconds = seconds

    def step_seconds(self, num_tokens: int, passes: int) -> float:
        assert num_tokens not in self.passes
        self.passes[num_tokens] = passes
        self.now += self._seconds[num_tokens] * (passes + 1)
        return self._seconds[num_tokens]


def timed(workers: SlowWorkers, max_len: int = 100) -> dict[int, float]:
    return time_steps(workers.step_seconds, ROWS, max_len, lambda: workers.now)


def test_what_the_first_pass_takes_does_not_count():
    seconds = {rows: 0.001 + 0.0002 * rows for rows in ROWS}
    assert timed(SlowWorkers(seconds)) == pytest.approx(seconds)


def test_steps_of_many_rows_are_timed_in_fewer_passes_where_that_takes_long():
    """100 million parameters on two cores."""
    workers = SlowWorkers(dict(zip(ROWS, (0.012, 0.012, 0.013, 0.014, 0.021, 0.036, 0.067), strict=True)))
    assert list(timed(workers)) == list(ROWS)
    assert workers.now < 0.6
    assert workers.passes == {1: 3, 2: 3, 4: 3, 8: 3, 16: 2, 32: 2, 64: 2}


def test_a_slow_engine_times_a_token_and_starts():
    workers = SlowWorkers(dict.fromkeys(ROWS, 0.3))
    assert list(timed(workers)) == [1]
    assert workers.now < 1.5


def test_no_step_is_longer_than_the_model_allows():
    assert list(timed(SlowWorkers(dict.fromkeys(ROWS, 0.001)), max_len=20)) == [1, 2, 4, 8, 16]

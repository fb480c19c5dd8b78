"""Number of drafts that save more time than they cost."""

import itertools
from random import Random

import pytest

from penstock_enginecore.speculation.core.policy import DraftHistory, DraftPolicy, StepCost, time_steps

CPU = {1: 12.8, 2: 12.9, 4: 13.0, 8: 13.3, 12: 15.3, 16: 19.0, 24: 27.5, 32: 33.8, 64: 66.0}
"""Milliseconds of a step by its number of rows, for a model on two cores."""


def policy(points: dict[int, float] = CPU, max_drafts: int = 5, adaptive: bool = True) -> DraftPolicy:
    return DraftPolicy(max_drafts, adaptive, StepCost(points))


def with_held(made: DraftPolicy, held: list[float]) -> DraftHistory:
    history = made.begin()
    history.held = held
    return history


def test_a_step_costs_what_was_timed_and_between_along_a_line() -> None:
    cost = StepCost({1: 1.0, 3: 2.0, 5: 1.5})
    assert [cost.seconds(rows) for rows in (1, 2, 3, 5)] == pytest.approx([1.0, 1.5, 2.0, 2.0])
    assert StepCost({1: 1.0, 2: 2.0}).seconds(4) == pytest.approx(4.0)


def test_steps_keep_the_scale_current_and_outliers_do_not() -> None:
    cost = StepCost({1: 1.0, 10: 1.0})
    for _ in range(200):
        cost.took(3, 2.0)
    assert cost.seconds(3) == pytest.approx(2.0)
    cost.took(3, 500.0)
    cost.took(1000, 900.0)
    assert cost.seconds(3) == pytest.approx(2.0)


def test_nothing_is_gained_by_drafts_that_a_search_over_all_choices_does_not_find() -> None:
    made = policy({1: 1.0, 4: 1.2, 8: 2.0, 16: 4.0}, max_drafts=3)
    histories = [with_held(made, held) for held in ([0.9, 0.8, 0.7], [0.5, 0.5, 0.1], [0.2, 0.9, 0.9])]
    chosen = made.choose(histories, [3, 3, 3], 3, drafting=False)

    def rate(counts: tuple[int, ...]) -> float:
        tokens = 3.0
        for history, count in zip(histories, counts, strict=True):
            survival = 1.0
            for held in history.held[:count]:
                survival *= held
                tokens += survival
        return tokens / made.cost.seconds(3 + sum(counts))

    assert rate(tuple(chosen)) == pytest.approx(max(map(rate, itertools.product(range(4), repeat=3))))


def run(made: DraftPolicy, history: DraftHistory, steps: int, held: float, num_rows: int = 1) -> tuple[float, float]:
    """Return tokens per millisecond with drafts, each of which is accepted with probability ``held``, and without
    drafts.
    """
    tokens = seconds = 0.0
    random = Random(1)
    for _ in range(steps):
        [count] = made.choose([history], [5], num_rows, drafting=True)
        accepted = 0
        for _place in range(count):
            if random.random() >= held:
                break
            accepted += 1
        if count:
            history.verified(count, accepted)
        else:
            history.passed(1)
        tokens += 1 + accepted
        seconds += CPU_COST.seconds(num_rows + count)
    return tokens / seconds, 1 / CPU_COST.seconds(num_rows)


CPU_COST = StepCost(CPU)


def test_a_useless_drafter_costs_less_than_a_percent_of_the_time() -> None:
    made = policy()
    with_drafts, without = run(made, made.begin(), 2000, 0.0)
    assert with_drafts > 0.99 * without


def test_a_good_drafter_is_used() -> None:
    made = policy()
    with_drafts, without = run(made, made.begin(), 500, 0.9)
    assert with_drafts > 2.5 * without


def test_a_drafter_that_becomes_good_is_found_out() -> None:
    made = policy()
    history = made.begin()
    run(made, history, 600, 0.0)
    run(made, history, 1500, 0.95)
    with_drafts, without = run(made, history, 200, 0.95)
    assert with_drafts > 2.5 * without


def test_a_full_engine_drafts_nothing() -> None:
    made = policy()
    histories = [with_held(made, [0.6] * 5) for _ in range(32)]
    assert sum(made.choose(histories, [5] * 32, 32, drafting=True)) == 0


def test_no_step_has_more_rows_than_something_is_known_of() -> None:
    """If the line is extended beyond the last point, more rows seem to pay."""
    points = {1: 12.0, 8: 14.2, 12: 17.1, 16: 20.8}
    eight = [with_held(policy(points), [0.95] * 5) for _ in range(8)]
    assert 0 < sum(policy(points).choose(eight, [5] * 8, 8, drafting=True)) <= 24
    crowd = [with_held(policy(points), [0.95] * 5) for _ in range(32)]
    assert sum(policy(points).choose(crowd, [5] * 32, 32, drafting=True)) == 0


def test_drafts_that_take_long_to_make_are_not_made() -> None:
    made = policy()
    history = with_held(made, [0.6, 0.5, 0.4, 0.3, 0.2])
    assert made.choose([history], [5], 1, drafting=True) != [0]
    for _ in range(50):
        made.drafting_took(1, 5, 5 * 30.0)
    assert made.choose([with_held(made, [0.6, 0.5, 0.4, 0.3, 0.2])], [5], 1, drafting=True) == [0]


def test_drafts_that_took_long_once_are_made_again() -> None:
    made = policy()
    made.drafting_took(1, 5, 5 * 8.0)
    for _ in range(6):
        made.drafting_took(1, 5, 5 * 0.5)
    assert made.choose([with_held(made, [0.9] * 5)], [5], 1, drafting=True) == [5]


def test_a_time_that_keeps_drafts_from_being_made_fades() -> None:
    made = policy({1: 10.0, 2: 10.1, 4: 10.2, 8: 10.4})
    history = with_held(made, [0.95] * 5)
    made.drafting_took(1, 5, 5 * 30.0)
    steps = 0
    while not any(made.choose([history], [5], 1, drafting=True)):
        history.passed(1)
        steps += 1
        assert steps < 1000
    assert steps > 100


def test_without_adaption_there_are_as_many_as_there_may_be() -> None:
    made = policy(adaptive=False)
    assert made.choose([made.begin(), made.begin()], [5, 2], 2, drafting=True) == [5, 2]


def test_rests_double_and_begin_anew_once_a_draft_holds() -> None:
    history = policy().begin()
    lengths = []
    for _ in range(7):
        history.rest()
        lengths.append(history.rest_left)
        history.passed(history.rest_left)
        assert history.tries
        history.verified(2, 0)
    assert lengths == [32, 64, 128, 256, 512, 512, 512]
    history.verified(2, 1)
    history.rest()
    assert history.rest_left == 32


# Timing of steps at the start: measured sizes, number of repetitions, and the result.

ROWS = (1, 2, 4, 8, 16, 32, 64)


class SlowWorkers:
    """Workers whose steps take ``seconds`` by rows. The first step of each size takes ``first`` more seconds."""

    def __init__(self, seconds: dict[int, float], first: float = 0.0) -> None:
        self.now = 0.0
        self.passes: dict[int, int] = {}
        self._seconds = seconds
        self._first = first

    def step_seconds(self, num_tokens: int, passes: int) -> float:
        assert num_tokens not in self.passes
        self.passes[num_tokens] = passes
        self.now += self._first + self._seconds[num_tokens] * (passes + 1)
        return self._seconds[num_tokens]


def timed(workers: SlowWorkers, max_len: int = 100) -> dict[int, float]:
    return time_steps(workers.step_seconds, ROWS, max_len)


def test_compiling_kernels_for_seconds_leaves_no_size_untimed():
    seconds = {rows: 0.001 + 0.0002 * rows for rows in ROWS}
    assert timed(SlowWorkers(seconds, first=5.0)) == seconds


def test_steps_of_many_rows_are_timed_in_fewer_passes_where_that_takes_long():
    """The times are those of a model with 100 million parameters on two cores."""
    workers = SlowWorkers(dict(zip(ROWS, (0.012, 0.012, 0.013, 0.014, 0.021, 0.036, 0.067), strict=True)))
    assert list(timed(workers)) == list(ROWS)
    assert workers.now < 0.7
    assert workers.passes == {1: 3, 2: 3, 4: 3, 8: 3, 16: 3, 32: 2, 64: 2}


def test_a_slow_engine_times_a_token_and_starts():
    workers = SlowWorkers(dict.fromkeys(ROWS, 0.3))
    assert list(timed(workers)) == [1]
    assert workers.now < 1.5


def test_no_step_is_longer_than_the_model_allows():
    assert list(timed(SlowWorkers(dict.fromkeys(ROWS, 0.001)), max_len=20)) == [1, 2, 4, 8, 16]

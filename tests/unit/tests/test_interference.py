"""What is told of streams beside prompts."""

import pytest

from tests.benchmarks.interference import Load, Row, arrivals_of, medians, over_time, row_of
from tests.benchmarks.token_streams import Stream, quantile


def test_most_of_the_time_lies_in_long_gaps_though_few_are_long() -> None:
    gaps = [0.01] * 990 + [1.0] * 10
    assert quantile(gaps, 0.98) == 0.01
    assert over_time(gaps, 0.4) == 0.01
    assert over_time(gaps, 0.6) == 1.0


def test_gaps_are_those_that_end_in_the_interval() -> None:
    stream = Stream(tokens=[1, 2, 3, 4], times=[1.0, 2.0, 2.5, 4.0])
    assert stream.gaps() == [1.0, 0.5, 1.5]
    assert stream.gaps(2.5, 4.0) == [0.5]


def test_arrivals_are_as_many_as_the_rate_says_and_the_same_for_all() -> None:
    times = arrivals_of(0.5, 40.0, seed=3)
    assert len(times) == 20
    assert times == sorted(times)
    assert times[0] >= 0.0
    assert times[-1] < 40.0
    assert arrivals_of(0.5, 40.0, seed=3) == times
    assert arrivals_of(0.5, 40.0, seed=4) != times


def test_a_row_counts_what_came_in_the_interval() -> None:
    loaded = Load.__new__(Load)
    loaded.streams = [Stream(tokens=[1] * 6, times=[0.0, 1.0, 2.0, 3.0, 5.0, 9.0])]
    loaded.prompts = [Stream(sent=1.0, tokens=[1, 2], times=[3.0, 4.0])]
    row = row_of("split", 0.5, 0.1, loaded, 1.0, 6.0, 1.0, 100)
    assert (row.prompts, row.two_legs) == (1, 1.0)
    assert row.itl_max == 2.0
    assert row.ttft_p50 == 2.0
    assert row.tokens_per_s == pytest.approx(6 / 5.0)
    assert row.total_per_s == pytest.approx(106 / 5.0)


def test_rounds_become_their_median() -> None:
    numbers = dict.fromkeys(Row.__struct_fields__, 0.0) | {"load": 0.5, "layout": "split", "prompts": 2}
    rows = [Row(**numbers | {"itl_p99": value}) for value in (3.0, 1.0, 2.0)]  # type: ignore[arg-type]
    [(key, row)] = medians(rows).items()
    assert key == (0.5, "split")
    assert (row.itl_p99, row.prompts) == (2.0, 6)

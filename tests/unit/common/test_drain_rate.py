"""What is said of the time until there is room, for known patterns of work."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_common.drain_rate import MAX_RETRY_AFTER, MIN_RETRY_AFTER, DrainRate, retry_after

MEMORY = 10.0


def observed(*events: tuple[float, float]) -> DrainRate:
    """A place that was filled at time 0, and what left it when: (time, units)."""
    rate = DrainRate()
    rate.begin(0.0)
    for now, units in events:
        rate.left(now, units)
    return rate


def test_nothing_is_said_before_anything_has_left() -> None:
    rate = DrainRate()
    rate.begin(5.0)
    assert rate.time_for(9.0, 1, 0) is None


@pytest.mark.parametrize("count", [1, 3, 40, 2000])
def test_a_constant_rate_is_found_from_the_first_departure_on(count: int) -> None:
    rate = observed(*((0.5 * i, 100.0) for i in range(1, count + 1)))
    now = 0.5 * count
    # Departures lie at the ends of the intervals, so they weigh a little more than the time before them.
    assert rate.time_for(now, 1, 0) == pytest.approx(0.5, rel=0.03)
    assert rate.time_for(now, 4, 0) == pytest.approx(2.0, rel=0.03)
    assert rate.time_for(now, 1, 1000) == pytest.approx(5.0, rel=0.03)


def test_bursts_count_with_the_pauses_between_them() -> None:
    rate = observed(*((2.0 * burst, 1.0) for burst in range(1, 31) for _ in range(8)))
    assert rate.time_for(60.0, 8, 0) == pytest.approx(2.0, rel=0.15)


def test_the_slower_of_requests_and_units_decides() -> None:
    rate = observed(*((float(i), 10.0) for i in range(1, 61)))
    assert rate.time_for(60.0, 5, 10) == pytest.approx(5.0, rel=0.06)
    assert rate.time_for(60.0, 1, 70) == pytest.approx(7.0, rel=0.06)


def test_requests_without_units_take_no_time_by_units() -> None:
    rate = observed(*((float(i), 0.0) for i in range(1, 61)))
    assert rate.time_for(60.0, 1, 70) == pytest.approx(1.0, rel=0.06)


def test_a_new_rate_replaces_the_old_one() -> None:
    rate = observed(*((i / 10, 1.0) for i in range(1, 301)), *((30 + 2.0 * i, 1.0) for i in range(1, 31)))
    assert rate.time_for(90.0, 1, 0) == pytest.approx(2.0, rel=0.15)


def test_time_with_nothing_there_changes_nothing() -> None:
    busy = observed(*((float(i), 3.0) for i in range(1, 21)))
    rested = observed(*((float(i), 3.0) for i in range(1, 11)))
    rested.begin(1_000_000.0)
    for i in range(1, 11):
        rested.left(1_000_000.0 + i, 3.0)
    assert rested.time_for(1_000_010.0, 1, 0) == pytest.approx(busy.time_for(20.0, 1, 0))


def test_a_place_that_stands_still_gets_slower() -> None:
    rate = observed(*((float(i), 1.0) for i in range(1, 21)))
    waits = [rate.time_for(20.0 + waited, 1, 0) for waited in (0, 5, 20, 60)]
    assert waits == sorted(waits)
    assert waits[-1] > 60


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0, 1000)), min_size=1, max_size=50), st.floats(0, 100))
def test_the_rate_is_the_weighted_mean_of_all_that_was_observed(gaps: list[tuple[float, float]], more: float) -> None:
    rate, now, events = DrainRate(), 0.0, []
    rate.begin(0.0)
    for gap, units in gaps:
        now += gap
        rate.left(now, units)
        events.append((now, units))
    now += more
    weights = [math.exp((then - now) / MEMORY) for then, _ in events]
    seconds = MEMORY * (1 - math.exp(-now / MEMORY))
    assert rate.time_for(now, 1, 0) == pytest.approx(seconds / sum(weights), rel=1e-6, abs=1e-9)
    units = sum(weight * amount for weight, (_, amount) in zip(weights, events, strict=True))
    if units > 1e-9:
        expected = max(7 * seconds / units, seconds / sum(weights))
        assert rate.time_for(now, 1, 7) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_what_clients_are_told_is_bounded() -> None:
    assert [retry_after(seconds) for seconds in (0.0, 3.5, math.inf)] == [MIN_RETRY_AFTER, 3.5, MAX_RETRY_AFTER]

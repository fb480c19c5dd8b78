"""Admission to a bounded queue when it is full."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_common.bounded_queue import (
    MAX_RETRY_AFTER,
    MIN_RETRY_AFTER,
    DrainRate,
    TenantRoom,
    reserve_of,
    retry_after,
)


def fill(room: TenantRoom, tenant: str, limit: int, *, weight: float = 1.0, at_most: int = 10_000) -> int:
    """Let requests of a tenant enter until one is refused. Returns how many entered."""
    for entered in range(at_most):
        if not room.takes_count(tenant, weight, 1, limit):
            return entered
        room.enter(tenant, weight)
    return at_most


def test_one_tenant_alone_fills_the_place_and_no_more() -> None:
    assert fill(TenantRoom(), "a", 100) == 100


def test_at_the_limit_the_flooding_tenant_is_refused_and_another_one_enters() -> None:
    room = TenantRoom()
    fill(room, "a", 100)
    assert not room.takes_count("a", 1.0, 1, 100)
    assert room.takes_count("b", 1.0, 1, 100)


def test_a_tenant_in_a_place_of_one_still_lets_another_one_enter() -> None:
    room = TenantRoom()
    fill(room, "a", 1)
    assert room.takes_count("b", 1.0, 1, 1)
    room.enter("b", 1.0)
    assert not room.takes_count("c", 1.0, 1, 1)


def test_a_second_flood_leaves_half_of_the_reserve_to_tenants_with_few_requests() -> None:
    room = TenantRoom()
    assert fill(room, "a", 100) == 100
    assert fill(room, "b", 100) == reserve_of(100) // 2
    assert room.takes_count("c", 1.0, 1, 100)
    assert fill(room, "c", 100) >= 2


def test_a_tenant_that_is_not_the_largest_is_refused_above_its_own_share() -> None:
    room = TenantRoom()
    for _ in range(45):
        room.enter("a", 1.0)
    fill(room, "b", 100)
    assert not room.takes_count("b", 1.0, 1, 100), "55 of 100, and its share is 50"
    assert room.takes_count("a", 1.0, 1, 1000)


def test_shares_go_by_weights() -> None:
    room = TenantRoom()
    for _ in range(30):
        room.enter("gold", 3.0)
    for _ in range(90):
        room.enter("batch", 1.0)
    assert room.takes_count("gold", 3.0, 1, 150)
    assert not room.takes_count("batch", 1.0, 31, 150)


def test_sizes_are_shared_like_counts() -> None:
    room = TenantRoom()
    room.enter("a", 1.0, 1000)
    assert not room.takes_size("a", 1.0, 1, 1000)
    assert room.takes_size("b", 1.0, 100, 1000)
    assert not room.takes_size("b", 1.0, 101, 1000), "the reserve is a tenth"


def test_limit_and_reserve_are_never_exceeded_and_idle_tenants_are_forgotten() -> None:
    chance, room = random.Random(7), TenantRoom()
    inside: list[tuple[str, int]] = []
    for _ in range(5000):
        if inside and chance.random() < 0.4:
            room.leave(*inside.pop(chance.randrange(len(inside))))
        tenant, weight, size = f"t{chance.randrange(30)}", chance.choice([0.25, 1.0, 4.0]), chance.randrange(20)
        if room.takes_count(tenant, weight, 1, 50) and room.takes_size(tenant, weight, size, 400):
            room.enter(tenant, weight, size)
            inside.append((tenant, size))
        assert (room.count, room.size) == (len(inside), sum(size for _, size in inside))
        assert room.count <= 55
        assert room.size <= 440
    for entered in inside:
        room.leave(*entered)
    assert (len(room), room.count, room.size) == (0, 0, 0)


def test_it_is_full_at_the_limit_or_with_named_tenants_at_the_end_of_the_reserve() -> None:
    room = TenantRoom()
    fill(room, "", 10)
    assert room.full(10)
    room.leave("")
    room.enter("a", 1.0)
    assert not room.full(10)
    room.enter("b", 1.0)
    assert room.full(10)


# The estimated time until the queue has space, for known patterns of work.

MEMORY = 10.0


def observed(*events: tuple[float, float]) -> DrainRate:
    """Return a queue that was filled at time 0, with departures as (time, units)."""
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
    # Each interval ends with a departure, so the newest departure weighs a little more than the time before it.
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

"""Computed placement of experts: even loads, all experts, few moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_enginecore.experts.balancer import Move, balance, moves_between, rebalanced
from penstock_enginecore.experts.placement import Placement
from tests.benchmarks.expert_balance import EXPERTS, RANKS, SLOTS, traffic


def test_balance_is_the_mean_over_the_highest_with_replicas_that_share() -> None:
    assert balance([6, 2, 0, 4], [0, 1, 2, 3], 2) == pytest.approx(6 / 8)
    assert balance([6, 2, 0, 4], [0, 1, 2, 3, 0, 3], 2) == pytest.approx(6 / 7)
    assert balance([0, 0], [0, 1], 2) == 1.0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("exponent", [1.0, 1.4])
def test_zipf_traffic_is_spread_evenly(exponent: float, seed: int) -> None:
    first, second = traffic(seed, exponent, 4000, 2, 2)
    even = Placement.even(1, EXPERTS, RANKS, SLOTS).physical[0]
    placed = rebalanced(first, even, RANKS)
    assert balance(second, even, RANKS) < 0.75
    assert balance(second, placed, RANKS) >= 0.9
    assert rebalanced(second, placed, RANKS) == placed


def test_the_worst_placement_comes_right() -> None:
    counts, _ = traffic(0, 1.4, 4000, 2, 2)
    hottest_first = sorted(range(EXPERTS), key=lambda expert: -counts[expert])
    worst = [*hottest_first, *reversed(hottest_first[-RANKS * SLOTS + EXPERTS :])]
    assert balance(counts, worst, RANKS) <= 0.5
    assert balance(counts, rebalanced(counts, worst, RANKS), RANKS) >= 0.9


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    size, experts = draw(st.integers(1, 6)), draw(st.integers(6, 20))
    slots = draw(st.integers(-(-experts // size), experts))
    counts = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    held = draw(st.permutations([slot % experts for slot in range(size * slots)]))
    return counts, list(held), size


@given(loads())
def test_every_expert_has_a_place_and_nothing_gets_worse(given_: tuple[list[int], list[int], int]) -> None:
    counts, held, size = given_
    placed = rebalanced(counts, held, size)
    assert set(placed) == set(range(len(counts)))
    assert len(placed) == len(held)
    assert balance(counts, placed, size) >= balance(counts, held, size)
    assert placed == rebalanced(counts, held, size)


def test_what_is_even_stays_where_it_is() -> None:
    held = [0, 1, 2, 3, 4, 5]
    assert rebalanced([10, 11, 10, 9, 10, 10], held, 3) == tuple(held)


def test_only_what_is_missing_moves_and_from_a_rank_that_has_it() -> None:
    before = Placement(4, 2, 3, ((0, 1, 2, 3, 0, 1),))
    after = Placement(4, 2, 3, ((0, 3, 2, 3, 2, 1),))
    assert moves_between(before, after, 0) == [Move(0, 3, 1, 1), Move(0, 2, 0, 4)]
    own = Placement(4, 2, 3, ((1, 0, 2, 3, 0, 1),))
    assert [move.source for move in moves_between(before, own, 0)] == [0, 0]

"""How long changes of a group stop a rank's steps."""

import pytest

from penstock_enginecore.data_parallel.core.driver import Standstill


class Hands:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def standstill(hands: Hands) -> Standstill:
    return Standstill(hands)


def measured(standstill: Standstill) -> tuple[int, float, int, float]:
    return (
        standstill.num_switches,
        standstill.switch_seconds,
        standstill.num_recoveries,
        standstill.recovery_seconds,
    )


def switch(standstill: Standstill, hands: Hands, agreeing: float, opening: float) -> bool:
    standstill.exchanging()
    hands.now += agreeing
    standstill.switching()
    standstill.exchanging()
    hands.now += opening
    return standstill.opened()


def test_a_planned_change_counts_from_the_exchange_behind_the_last_step(standstill: Standstill, hands: Hands) -> None:
    standstill.exchanging()
    hands.now += 8  # a step, and no switch
    assert not switch(standstill, hands, agreeing=0.5, opening=0.25)
    assert measured(standstill) == (1, 0.75, 0, 0)
    assert not switch(standstill, hands, agreeing=1, opening=1)
    assert measured(standstill) == (2, 2.75, 0, 0)


def test_a_group_that_is_entered_from_none_is_no_change(standstill: Standstill, hands: Hands) -> None:
    standstill.exchanging()
    hands.now += 1
    assert not standstill.opened()
    assert measured(standstill) == (0, 0, 0, 0)


def test_a_loss_counts_from_when_it_was_seen_first(standstill: Standstill, hands: Hands) -> None:
    standstill.exchanging()
    hands.now += 1
    standstill.lost()
    hands.now += 0.5
    standstill.lost()
    assert standstill.seconds_since_loss == 0.5
    standstill.exchanging()
    hands.now += 0.5
    assert standstill.opened()
    assert measured(standstill) == (0, 0, 1, 1)
    assert standstill.seconds_since_loss == 0


def test_a_planned_change_in_which_the_new_group_is_lost_is_a_loss_alone(standstill: Standstill, hands: Hands) -> None:
    standstill.exchanging()
    hands.now += 1
    standstill.switching()
    standstill.exchanging()
    hands.now += 1
    standstill.lost()
    standstill.exchanging()
    hands.now += 2
    assert standstill.opened()
    assert measured(standstill) == (0, 0, 1, 2)
    assert not switch(standstill, hands, agreeing=1, opening=1)
    assert measured(standstill) == (1, 2, 1, 2)

import pytest

from penstock_coordinator.view_channel import Pace, ViewLimiter

PACE = Pace(view_interval=0.1, max_reports_per_second=2000.0)


@pytest.fixture
def limiter():
    limiter = ViewLimiter(PACE, first_at=0.0)
    assert limiter.due(0.0)
    limiter.sent(0.0, 1)
    return limiter


def test_the_first_view_is_due_at_once():
    assert ViewLimiter(PACE, first_at=0.0).due(0.0)


def test_a_change_of_members_is_due_at_once(limiter):
    limiter.members_changed(0.001)
    assert limiter.due(0.001)


def test_loads_wait_for_the_interval(limiter):
    assert not limiter.due(0.05)
    assert limiter.due(0.1)


def test_who_looks_once_per_interval_and_is_early_by_a_hair_need_not_wait_for_another(limiter):
    assert limiter.due(0.0999)


def test_loads_of_many_engines_wait_longer(limiter):
    limiter.sent(0.0, 1000)
    assert limiter.interval == 0.5
    assert not limiter.due(0.4)
    assert limiter.due(0.5)


def test_members_that_change_one_after_another_are_told_of_together(limiter):
    limiter.sent(0.0, 1000)
    limiter.members_changed(0.01)
    limiter.members_changed(0.04)
    assert not limiter.due(0.04)
    assert limiter.waits(0.04) == pytest.approx(0.01)
    assert limiter.due(0.05)
    assert limiter.sent(0.05, 1001) == 0.01, "since the first of them"
    assert limiter.waits(0.05) is None


def test_a_change_in_another_view_is_none_in_this_one(limiter):
    limiter.members_changed(0.001)
    limiter.only_loads()
    assert not limiter.due(0.05)
    assert limiter.waits(0.05) is None


def test_after_a_restart_nothing_is_due_before_the_grace_has_passed():
    limiter = ViewLimiter(PACE, first_at=5.0)
    limiter.members_changed(1.0)
    assert not limiter.due(4.9)
    assert limiter.waits(4.9) is None
    assert limiter.due(5.0)
    assert limiter.sent(5.0, 1) == 5.0

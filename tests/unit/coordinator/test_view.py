import pytest

from penstock_common.types.cluster import ClusterView, EngineState, EngineStatus
from penstock_coordinator.view import ViewLimiter

INTERVAL = 0.1


def view(**engine):
    values = {"engine_id": "a", "incarnation": "1", "address": "h:1", "model": "m"} | engine
    return ClusterView(engines=(EngineStatus(**values),))


@pytest.fixture
def limiter():
    limiter = ViewLimiter(interval=INTERVAL, first_at=0.0)
    assert limiter.offer(view(), 0.0)
    return limiter


def test_the_first_view_is_sent_at_once_even_an_empty_one():
    assert ViewLimiter(interval=INTERVAL, first_at=0.0).offer(ClusterView(), 0.0)


@pytest.mark.parametrize(
    "change",
    [
        {"state": EngineState.DRAINING},
        {"incarnation": "2"},
        {"address": "h:2"},
        {"index": 1},
        {"model": "other"},
        {"engine_id": "b"},
    ],
)
def test_a_change_of_membership_or_state_is_sent_at_once(limiter, change):
    assert limiter.offer(view(**change), 0.001)


@pytest.mark.parametrize(
    "change",
    [{"num_waiting_reqs": 1}, {"num_running_reqs": 1}, {"kv_cache_usage": 0.5}, {"seconds_since_last_step": 0.2}],
)
def test_a_change_of_counts_waits_for_the_interval(limiter, change):
    assert not limiter.offer(view(**change), 0.05)
    assert limiter.offer(view(**change), 0.1)


def test_an_unchanged_view_is_not_sent_again(limiter):
    assert not limiter.offer(view(), 100.0)


def test_counts_that_changed_back_within_the_interval_are_no_news(limiter):
    assert not limiter.offer(view(num_running_reqs=1), 0.05)
    assert not limiter.offer(view(), 0.2)


def test_a_departure_is_sent_at_once(limiter):
    assert limiter.offer(ClusterView(), 0.001)


def test_after_a_restart_nothing_is_sent_before_the_grace_has_passed():
    limiter = ViewLimiter(interval=INTERVAL, first_at=5.0)
    assert not limiter.offer(ClusterView(), 0.0)
    assert not limiter.offer(view(), 4.9)
    assert limiter.offer(view(), 5.0)

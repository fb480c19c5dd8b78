import math

from penstock_coordinator.autoscaling import Activity, PoolLoad

BUSY = PoolLoad(num_engines=1, num_reqs=1)
IDLE = PoolLoad(num_engines=1)
ZERO = PoolLoad()
WOKEN = PoolLoad(num_held_reqs=1)


def test_a_busy_pool_is_in_use_for_as_long_as_it_is():
    activity = Activity()
    assert activity.take({"p": BUSY}, 0.0)
    assert activity.active_for("p", 0.0, 1000.0) == math.inf


def test_a_pool_stays_in_use_for_a_time_behind_its_last_request():
    activity = Activity()
    activity.take({"p": BUSY}, 0.0)
    assert not activity.take({"p": BUSY}, 50.0)
    assert activity.take({"p": IDLE}, 51.0)
    assert not activity.take({"p": IDLE}, 60.0)
    assert activity.active_for("p", 30.0, 60.0) == 21.0
    assert activity.active_for("p", 30.0, 81.0) == 0.0
    assert activity.active_for("p", 0.0, 60.0) == 0.0


def test_engines_older_than_the_coordinator_count_as_recently_busy():
    activity = Activity()
    activity.take({"p": IDLE, "zero": ZERO}, 100.0)
    activity.take({"p": IDLE, "zero": ZERO}, 105.0)
    assert activity.active_for("p", 30.0, 110.0) == 20.0
    assert activity.active_for("zero", 30.0, 110.0) == 0.0


def test_an_engine_that_starts_and_gets_nothing_keeps_no_pool_in_use():
    activity = Activity()
    activity.take({"p": ZERO}, 0.0)
    activity.take({"p": IDLE}, 1.0)
    assert activity.active_for("p", 300.0, 1.0) == 0.0


def test_a_held_request_wakes_a_pool():
    activity = Activity()
    activity.take({"p": ZERO}, 0.0)
    assert activity.take({"p": WOKEN}, 1.0)
    assert activity.active_for("p", 0.0, 1.0) == math.inf


def test_a_pool_whose_engines_are_gone_is_in_use_until_its_time_is_over():
    activity = Activity()
    activity.take({"p": BUSY}, 0.0)
    activity.take({"p": ZERO}, 10.0)
    assert activity.active_for("p", 30.0, 20.0) == 20.0


def test_an_unknown_pool_is_not_in_use():
    assert Activity().active_for("p", 300.0, 0.0) == 0.0

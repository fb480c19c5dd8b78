import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_common.types.cluster import ClusterView, EngineStatus
from penstock_coordinator.autoscaling import PoolLoad, Targets, load_with_held, pool_loads, wanted_replicas

TARGETS = Targets(load=0.8, kv_cache_usage=0.8, slots=10)


@pytest.mark.parametrize(
    ("load", "kv", "wanted"),
    [(0.0, 0.0, 0), (0.01, 0.0, 1), (0.8, 0.0, 1), (0.81, 0.0, 2), (4.0, 0.0, 5), (0.5, 1.7, 3), (2.4, 2.4, 3)],
)
def test_engines_are_wanted_until_load_and_kv_cache_meet_their_targets(load, kv, wanted):
    assert wanted_replicas(PoolLoad(load=load, kv_cache_usage=kv), TARGETS) == wanted


def test_each_signal_has_a_target_of_its_own():
    pool = PoolLoad(load=1.0, kv_cache_usage=1.0)
    assert wanted_replicas(pool, Targets(load=0.5, kv_cache_usage=1.0, slots=10)) == 2
    assert wanted_replicas(pool, Targets(load=1.0, kv_cache_usage=0.25, slots=10)) == 4


def test_held_requests_count_by_the_slots_of_the_pools_engines():
    assert load_with_held(PoolLoad(load=1.0, num_held_reqs=8, slots=4.0), TARGETS) == 3.0


def test_held_requests_of_a_pool_at_zero_count_by_the_slots_that_are_named():
    assert load_with_held(PoolLoad(num_held_reqs=25), TARGETS) == 2.5
    assert wanted_replicas(PoolLoad(num_held_reqs=1), TARGETS) == 1


def test_nothing_is_wanted_of_a_load_that_is_not_known():
    assert load_with_held(PoolLoad(load=None), TARGETS) is None
    assert wanted_replicas(PoolLoad(load=None, kv_cache_usage=3.0), TARGETS) is None


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 8))
def test_what_is_wanted_does_not_depend_on_how_many_engines_are_up(requests, idle):
    def engine(number, running):
        return EngineStatus(
            engine_id=f"{number}", incarnation="1", address="h:1", num_running_reqs=running, max_num_seqs=8
        )

    def wanted(*running):
        view = ClusterView(engines=tuple(engine(*entry) for entry in enumerate(running)))
        return wanted_replicas(pool_loads(view, lambda *_: 0, ())["default"], TARGETS)

    assert wanted(*requests) == wanted(*requests, *[0] * idle) == wanted(sum(requests))

import pytest

from penstock_common.types.cluster import ClusterView, EngineState, EngineStatus
from penstock_coordinator.autoscaling import PoolLoad, pool_loads


def engine(name, pool="default", **changes):
    return EngineStatus(engine_id=name, incarnation="1", address="h:1", pool=pool, **({"max_num_seqs": 4} | changes))


def loads(*engines, held=0, names=("default",)):
    return pool_loads(ClusterView(engines=engines), lambda *_: held, names)


def test_a_pool_is_the_sum_of_its_engines():
    found = loads(
        engine("a", num_running_reqs=4, num_waiting_reqs=2, kv_cache_usage=0.5),
        engine("b", num_running_reqs=1, kv_cache_usage=0.25),
        engine("c", "spot", num_running_reqs=1, max_num_seqs=2),
    )
    assert found["default"] == PoolLoad(num_engines=2, load=1.75, kv_cache_usage=0.75, num_reqs=7, slots=4.0)
    assert found["spot"] == PoolLoad(num_engines=1, load=0.5, num_reqs=1, slots=2.0)


def test_what_a_draining_or_wedged_engine_still_has_is_work_too():
    found = loads(
        engine("a", state=EngineState.DRAINING, num_running_reqs=2),
        engine("b", state=EngineState.WEDGED, num_running_reqs=2),
    )
    assert found["default"].load == 1.0


def test_a_named_pool_is_there_without_engines():
    assert loads(names=("big", "spot")) == {"big": PoolLoad(), "spot": PoolLoad()}


def test_every_pool_counts_all_held_requests():
    found = loads(held=3, names=("big", "spot"))
    assert [pool.num_held_reqs for pool in found.values()] == [3, 3]
    assert all(pool.busy for pool in found.values())


def test_the_load_is_unknown_while_an_engine_does_not_say_its_slots():
    found = loads(engine("old", max_num_seqs=0, num_running_reqs=1), engine("new"))["default"]
    assert found.load is None
    assert (found.num_reqs, found.slots, found.busy) == (1, 4.0, True)


@pytest.mark.parametrize(("running", "waiting", "busy"), [(0, 0, False), (1, 0, True), (0, 1, True)])
def test_a_pool_is_busy_while_anything_runs_or_waits(running, waiting, busy):
    assert loads(engine("a", num_running_reqs=running, num_waiting_reqs=waiting))["default"].busy is busy

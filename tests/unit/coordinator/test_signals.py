import math

import pytest

from penstock_common.errors import InvalidArgument, Unavailable
from penstock_common.types.cluster import ClusterView, EngineStatus
from penstock_coordinator.autoscaling import ScalingSignals
from penstock_coordinator.config import ScalingConfig

EMPTY = ClusterView()


def held(count):
    return lambda *_: count


def view(running=0, pool="default"):
    engine = EngineStatus(
        engine_id="a", incarnation="1", address="h:1", pool=pool, num_running_reqs=running, max_num_seqs=4
    )
    return ClusterView(engines=(engine,))


@pytest.fixture
def signals():
    return ScalingSignals(ScalingConfig(pools=("default", "spot")))


def test_nothing_is_told_before_the_cluster_is_known(signals):
    assert (signals.known, dict(signals.pools)) == (False, {})
    with pytest.raises(Unavailable, match="waiting for engines and frontends to reconnect"):
        signals.pool("default")
    with pytest.raises(Unavailable):
        signals.active_for("default", 300.0, 0.0)


def test_an_empty_cluster_is_known_too(signals):
    signals.take(EMPTY, held(0), 0.0)
    assert signals.pool("default").load == 0.0
    assert signals.active_for("spot", 300.0, 0.0) == 0.0


def test_a_pool_that_there_is_not_is_refused_with_those_that_there_are(signals):
    signals.take(EMPTY, held(0), 0.0)
    with pytest.raises(
        InvalidArgument, match=r"pool is 'sport'; existing pools: default, spot; did you mean 'spot'\?"
    ) as e:
        signals.pool("sport")
    assert e.value.field == "scalerMetadata.pool"


def test_a_pool_that_was_there_once_stays(signals):
    signals.take(view(1, "extra"), held(0), 0.0)
    signals.take(EMPTY, held(0), 1.0)
    assert signals.pool("extra").num_engines == 0
    assert signals.active_for("extra", 10.0, 2.0) == 9.0


async def test_listeners_hear_when_the_cluster_is_known_and_a_pool_turns_busy_or_idle(signals):
    signals.take(EMPTY, held(0), 0.0)
    version, _ = await signals.changes.newer_than(0)
    signals.take(EMPTY, held(0), 1.0)
    signals.take(EMPTY, held(2), 2.0)
    assert (await signals.changes.newer_than(version))[0] == version + 1
    assert signals.active_for("spot", 0.0, 2.0) == math.inf
    signals.take(view(1), held(0), 3.0)
    signals.take(view(0), held(0), 4.0)
    assert (await signals.changes.newer_than(version + 2))[1] == 4.0

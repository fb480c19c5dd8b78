import pytest

from penstock.common.v1 import control_pb2
from penstock.coordinator.v1 import messages_pb2
from penstock_common.rpc import cluster, stats
from penstock_common.types.cluster import ClusterView, EngineState, EngineStatus
from penstock_common.types.outputs import LoraStats, SchedulerStats, SpecDecodingStats


@pytest.mark.parametrize("state", list(EngineState))
def test_a_view_survives_the_wire(state):
    engine = EngineStatus(
        engine_id="a",
        incarnation="1",
        address="h:1",
        state=state,
        num_waiting_reqs=1,
        num_running_reqs=2,
        kv_cache_usage=0.5,
        seconds_since_last_step=3.25,
        index=4,
        model="m",
    )
    view = ClusterView(engines=(engine,))
    wire = cluster.view_to_proto(view).SerializeToString()
    assert cluster.view_from_proto(messages_pb2.ClusterView.FromString(wire)) == view


@pytest.mark.parametrize("state", [0, 99])
def test_an_engine_in_an_unknown_state_takes_no_requests(state):
    assert cluster.engine_from_proto(control_pb2.EngineStatus(state=state)).state is EngineState.LOADING


CANNOT_BE_COUNTS = {
    "kv_cache_usage": 0.5,
    "seconds_since_last_step": 0.25,
    "wedged": True,
    "spec_decoding_stats": SpecDecodingStats(
        num_drafts=3, num_draft_tokens=9, num_accepted_tokens=4, num_accepted_tokens_per_pos=[2, 1, 1]
    ),
    "lora": LoraStats(
        max_loras=4,
        active=["a", "b"],
        waiting=["c"],
        num_waiting_reqs=5,
        num_loading_reqs=2,
        num_cached=7,
        cached_bytes=2**40,
        num_loads=9,
        load_seconds=0.25,
        num_evictions=2,
    ),
}


def test_an_engine_that_does_not_speculate_says_so_on_the_wire():
    assert stats.from_proto(stats.to_proto(SchedulerStats())).spec_decoding_stats is None
    nothing_yet = SchedulerStats(spec_decoding_stats=SpecDecodingStats())
    assert stats.from_proto(stats.to_proto(nothing_yet)) == nothing_yet


def test_statistics_survive_the_wire():
    values = {name: index for index, name in enumerate(SchedulerStats.__struct_fields__, start=1)}
    expected = SchedulerStats(**(values | CANNOT_BE_COUNTS))
    assert stats.from_proto(stats.to_proto(expected)) == expected

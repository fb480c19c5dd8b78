import msgspec
import pytest

from penstock.common.v1 import control_pb2, stats_pb2
from penstock.coordinator.v1 import messages_pb2
from penstock_common.errors import InvalidArgument
from penstock_common.lora_registry import MAX_HELD, LoraHeld
from penstock_common.rpc import cluster, stats
from penstock_common.rpc.by_field import to_message
from penstock_common.types.cluster import ClusterView, EngineState, EngineStatus, changed_by, difference
from penstock_common.types.kv_transfer import EngineRole
from penstock_common.types.outputs import (
    KvTransferStats,
    LoraStats,
    MediaStats,
    SchedulerStats,
    SpecDecodingStats,
    StateStats,
)


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
        loras=LoraHeld(version=3, active=(1,), held=(1, 2**64 - 1), max_loras=4, requests_per_load=1.5, full=True),
        role=EngineRole.PREFILL,
        kv_address="h:2",
        kv_fingerprint=b"f" * 16,
    )
    view = ClusterView(engines=(engine,))
    wire = cluster.view_to_proto(view).SerializeToString()
    assert cluster.view_from_proto(messages_pb2.ClusterView.FromString(wire)) == view


@pytest.mark.parametrize("role", [0, 99])
def test_an_engine_of_an_unknown_role_serves_everything(role):
    assert cluster.engine_from_proto(control_pb2.EngineStatus(role=role)).role is EngineRole.BOTH


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
        num_requests=8,
        num_found=5,
        held=LoraHeld(version=1, active=(2,), held=(2, 1), max_loras=4),
    ),
    "media": MediaStats(
        pending_embeds=5,
        encoded_embeds=2**40,
        encoder_cache_queries=7,
        encoder_cache_hits=3,
        encoder_cache_usage=0.75,
        receiver_cache_bytes=2**41,
        num_waiting_reqs=2,
    ),
    "kv_transfer": KvTransferStats(
        external_prefix_cache_queries=2**40,
        external_prefix_cache_hits=2**39,
        num_leases=3,
        num_leased_blocks=70,
        leased_bytes=2**38,
    ),
    "states": StateStats(
        num_slots=900,
        num_used_slots=70,
        num_kept=300,
        num_evictions=2**40,
        num_recomputed_tokens=2**39,
        max_running_reqs=64,
    ),
}


def message_of(statistics):
    return to_message(statistics, stats_pb2.SchedulerStats)


def test_an_engine_that_does_not_speculate_says_so_on_the_wire():
    assert stats.from_proto(message_of(SchedulerStats())).spec_decoding_stats is None
    nothing_yet = SchedulerStats(spec_decoding_stats=SpecDecodingStats())
    assert stats.from_proto(message_of(nothing_yet)) == nothing_yet


def test_statistics_survive_the_wire():
    values = {name: index for index, name in enumerate(SchedulerStats.__struct_fields__, start=1)}
    expected = SchedulerStats(**(values | CANNOT_BE_COUNTS))
    assert stats.from_proto(message_of(expected)) == expected


@pytest.mark.parametrize(
    ("held", "field"),
    [
        (LoraHeld(held=tuple(range(MAX_HELD + 1))), "lora.held.held"),
        (LoraHeld(active=tuple(range(MAX_HELD + 1))), "lora.held.active"),
        (LoraHeld(requests_per_load=float("nan")), "lora.held.requests_per_load"),
        (LoraHeld(requests_per_load=-1.0), "lora.held.requests_per_load"),
    ],
)
def test_an_engine_cannot_hold_what_nobody_could(held, field):
    message = message_of(SchedulerStats(lora=LoraStats(held=held)))
    with pytest.raises(InvalidArgument) as refused:
        stats.from_proto(message)
    assert refused.value.field == f"scheduler_stats.{field}"


def test_a_delta_tells_of_adapters_without_the_rest():
    before = tuple(
        EngineStatus(engine_id=name, incarnation="1", address=f"h:{index}", index=index, loras=LoraHeld(version=1))
        for index, name in enumerate("ab")
    )
    after = (before[0], msgspec.structs.replace(before[1], loras=LoraHeld(version=2, held=(7,))))
    delta = difference(before, after)
    assert (list(delta.changed), list(delta.loads.indices), delta.loras) == ([], [], {1: after[1].loras})
    assert not delta.of_members
    assert not delta.empty
    message = cluster.delta_to_proto(delta, base_version=1)
    assert changed_by(before, cluster.delta_from_proto(message)) == after
    with pytest.raises(ValueError, match="loras has index 1"):
        changed_by(before[:1], delta)

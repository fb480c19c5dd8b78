import hypothesis.strategies as st
import pytest
from hypothesis import given

from penstock.common.v1 import control_pb2
from penstock.common.v1 import data_parallel_pb2 as pb
from penstock.coordinator.v1 import messages_pb2
from penstock_common.errors import InvalidArgument
from penstock_common.rpc import cluster, data_parallel
from penstock_common.rpc.by_field import to_message
from penstock_common.types.cluster import ClusterView
from penstock_common.types.data_parallel import (
    GroupView,
    PauseMode,
    Pauses,
    Place,
    PoolGroup,
    RankGroup,
    RankReport,
    StartDpWave,
    StartWave,
    WaveComplete,
    engine_of,
    rank_name,
)

numbers = st.integers(0, data_parallel.MAX_NUMBER)
pauses = st.builds(Pauses, numbers.map(lambda n: n - n % 2)) | st.builds(
    Pauses, st.integers(0, 2**61 - 1).map(lambda n: 2 * n + 1), st.sampled_from([m for m in PauseMode if m])
)
ranks = st.builds(rank_name, st.text(min_size=1, max_size=5), st.text("abc-0", min_size=1, max_size=4))
groups = st.builds(RankGroup, numbers, st.lists(ranks, unique=True, max_size=4).map(tuple))


def sent(message):
    return type(message).FromString(message.SerializeToString())


@given(st.text(), st.text().filter(lambda s: "#" not in s))
def test_a_rank_is_its_engine_in_one_incarnation(engine_id, incarnation):
    assert engine_of(rank_name(engine_id, incarnation)) == (engine_id, incarnation)


@given(pauses)
def test_turns_survive_the_wire(turns):
    assert data_parallel.pauses_from_proto(sent(to_message(turns, pb.Pauses))) == turns


@pytest.mark.parametrize("mode", [mode for mode in PauseMode if mode])
def test_modes_have_the_numbers_of_the_contract(mode):
    assert to_message(Pauses(1, mode), pb.Pauses).mode == control_pb2.PauseMode.Value(f"PAUSE_MODE_{mode.name}")


@pytest.mark.parametrize(
    ("number", "mode", "read"),
    [(1, 0, Pauses(1, PauseMode.NONE)), (1, 77, Pauses(1, PauseMode.ABORT)), (2, 3, Pauses(2))],
)
def test_an_unknown_mode_counts_as_the_strongest(number, mode, read):
    assert data_parallel.pauses_from_proto(pb.Pauses(number=number, mode=mode)) == read


@given(groups)
def test_a_group_survives_the_wire_with_its_addresses(group):
    meetings = {rank: f"{index}:1" for index, rank in enumerate(group.members)}
    message = sent(data_parallel.group_to_proto(group, meetings))
    assert data_parallel.group_from_proto(message) == group
    assert data_parallel.meetings_from_proto(message) == meetings


@given(ranks, numbers, numbers, pauses)
def test_waves_survive_the_wire(rank, epoch, wave, turns):
    for kind in (StartWave, WaveComplete, StartDpWave):
        message = kind(rank, epoch, wave, turns)
        assert data_parallel.wave_from_proto(sent(to_message(message, pb.GroupWave)), kind, rank) == message


@given(ranks, groups, numbers, numbers, pauses, st.booleans(), st.booleans(), numbers)
def test_a_report_survives_the_wire(rank, group, wave, step, turns, running, opening, prepared):
    place = Place(group.epoch, wave, step, turns.number)
    report = RankReport(rank, group, place, turns, running, opening, prepared)
    assert data_parallel.report_from_proto(sent(data_parallel.report_to_proto(report)), rank) == report


@given(groups, numbers, st.booleans(), pauses, st.booleans(), st.data())
def test_a_group_of_a_view_survives_the_wire(group, wave, running, turns, suspended, data):
    routed = tuple(rank for rank in group.members if data.draw(st.booleans()))
    view = GroupView(group, wave, running, turns, routed)
    told = PoolGroup(model="m", pool="p", view=view, target_size=7, suspended=suspended)
    assert data_parallel.pool_group_from_proto(sent(data_parallel.pool_group_to_proto(told))) == told


def test_a_rank_that_the_group_does_not_have_is_not_routed_to():
    message = pb.GroupView(group=pb.RankGroup(members=[pb.GroupMember(engine_id="a")]), routed_ranks=[0, 1])
    assert data_parallel.pool_group_from_proto(message).view.routed == (rank_name("a", ""),)


def test_a_view_tells_readers_of_an_earlier_version_of_its_one_group():
    view = GroupView(RankGroup(5, ("a#1",)), 6, True)
    one = ClusterView(groups=(PoolGroup(model="m", pool="p", view=view),))
    message = sent(cluster.view_to_proto(one))
    assert (message.group_epoch, message.current_wave, message.engines_running) == (5, 6, True)
    assert cluster.view_from_proto(message) == one
    two = ClusterView(groups=(*one.groups, PoolGroup(model="m", pool="q", view=view)))
    message = sent(cluster.view_to_proto(two))
    assert (message.group_epoch, message.current_wave, message.engines_running) == (0, 0, False)
    assert cluster.view_from_proto(messages_pb2.ClusterView.FromString(message.SerializeToString())) == two


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.RankReport(wave=2**64 - 1), "wave"),
        (pb.RankReport(prepared=2**63), "prepared"),
        (pb.RankReport(group=pb.RankGroup(epoch=2**63)), "group.epoch"),
        (pb.RankReport(pauses=pb.Pauses(number=2**63)), "pauses.number"),
    ],
)
def test_numbers_that_no_group_comes_to_are_refused(message, field):
    with pytest.raises(InvalidArgument, match=rf"{field} is \d+; it must be at most") as e:
        data_parallel.report_from_proto(message, "a#1")
    assert e.value.field == field

import pytest

from penstock.common.v1 import stats_pb2
from penstock.coordinator.v1 import messages_pb2 as pb
from penstock.enginecore.v1 import messages_pb2 as enginecore_pb
from penstock_common.errors import InvalidArgument
from penstock_common.types.data_parallel import Pauses, RankGroup, Reconfigure
from penstock_common.types.kv_transfer import EngineRole
from penstock_common.types.outputs import SchedulerStats
from penstock_coordinator.rpc import convert


def register(**changes):
    values = {"engine_id": "a", "incarnation": "1", "address": "h:1", "model": "m"} | changes
    return pb.EngineReport(register=pb.Register(**values))


@pytest.mark.parametrize("name", ["engine_id", "incarnation", "address", "model"])
def test_a_register_without_a_required_field_is_refused_by_name(name):
    with pytest.raises(InvalidArgument) as e:
        convert.registration(register(**{name: ""}))
    assert e.value.field == f"register.{name}"


def test_an_engine_of_a_release_without_pools_is_in_the_default_pool():
    found = convert.registration(register())
    assert (found.pool, found.max_num_seqs) == ("default", 0)


def test_the_pool_and_the_slots_of_an_engine_are_read():
    found = convert.registration(register(pool="spot", max_num_seqs=64))
    assert (found.pool, found.max_num_seqs) == ("spot", 64)
    with pytest.raises(InvalidArgument, match=r"register.pool has 257 characters; it must have at most 256"):
        convert.registration(register(pool="x" * 257))


def test_an_engines_block_events_are_parsed():
    found = convert.registration(register(role=2, kv_address="h:50054", kv_fingerprint=b"f" * 16))
    assert (found.role, found.kv_address, found.kv_fingerprint) == (EngineRole.PREFILL, "h:50054", b"f" * 16)
    plain = convert.registration(register())
    assert (plain.role, plain.kv_address, plain.kv_fingerprint) == (EngineRole.BOTH, "", b"")


@pytest.mark.parametrize(
    ("name", "value"), [("kv_address", "nowhere"), ("kv_address", "h" * 255 + ":1"), ("kv_fingerprint", b"f" * 15)]
)
def test_what_cannot_be_said_of_blocks_is_refused_by_name(name, value):
    with pytest.raises(InvalidArgument) as refused:
        convert.registration(register(**{name: value}))
    assert refused.value.field == f"register.{name}"


@pytest.mark.parametrize("address", ["host", "host:", ":1", "host:0", "host:65536", "host:x", "host:\u0661", "host:-1"])
def test_an_address_must_be_host_and_port(address):
    with pytest.raises(InvalidArgument, match="host:port"):
        convert.registration(register(address=address))


def test_an_ipv6_address_needs_brackets():
    with pytest.raises(InvalidArgument, match="must have an IPv6 host in brackets") as refused:
        convert.registration(register(address="fd00::7:50052"))
    assert refused.value.field == "register.address"


def test_an_ipv6_address_is_fine():
    assert convert.registration(register(address="[::1]:50052")).address == "[::1]:50052"


def test_a_name_is_bounded():
    with pytest.raises(InvalidArgument, match=r"register.engine_id has 257 characters; it must have at most 256"):
        convert.registration(register(engine_id="x" * 257))


@pytest.mark.parametrize(
    ("name", "value"), [("kv_cache_usage", float("nan")), ("kv_cache_usage", 1.5), ("seconds_since_last_step", -1.0)]
)
def test_impossible_statistics_are_refused_by_name(name, value):
    outputs = enginecore_pb.EngineCoreOutputs(scheduler_stats=stats_pb2.SchedulerStats(**{name: value}))
    with pytest.raises(InvalidArgument) as e:
        convert.load(outputs)
    assert e.value.field == f"outputs.scheduler_stats.{name}"


def test_outputs_for_frontends_are_refused():
    outputs = enginecore_pb.EngineCoreOutputs(outputs=[enginecore_pb.EngineCoreOutput(request_id="r")])
    with pytest.raises(InvalidArgument, match=r"outputs\.outputs is only for frontends"):
        convert.load(outputs)


def test_a_report_without_statistics_is_a_sign_of_life():
    assert convert.load(enginecore_pb.EngineCoreOutputs()) is None


def test_statistics_are_read():
    stats = stats_pb2.SchedulerStats(num_running_reqs=1, step_counter=2, seconds_since_last_step=0.5)
    assert convert.load(enginecore_pb.EngineCoreOutputs(scheduler_stats=stats)) == SchedulerStats(
        num_running_reqs=1, step_counter=2, seconds_since_last_step=0.5
    )


@pytest.mark.parametrize("notification", [pb.NOTIFICATION_UNSPECIFIED, 3, 99])
def test_only_shutdown_complete_is_served(notification):
    convert.check_shutdown_complete(pb.NOTIFICATION_SHUTDOWN_COMPLETE)
    with pytest.raises(InvalidArgument, match=rf"notification is {notification}; it must be NOTIFICATION_SHUTDOWN_COM"):
        convert.check_shutdown_complete(notification)


@pytest.mark.parametrize("field", ["deadline", "time_left"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_drain_must_say_when_it_ends(field, value):
    with pytest.raises(InvalidArgument, match=rf"draining\.{field} is"):
        convert.check_draining(enginecore_pb.Draining(**{field: value}))


def test_an_older_engines_drain_time_is_used_if_no_remaining_time_is_reported():
    convert.check_draining(enginecore_pb.Draining(deadline=1.0))
    convert.check_draining(enginecore_pb.Draining(deadline=-1.0, time_left=5.0))


def ranked(**changes):
    group = {"size": 2, "min_size": 1, "meeting_address": "h:1", "parallel_config": {"dtype": "float32"}} | changes
    return register(group=pb.GroupRegistration(**group))


def test_a_rank_says_what_it_brings_along():
    group = convert.registration(ranked()).group
    assert (group.size, group.min_size, group.waits, group.meeting_address) == (2, 1, False, "h:1")
    assert group.parallel_config == {"dtype": "float32"}
    assert group.report.group.epoch == 0


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [("size", 1, "at least 2"), ("min_size", 0, "from 1 to size = 2"), ("min_size", 3, "from 1 to size = 2")],
)
def test_an_impossible_group_is_refused_by_name(name, value, limit):
    with pytest.raises(InvalidArgument, match=rf"register.group.{name} is {value}; it must be {limit}") as e:
        convert.registration(ranked(**{name: value}))
    assert e.value.field == f"register.group.{name}"


def test_a_meeting_address_is_required():
    with pytest.raises(InvalidArgument, match=r"register.group.meeting_address is required"):
        convert.registration(ranked(meeting_address=""))


@pytest.mark.parametrize("base", [0, 3])
def test_a_rank_is_told_of_its_group_with_the_addresses(base):
    group = RankGroup(4, ("a#1", "b#1"))
    command = convert.to_rank(Reconfigure("b#1", group, 5, Pauses(2), base), {"a#1": "h:1", "b#1": "h:2"}).reconfigure
    assert (command.data_parallel_size, command.rank, command.base_epoch, command.wave) == (2, 1, base, 5)
    assert [member.meeting_address for member in command.group.members] == ["h:1", "h:2"]
    assert convert.to_rank(Reconfigure("z#1", group, 5, Pauses()), {}).reconfigure.rank_change == (
        pb.RANK_CHANGE_SHUTDOWN_CURRENT_RANK
    )


def test_a_report_without_a_message_is_refused():
    with pytest.raises(InvalidArgument, match="the message is empty"):
        convert.from_rank(pb.EngineReport(), "a#1")

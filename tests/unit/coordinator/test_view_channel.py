"""Channels and the frontends' end, over real messages: slow readers end with the coordinator's view as well."""

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.coordinator.v1 import messages_pb2 as pb
from penstock_common.errors import Internal
from penstock_common.types.cluster import ClusterView, EngineState, EngineStatus
from penstock_common.types.data_parallel import GroupView, PoolGroup
from penstock_coordinator.rpc.servicer import ProtoEncoder
from penstock_coordinator.view_channel import (
    MAX_DELTAS,
    Broadcast,
    Pace,
    Subscription,
    ViewChannel,
    ViewLimiter,
    ViewReader,
)
from penstock_frontend.rpc.coordinator_client import ReceivedView

PACE = Pace(view_interval=0.1, max_reports_per_second=2000.0)


def engine(index=0, **values):
    base = {"engine_id": f"e{index}", "incarnation": "1", "address": f"h:{index + 1}", "model": "m", "index": index}
    return EngineStatus(**(base | values))


def view(*engines, **values):
    return ClusterView(engines=engines, **values)


class Counting(ProtoEncoder):
    """Counts the messages that it encodes."""

    def __init__(self):
        self.whole_views = self.deltas = 0

    def whole(self, view, version):
        self.whole_views += 1
        return super().whole(view, version)

    def delta(self, view, delta, version):
        self.deltas += 1
        return super().delta(view, delta, version)


class Bench:
    """A channel on a clock on which an interval passes between two offers."""

    def __init__(self, subscription=Subscription()):  # noqa: B008
        self.encoder = Counting()
        self.channel = ViewChannel(subscription, ViewLimiter(PACE, first_at=0.0), self.encoder)
        self.now = 0.0

    def offer(self, *engines, later=60.0, **values):
        self.now += later
        self.channel.limiter.members_changed(self.now)
        self.channel.offer(view(*engines, **values), self.now)

    def frontend(self, *, deltas=True):
        return Frontend(self.channel, deltas=deltas)


class Frontend:
    """A stream that reads the pending messages on command."""

    def __init__(self, channel, *, deltas):
        self.reader = ViewReader(channel, deltas=deltas)
        self.received = ReceivedView()
        self.view = None

    def read(self):
        """Read the pending messages. Returns the kind of each: delta or whole view."""
        messages = [pb.ClusterView.FromString(sent.data) for sent in self.reader.take()]
        for message in messages:
            self.view = self.received.take(message)
        return ["delta" if message.HasField("delta") else "whole" for message in messages]


engines_strategy = st.dictionaries(
    st.integers(0, 6),
    st.builds(
        engine,
        incarnation=st.sampled_from("ab"),
        state=st.sampled_from(EngineState),
        num_waiting_reqs=st.integers(0, 3),
        num_running_reqs=st.integers(0, 3),
        kv_cache_usage=st.sampled_from([0.0, 0.5]),
        seconds_since_last_step=st.sampled_from([0.0, 0.25]),
        max_num_seqs=st.integers(0, 1),
    ),
).map(lambda found: tuple(msgspec.structs.replace(e, index=i) for i, e in sorted(found.items())))


@given(st.lists(st.tuples(engines_strategy, st.booleans(), st.integers(0, 2)), max_size=40))
def test_frontends_that_read_now_and_then_have_the_view(steps):
    bench = Bench()
    quick, slow, old = bench.frontend(), bench.frontend(), bench.frontend(deltas=False)
    for engines, read, wave in steps:
        groups = (PoolGroup(model="m", pool="p", view=GroupView(wave=wave)),)
        bench.offer(*engines, groups=groups)
        assert set(quick.read()) <= {"delta", "whole"}
        assert quick.view == view(*engines, groups=groups)
        if read:
            slow.read()
            assert set(old.read()) <= {"whole"}
            assert slow.view == old.view == quick.view


def test_a_new_connection_gets_a_whole_view_and_then_changes():
    bench = Bench()
    bench.offer(engine(0), engine(1))
    frontend = bench.frontend()
    assert frontend.read() == ["whole"]
    bench.offer(engine(0, num_running_reqs=3), engine(1))
    assert frontend.read() == ["delta"]
    assert frontend.read() == []


def test_a_version_is_encoded_once_whatever_the_number_of_streams():
    bench = Bench()
    bench.offer(engine(0))
    frontends = [bench.frontend() for _ in range(50)] + [bench.frontend(deltas=False) for _ in range(50)]
    for number in range(3):
        bench.offer(engine(0, num_running_reqs=number + 1))
        for frontend in frontends:
            frontend.read()
    assert bench.encoder.deltas == 3
    assert bench.encoder.whole_views == 3  # for readers that do not support deltas


def test_nothing_is_encoded_that_nobody_reads():
    bench = Bench()
    for number in range(5):
        bench.offer(engine(0, num_running_reqs=number))
    assert (bench.encoder.whole_views, bench.encoder.deltas) == (0, 0)


def test_a_slow_reader_gets_a_whole_view():
    bench = Bench()
    bench.offer(engine(0))
    near, far = bench.frontend(), bench.frontend()
    assert near.read() == far.read() == ["whole"]
    bench.offer(engine(0, num_running_reqs=99))
    near.read()
    for number in range(MAX_DELTAS):
        bench.offer(engine(0, num_running_reqs=number))
    assert near.read() == ["delta"] * MAX_DELTAS
    assert far.read() == ["whole"]
    assert near.view == far.view


@pytest.mark.parametrize(
    "change",
    [
        {"state": EngineState.DRAINING},
        {"incarnation": "2"},
        {"address": "h:2"},
        {"model": "other"},
        {"pool": "other"},
        {"max_num_seqs": 9},
    ],
)
def test_a_change_of_membership_or_state_is_sent_at_once(change):
    bench = Bench()
    bench.offer(engine())
    bench.offer(engine(**change), later=0.001)
    assert bench.channel.version == 2


def test_counts_wait_for_the_interval_even_when_members_of_another_view_change():
    bench = Bench(Subscription(model="m"))
    bench.offer(engine())
    bench.offer(engine(num_running_reqs=1), engine(1, model="other"), later=0.05)
    assert bench.channel.version == 1
    bench.offer(engine(num_running_reqs=1), engine(1, model="other"), later=0.05)
    assert bench.channel.version == 2


def test_an_unchanged_view_is_not_sent_again():
    bench = Bench()
    bench.offer(engine())
    bench.offer(engine())
    assert bench.channel.version == 1


def test_an_index_may_pass_to_another_engine():
    bench = Bench()
    bench.offer(engine(0), engine(1))
    frontend = bench.frontend()
    frontend.read()
    bench.offer(engine(0, engine_id="successor"), engine(1))
    assert frontend.read() == ["delta"]
    assert [e.engine_id for e in frontend.view.engines] == ["successor", "e1"]


def test_a_view_has_the_engines_of_its_model_and_pools():
    bench = Bench(Subscription(model="m", pools=frozenset(["a", "b"])))
    bench.offer(engine(0, pool="a"), engine(1, pool="b"), engine(2, pool="c"), engine(3, model="other", pool="a"))
    frontend = bench.frontend()
    frontend.read()
    assert [e.index for e in frontend.view.engines] == [0, 1]


def test_a_load_takes_little_more_than_a_dozen_bytes():
    bench = Bench()
    bench.offer(*(engine(n, engine_id=f"engine-{n:040}") for n in range(1000)))
    frontend = bench.frontend()
    frontend.read()
    busy = {"num_running_reqs": 200, "num_waiting_reqs": 9, "kv_cache_usage": 0.7, "seconds_since_last_step": 0.01}
    bench.offer(*(engine(n, engine_id=f"engine-{n:040}", **busy) for n in range(1000)))
    (sent,) = list(frontend.reader.take())
    assert len(sent.data) < 14_000


def delta(**values):
    return pb.ClusterView(version=2, delta=pb.ViewDelta(base_version=1, **values))


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (pb.ClusterView(version=3, delta=pb.ViewDelta(base_version=2)), "base_version is 2.*version 1"),
        (delta(removed=[7]), "removed has index 7"),
        (delta(loads=pb.EngineLoads(indices=[7], num_waiting_reqs=[0])), "differ in length"),
        (
            delta(
                loads=pb.EngineLoads(
                    indices=[7],
                    num_waiting_reqs=[0],
                    num_running_reqs=[0],
                    kv_cache_usage=[0],
                    seconds_since_last_step=[0],
                )
            ),
            "loads.indices has index 7",
        ),
    ],
)
def test_a_delta_that_does_not_follow_is_an_error(message, named):
    received = ReceivedView()
    received.take(ProtoView.of(engine(0)))
    with pytest.raises(Internal, match=named):
        received.take(message)


def test_a_delta_before_any_view_is_an_error():
    with pytest.raises(Internal, match="base_version is 0"):
        ReceivedView().take(pb.ClusterView(version=1, delta=pb.ViewDelta()))


class ProtoView:
    """A whole view of version 1."""

    @staticmethod
    def of(*engines):
        return pb.ClusterView.FromString(ProtoEncoder().whole(view(*engines), 1))


@pytest.mark.parametrize("num_engines", [1, 19, 20, 21, 100, 999, 1000, 4000, 20_000])
def test_a_pool_never_reports_more_often_than_it_may(num_engines):
    interval = max(PACE.of_reports(num_engines), 0.01)
    assert num_engines / interval <= 2000.0 * (1 + 1e-6)
    assert interval <= max(num_engines / 2000.0 * 1.25, 0.01) * (1 + 1e-6)


def test_engines_of_a_small_pool_report_as_they_like():
    assert PACE.of_reports(0) == PACE.of_reports(19) == 0.0


def test_a_pool_that_grows_to_a_thousand_is_told_few_intervals():
    assert len({PACE.of_reports(n) for n in range(1001)}) < 25


def test_views_of_many_engines_come_as_often_as_their_reports():
    assert PACE.of_views(10) == PACE.of_views(200) == 0.1
    assert PACE.of_views(1000) == 0.5
    assert PACE.of_views(4000) == 2.0


def test_few_changes_are_sent_at_once_and_many_within_a_tenth_of_a_second():
    assert PACE.of_changes(1) <= 0.0001
    assert PACE.of_changes(1000) == pytest.approx(0.05)
    assert PACE.of_changes(100_000) == 0.1


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


def test_a_reader_slightly_early_need_not_wait_another_interval(limiter):
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


async def test_a_late_reader_gets_the_newest_value_at_once():
    values = Broadcast()
    values.publish("old")
    values.publish("new")
    assert await values.newer_than(0) == (2, "new")


async def test_readers_wait_for_a_newer_value():
    values = Broadcast()
    values.publish("first")
    readers = [asyncio.create_task(values.newer_than(1)) for _ in range(3)]
    await asyncio.wait(readers, timeout=0)
    assert not any(reader.done() for reader in readers)
    values.publish("second")
    assert await asyncio.gather(*readers) == [(2, "second")] * 3

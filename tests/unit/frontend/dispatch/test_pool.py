"""Each frontend uses a limited subset of the engines, which is stable."""

from collections import Counter

import msgspec
import pytest

from penstock_common.types.cluster import ClusterView, EngineState, EngineStatus
from penstock_common.types.data_parallel import (
    FirstRequest,
    GroupView,
    Pauses,
    PoolGroup,
    RankGroup,
    StartDpWave,
    StartWave,
)
from penstock_frontend.dispatch.pool import EngineGroups, Subset
from tests.fakes.engines.engine_harness import make_request


def engines(count, **states):
    return [
        EngineStatus(
            engine_id=f"e{n}",
            incarnation="1",
            address=f"h:{n}",
            index=n,
            state=states.get(f"e{n}", EngineState.SERVING),
        )
        for n in range(count)
    ]


def ids(found):
    return {engine.engine_id for engine in found}


def test_few_engines_are_all_used_whatever_their_state():
    few = engines(3, e1=EngineState.DRAINING)
    assert Subset("f", 3).of(few) == few


def test_of_many_engines_a_frontend_keeps_to_its_own_and_comes_back_to_them():
    chosen = Subset("f", 10).of(engines(100))
    assert len(chosen) == 10
    assert ids(Subset("f", 10).of(list(reversed(engines(100))))) == ids(chosen)
    assert ids(Subset("g", 10).of(engines(100))) != ids(chosen)


def test_an_engine_that_leaves_changes_one_place():
    subset = Subset("f", 10)
    before = ids(subset.of(engines(100)))
    gone = min(before)
    after = ids(subset.of([e for e in engines(100) if e.engine_id != gone]))
    assert len(before - after) == len(after - before) == 1
    assert ids(subset.of(engines(100))) == before


@pytest.mark.parametrize("state", [EngineState.DRAINING, EngineState.WEDGED, EngineState.LOADING])
def test_an_engine_that_takes_no_requests_is_replaced(state):
    subset = Subset("f", 10)
    before = ids(subset.of(engines(100)))
    lost = min(before)
    after = ids(subset.of(engines(100, **{lost: state})))
    assert lost not in after
    assert len(after) == 10


def test_engines_that_take_no_requests_fill_the_places_that_are_left():
    many = [msgspec.structs.replace(e, state=EngineState.LOADING) for e in engines(20)]
    many[7] = msgspec.structs.replace(many[7], state=EngineState.SERVING)
    chosen = ids(Subset("f", 5).of(many))
    assert len(chosen) == 5
    assert "e7" in chosen


def test_every_engine_is_used_by_about_as_many_frontends():
    uses = Counter(e.engine_id for f in range(200) for e in Subset(f"frontend-{f}", 50).of(engines(200)))
    assert len(uses) == 200
    assert 20 < min(uses.values()) <= max(uses.values()) < 85  # 50 on average


def view(*members, epoch=1, wave=0, running=False, routed=None, pool="p", suspended=False):
    group = GroupView(RankGroup(epoch, members), wave, running, Pauses(), members if routed is None else routed)
    return ClusterView(groups=(PoolGroup(model="m", pool=pool, view=group, suspended=suspended),))


class Bench:
    def __init__(self):
        self.sent = []
        self.groups = EngineGroups(self.sent.append)


def test_before_anybody_has_told_of_groups_ranks_take_requests():
    bench = Bench()
    assert bench.groups.accepts("a#1")
    bench.groups.sent("a#1")
    request = make_request()
    assert bench.groups.stamped("a#1", request) == request
    assert not bench.sent


def test_requests_go_to_members_that_stay():
    bench = Bench()
    bench.groups.follow_view(view("a#1", "b#1", routed=("a#1",)))
    assert [bench.groups.accepts(rank) for rank in ("a#1", "b#1", "c#1")] == [True, False, False]


def test_an_engine_that_is_in_no_group_is_left_out_of_its_pools_once_there_is_one():
    bench = Bench()
    assert not bench.groups.leaves_out("c#1", "m", "p")
    bench.groups.follow_view(view("a#1", "b#1"))
    assert [bench.groups.leaves_out(rank, "m", "p") for rank in ("a#1", "c#1")] == [False, True]
    assert not bench.groups.leaves_out("c#1", "m", "another")


def test_no_requests_go_to_a_group_that_stands_still_until_it_goes_on():
    bench = Bench()
    bench.groups.follow_view(view("a#1", "b#1", suspended=True))
    assert not bench.groups.accepts("a#1")
    bench.groups.follow_view(view("a#1", "c#1", epoch=2))
    assert bench.groups.accepts("a#1")


def test_a_request_carries_the_wave_and_starts_an_idle_group():
    bench = Bench()
    bench.groups.follow_view(view("a#1", "b#1", epoch=3, wave=5))
    stamped = bench.groups.stamped("a#1", make_request())
    assert (stamped.group_epoch, stamped.current_wave) == (3, 5)
    bench.groups.sent("a#1")
    start = StartDpWave("b#1", 3, 5, Pauses())
    assert bench.sent == [FirstRequest("a#1", 3, 5), start]
    bench.sent.clear()
    bench.groups.disconnected()
    bench.groups.sent("a#1")
    assert bench.sent == [start]


def test_a_running_group_is_told_nothing():
    bench = Bench()
    bench.groups.follow_view(view("a#1", "b#1", running=True))
    bench.groups.sent("a#1")
    assert not bench.sent


def test_a_rank_that_waits_is_heard_by_the_others():
    bench = Bench()
    bench.groups.follow_view(view("a#1", "b#1", running=True))
    bench.groups.start_wave(StartWave("a#1", 1, 4, Pauses()))
    bench.groups.start_wave(StartWave("z#1", 1, 4, Pauses()))
    assert bench.sent == [StartDpWave("b#1", 1, 4, Pauses())]


def test_an_older_epoch_changes_nothing_and_a_newer_one_the_members():
    bench = Bench()
    bench.groups.follow_view(view("a#1", "b#1", epoch=2))
    bench.groups.follow_view(view("a#1", epoch=1))
    assert bench.groups.accepts("b#1")
    bench.groups.follow_view(view("a#1", "c#1", epoch=3))
    assert [bench.groups.accepts(rank) for rank in ("a#1", "b#1", "c#1")] == [True, False, True]

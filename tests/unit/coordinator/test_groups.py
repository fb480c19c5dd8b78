import pytest

from penstock_common.errors import FailedPrecondition, InvalidArgument
from penstock_common.types.data_parallel import (
    GroupRegistration,
    Pauses,
    PeerLost,
    Place,
    PrepareFailed,
    RankGroup,
    RankReport,
    Reconfigure,
    StartWave,
)
from penstock_coordinator.groups import RETRY_AFTER, GroupOfPool

NOBODY = RankGroup()


def registration(rank, *, group=NOBODY, size=2, min_size=1, waits=False, opening=False, target=0, most=0, **config):
    report = RankReport(rank, group, Place(epoch=group.epoch), Pauses(), False, opening)
    return GroupRegistration(
        size=size,
        min_size=min_size,
        waits=waits,
        meeting_address="h:1",
        parallel_config={"dtype": "float32"} | config,
        report=report,
        target_size=target,
        max_size=most,
    )


class Bench:
    def __init__(self, **first):
        self.sent = []
        self.first = first
        self.group = GroupOfPool(registration("a#1", **first), floor=100, send=self.sent.append)
        self.now = 0.0

    def register(self, *ranks, **values):
        for rank in ranks:
            self.group.register(registration(rank, **{**self.first, **values}), self.now)

    def switch(self):
        """Have all members report that they carried out the last command, prepared or at once."""
        named = [m for m in self.sent if isinstance(m, Reconfigure)][-1].group
        for rank in named.members:
            report = registration(rank, group=named).report
            self.group.take(report, self.now)

    @property
    def members(self):
        return self.group.machine.group.members


def test_a_group_is_formed_at_once_where_no_rank_knows_an_earlier_coordinator():
    bench = Bench()
    bench.register("a#1")
    assert not bench.sent
    bench.register("b#1")
    assert bench.members == ("a#1", "b#1")
    assert bench.group.machine.group.epoch > 100
    assert [m.engine for m in bench.sent] == ["a#1", "b#1"]
    assert bench.group.view("m", "p").target_size == 2


def test_a_coordinator_that_has_started_again_waits_for_the_ranks_of_the_group():
    bench = Bench()
    group = RankGroup(7, ("a#1", "b#1", "c#1"))
    bench.register("a#1", "b#1", group=group)
    assert bench.group.machine.recovering
    bench.register("c#1", group=group)
    bench.group.recovered(5.0)
    assert bench.group.machine.group == group
    assert not [m for m in bench.sent if isinstance(m, Reconfigure) and m.group != group]


def test_a_coordinator_that_has_started_again_learns_the_target_of_the_newest_epoch():
    bench = Bench(size=3)
    group = RankGroup(7, ("a#1", "b#1"))
    bench.register("b#1", group=group, target=2)
    bench.register(
        "c#1", group=RankGroup(6, ("a#1", "b#1", "c#1")), target=3
    )  # the rank has left, and no message was sent to it since then
    bench.register("a#1", group=group, target=2)
    bench.group.recovered(5.0)
    assert bench.group.view("m", "p").target_size == 2
    bench.register("d#1")
    assert bench.members == ("a#1", "b#1")
    assert not bench.group.machine.standby.epoch


def test_without_a_target_of_its_ranks_a_group_goes_to_the_larger_of_two_sizes():
    bench = Bench(size=3)
    bench.register("a#1", "b#1", group=RankGroup(7, ("a#1", "b#1")))
    bench.group.recovered(5.0)
    assert bench.group.target_size == 3


def test_ranks_are_told_of_a_target_with_their_group_and_when_it_changes():
    bench = Bench()
    bench.register("a#1", "b#1")
    assert [(m.engine, m.target_size) for m in bench.sent] == [("a#1", 2), ("b#1", 2)]
    bench.switch()
    bench.sent.clear()
    bench.group.scale(4, 0.0)  # there are no ranks for this size yet
    assert [(m.engine, m.group, m.target_size) for m in bench.sent] == [
        (rank, bench.group.machine.group, 4) for rank in ("a#1", "b#1")
    ]
    bench.sent.clear()
    bench.register("c#1")
    assert {m.target_size for m in bench.sent} == {4}


def test_a_rank_that_computes_something_else_is_told_in_which_keys():
    bench = Bench()
    bench.register("a#1")
    with pytest.raises(
        FailedPrecondition, match=r"differs .*: dtype is 'bfloat16', not 'float32', x is 'y', not 'missing'"
    ) as e:
        bench.group.check(registration("b#1", dtype="bfloat16", x="y"))
    assert e.value.reason == "PARALLEL_CONFIG_DIFFERS"


def test_a_group_of_which_nobody_is_left_may_begin_anew_with_another_configuration():
    bench = Bench()
    bench.register("a#1", "b#1")
    for rank in bench.members:
        bench.group.gone(rank, 0.0)
    bench.group.check(registration("a#2", dtype="bfloat16"))
    bench.register("a#2", dtype="bfloat16", size=3)
    assert bench.group.target_size == 3


@pytest.mark.parametrize("waits", [False, True])
def test_a_lost_rank_is_left_out_or_waited_for_and_replaced(waits):
    bench = Bench(waits=waits)
    bench.register("a#1", "b#1")
    bench.switch()
    bench.group.stream_broken("b#1", 0.0)
    assert not bench.group.view("m", "p").suspended
    bench.group.take(PeerLost("a#1", bench.group.machine.group.epoch), 0.0)
    assert bench.members == (("a#1", "b#1") if waits else ("a#1",))
    assert bench.group.view("m", "p").suspended == waits
    if not waits:
        bench.switch()
    bench.register("c#1")
    bench.switch()
    assert set(bench.members) == {"a#1", "c#1"}
    assert not bench.group.view("m", "p").suspended


def test_a_change_that_fails_is_not_tried_again_at_once():
    bench = Bench()
    bench.register("a#1", "b#1")
    bench.switch()
    bench.register("c#1")
    bench.group.scale(3, 0.0)
    bench.group.take(PrepareFailed("c#1", bench.group.machine.standby.epoch), 0.0)
    bench.switch()
    assert bench.members == ("a#1", "b#1")
    assert not bench.group.machine.standby.epoch
    bench.group.repeat(RETRY_AFTER + 1)
    assert bench.group.machine.standby.members == ("a#1", "b#1", "c#1")


def test_a_group_goes_to_its_size_as_ranks_come():
    bench = Bench()
    bench.register("a#1", "b#1")
    bench.switch()
    assert bench.group.scale(4, 0.0) == 2
    assert not bench.group.machine.standby.epoch
    bench.register("c#1")
    bench.switch()
    bench.register("d#1")
    bench.switch()
    assert bench.members == ("a#1", "b#1", "c#1", "d#1")
    assert bench.group.scale(3, 0.0) == 4
    assert bench.group.view("m", "p").view.routed == ("a#1", "b#1", "c#1")
    bench.switch()
    assert bench.members == ("a#1", "b#1", "c#1")


def test_a_size_for_which_no_ranks_come_can_be_taken_back():
    bench = Bench()
    bench.register("a#1", "b#1")
    bench.switch()
    assert bench.group.scale(4, 0.0) == 2
    assert bench.group.scale(2, 0.0) == 4
    bench.register("c#1")
    assert not bench.group.machine.standby.epoch


def test_a_size_is_refused_below_the_least_and_during_a_change():
    bench = Bench(min_size=2)
    bench.register("a#1", "b#1")
    with pytest.raises(FailedPrecondition) as e:
        bench.group.scale(3, 0.0)
    assert e.value.reason == "RECONFIGURING"
    bench.switch()
    with pytest.raises(InvalidArgument, match="replicas is 1; it must be at least the group's min_size, which is 2"):
        bench.group.scale(1, 0.0)


def test_more_ranks_than_there_are_experts_are_refused_when_they_are_asked_for():
    bench = Bench(most=3)
    bench.register("a#1", "b#1")
    bench.switch()
    with pytest.raises(
        InvalidArgument,
        match="replicas is 4; it must be at most 3, because each rank needs at least one of the model's 3 experts",
    ) as e:
        bench.group.scale(4, 0.0)
    assert (e.value.reason, bench.group.target_size) == ("ABOVE_MAX_SIZE", 2)
    assert bench.group.scale(3, 0.0) == 2


def test_a_wave_that_a_rank_starts_is_told_to_the_others():
    bench = Bench()
    bench.register("a#1", "b#1")
    bench.switch()
    bench.sent.clear()
    bench.group.take(StartWave("a#1", bench.group.machine.group.epoch, 0, Pauses()), 0.0)
    assert [m.engine for m in bench.sent] == ["b#1"]
    assert bench.group.view("m", "p").view.running


def test_what_a_rank_said_of_an_older_epoch_is_over_once_it_is_in_the_newest() -> None:
    bench = Bench()
    bench.register("a#1", "b#1")
    bench.switch()
    lost = PeerLost("a#1", bench.group.machine.group.epoch)
    bench.group.stream_broken("b#1", 0.0)
    bench.group.take(lost, 0.0)
    bench.group.take(lost, 0.0)  # the same report again, before the rank knows the new epoch
    bench.switch()
    assert bench.members == ("a#1",)
    bench.register("b#2")
    bench.switch()
    assert bench.members == ("a#1", "b#2")

"""Members of a data-parallel group: planned changes, ranks that die, coordinators that restart."""

import msgspec
import pytest

from penstock_common.types.data_parallel import (
    Pauses,
    PeerLost,
    Place,
    PrepareFailed,
    RankGroup,
    RankReport,
    Reconfigure,
    StartWave,
)
from penstock_coordinator.group import GroupMachine, ScaleRefused, Waves

NO_GROUP = RankGroup()
TWO = RankGroup(5, ("a", "b"))
THREE = RankGroup(6, ("a", "b", "c"))
SERVING = GroupMachine(
    size=2,
    recovering=False,
    waves=Waves(TWO, wave=3),
    highest=5,
    known=frozenset("abc"),
    opened=frozenset("ab"),
)


def report(engine, group=NO_GROUP, *, opening=False, wave=0, prepared=0):
    running = group.epoch > 0 and opening
    return RankReport(engine, group, Place(group.epoch, wave), Pauses(), running, opening, prepared)


def named(sent):
    return {message.engine: message.group for message in sent}


def test_the_first_group_is_named_when_enough_ranks_are_there():
    machine, sent = GroupMachine(size=2, floor=100, recovering=False).report(report("b"))
    assert sent == ()
    machine, sent = machine.report(report("a"))
    first = RankGroup(101, ("a", "b"))
    assert named(sent) == {"a": first, "b": first}
    assert not machine.finished


def test_a_change_is_prepared_by_all_and_over_when_all_have_switched():
    machine, sent = SERVING.scale(3)
    assert sent == tuple(Reconfigure(engine, THREE, 3, Pauses(), base=5) for engine in "abc")
    assert machine.view.group == TWO
    for engine in "abc":
        assert not machine.finished or machine.group == TWO
        machine, _ = machine.report(report(engine, THREE, wave=3))
    assert machine.finished
    assert machine.view.routed == ("a", "b", "c")


def test_a_rank_that_is_to_leave_gets_no_requests_any_more():
    assert SERVING.scale(1)[0].view.routed == ("a",)


def test_ranks_leave_and_come_in_order_of_their_names_wherever_they_stand():
    group = RankGroup(5, ("e-2#a", "e-10#b", "e-1#c"))
    known = frozenset({*group.members, "e-11#d", "e-9#e"})
    machine = msgspec.structs.replace(SERVING, waves=Waves(group), known=known, opened=frozenset(group.members))
    assert machine.scale(2)[0].standby.members == ("e-2#a", "e-1#c")
    assert machine.scale(4)[0].standby.members == (*group.members, "e-9#e")


@pytest.mark.parametrize("size", [0, 4])
def test_a_size_that_cannot_be_had_is_refused(size):
    machine, (refused,) = SERVING.scale(size)
    assert machine == SERVING
    assert refused.reason == f"the new number of ranks is {size}; this number must be from 1 to 3"


def test_one_change_at_a_time():
    machine, _ = SERVING.scale(3)
    assert machine.scale(1) == (
        machine,
        (ScaleRefused("the data-parallel group is still changing its number of ranks after an earlier request"),),
    )


def test_a_newcomer_that_waits_does_not_show_that_others_have_switched():
    machine, _ = SERVING.scale(3)
    machine, _ = machine.report(report("c", THREE, opening=True))
    assert machine.group == TWO
    machine, _ = machine.report(report("a", THREE, opening=True))
    assert machine.group == THREE


def test_a_change_that_fails_names_the_old_group_anew():
    machine, _ = SERVING.scale(3)
    machine, sent = machine.prepare_failed(PrepareFailed("c", 6))
    again = RankGroup(7, ("a", "b"))
    assert named(sent) == {"a": again, "b": again, "c": again}


def test_a_rank_that_cannot_join_a_group_others_have_switched_to_is_left_out():
    machine, _ = SERVING.scale(3)
    machine, _ = machine.report(report("a", THREE, opening=True))
    machine, _ = machine.prepare_failed(PrepareFailed("c", 6))
    assert machine.group == RankGroup(7, ("a", "b"))


def test_a_preparation_that_fails_because_a_member_died_names_a_group_without_it():
    machine, _ = SERVING.scale(3)
    machine, _ = machine.peer_lost(PeerLost("b", 5))
    machine, _ = machine.prepare_failed(PrepareFailed("c", 6))
    assert machine.group == RankGroup(7, ("a", "b"))  # no report says yet that "a" is dead
    assert machine.stream_broken("a")[0].group == RankGroup(8, ("b",))


def test_a_rank_that_cannot_join_is_replaced_if_the_others_are_too_few():
    machine = msgspec.structs.replace(SERVING, min_size=2, opened=frozenset("a"))
    machine, sent = machine.prepare_failed(PrepareFailed("b", 5))
    assert machine.group == RankGroup(6, ("a", "c"))
    assert set(named(sent)) == set("abc")


def test_a_group_below_its_minimum_size_pauses_and_is_formed_again():
    machine = msgspec.structs.replace(SERVING, min_size=2, opened=frozenset("a"), known=frozenset("ab"))
    assert machine.prepare_failed(PrepareFailed("b", 5)) == (machine, ())
    for _ in range(2):  # reports of the other members, twice
        machine, _ = machine.peer_lost(PeerLost("a", 5))
    assert machine.group == RankGroup(6, ("a", "b"))


def test_a_broken_collective_and_a_broken_stream_are_a_death():
    machine, sent = SERVING.peer_lost(PeerLost("a", 5))
    assert sent == ()
    machine, sent = machine.stream_broken("b")
    assert named(sent)["a"] == RankGroup(6, ("a",))


def test_a_broken_stream_alone_is_not():
    machine, sent = SERVING.stream_broken("b")
    assert sent == ()
    assert machine.gone("b")[0].group == RankGroup(6, ("a",))


def test_a_collective_that_breaks_while_all_streams_hold_is_the_networks_fault():
    machine, _ = SERVING.peer_lost(PeerLost("a", 5))
    machine, sent = machine.peer_lost(PeerLost("a", 5))
    assert machine.group == RankGroup(6, ("a", "b"))
    assert set(named(sent)) == {"a", "b"}


def test_a_rank_that_dies_before_a_group_has_opened_is_not_waited_for():
    machine, _ = SERVING.peer_lost(PeerLost("a", 5))
    machine, _ = machine.peer_lost(PeerLost("a", 5))
    assert machine.group == RankGroup(6, ("a", "b"))
    assert machine.stream_broken("b")[0].group == RankGroup(7, ("a",))


def test_a_group_with_too_few_ranks_waits_for_another():
    machine = msgspec.structs.replace(SERVING, min_size=2, known=frozenset("ab"))
    machine, sent = machine.gone("b")
    assert (sent, machine.group) == ((), TWO)
    machine, sent = machine.report(report("d"))
    assert machine.group == RankGroup(6, ("a", "d"))


def test_a_restarted_coordinator_adopts_the_newest_group_and_waits_one_lease():
    machine = GroupMachine(size=2, floor=100)
    machine, sent = machine.report(report("a", TWO, wave=8))
    assert (machine.group, machine.waves.wave, sent) == (TWO, 8, ())
    machine, sent = machine.recovered()
    assert machine.group == RankGroup(101, ("a",))
    assert named(sent) == {"a": RankGroup(101, ("a",))}


def test_a_group_whose_ranks_have_all_reported_goes_on_as_it_is():
    machine = GroupMachine(size=2, floor=100)
    for engine in "ab":
        machine, _ = machine.report(report(engine, TWO, wave=8))
    machine, sent = machine.recovered()
    assert (machine.group, machine.finished, sent) == (TWO, True, ())


def test_a_change_of_which_a_restarted_coordinator_knows_nothing_is_given_up():
    machine = GroupMachine(size=2, floor=100)
    machine, _ = machine.report(report("a", TWO, prepared=6))
    machine, _ = machine.report(report("b", TWO))
    machine, _ = machine.recovered()
    assert machine.group == RankGroup(101, ("a", "b"))


def test_a_group_is_named_without_those_whose_streams_are_broken():
    machine = GroupMachine(size=2, floor=100)
    machine, _ = machine.report(report("a", TWO, prepared=6))
    machine, _ = machine.report(report("b", TWO))
    machine, _ = machine.stream_broken("a")
    machine, _ = machine.recovered()
    assert machine.group == RankGroup(101, ("b",))
    assert machine.report(report("b", TWO))[0] == machine


def test_a_rank_of_an_older_epoch_is_told_where_the_group_is():
    old = StartWave("a", 4, 9, Pauses())
    assert SERVING.start_wave(old) == (SERVING, (Reconfigure("a", TWO, 3, Pauses()),))


def test_commands_that_were_not_carried_out_are_repeated():
    machine, sent = SERVING.scale(3)
    assert machine.repeat() == (machine, sent)
    assert SERVING.repeat() == (SERVING, ())

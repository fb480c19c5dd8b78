"""A frontend's view of a group's waves, and the engines that it notifies."""

from penstock_common.types.data_parallel import FirstRequest, GroupView, Pauses, RankGroup, StartDpWave, StartWave
from penstock_frontend.dispatch.wave_state import Waves

GROUP = RankGroup(2, ("a", "b", "c"))
IDLE, _ = Waves().seen(GroupView(GROUP, wave=5))
RUNNING, _ = Waves().seen(GroupView(GROUP, wave=5, running=True))


def test_a_first_request_is_told_to_the_coordinator_and_to_the_other_ranks():
    assert IDLE.sent("b")[1] == (
        FirstRequest("b", 2, 5),
        StartDpWave("a", 2, 5, Pauses()),
        StartDpWave("c", 2, 5, Pauses()),
    )


def test_a_request_to_a_running_group_notifies_no_rank():
    assert RUNNING.sent("b") == (RUNNING, ())


def test_without_a_coordinator_the_group_is_believed_idle():
    alone, _ = RUNNING.disconnected()
    assert not alone.running
    assert [type(message) for message in alone.sent("b")[1]] == [StartDpWave, StartDpWave]


def test_an_older_view_changes_nothing_but_the_connection():
    alone, _ = IDLE.disconnected()
    again, _ = alone.seen(GroupView(RankGroup(1, ("a",)), wave=9, running=True))
    assert again == IDLE


def test_a_rank_that_waits_is_told_to_the_others():
    after, sent = IDLE.start_wave(StartWave("c", 2, 6, Pauses(2)))
    assert (after.view.wave, after.view.pauses) == (6, Pauses(2))
    assert sent == (StartDpWave("a", 2, 6, Pauses(2)), StartDpWave("b", 2, 6, Pauses(2)))


def test_a_rank_of_an_older_wave_or_another_epoch_notifies_no_rank():
    assert IDLE.start_wave(StartWave("c", 2, 4, Pauses()))[1] == ()
    assert IDLE.start_wave(StartWave("c", 1, 6, Pauses()))[1] == ()

"""Waves of a group in the coordinator: observed states, and notified ranks."""

import msgspec

from penstock_common.types.data_parallel import (
    FirstRequest,
    Pauses,
    Place,
    RankGroup,
    RankReport,
    StartDpWave,
    StartWave,
    WaveComplete,
)
from penstock_coordinator.group import Waves

GROUP = RankGroup(2, ("a", "b"))
IDLE = Waves(GROUP, wave=3)
RUNNING = Waves(GROUP, wave=3, running=True)


def report(wave, *, running, epoch=2):
    return RankReport("b", GROUP, Place(epoch, wave), Pauses(), running=running, opening=False)


def test_a_first_request_is_told_to_all_ranks_and_proves_nothing():
    after, sent = IDLE.first_request(FirstRequest("a", 2, 3))
    assert not after.running
    assert [start.engine for start in sent] == ["a", "b"]


def test_a_rank_that_reports_a_start_marks_the_group_running_and_is_not_notified():
    after, sent = IDLE.start_wave(StartWave("a", 2, 4, Pauses(2)))
    assert (after.wave, after.running, after.pauses) == (4, True, Pauses(2))
    assert sent == (StartDpWave("b", 2, 4, Pauses(2)),)


def test_the_end_of_a_wave_ends_it_and_comes_only_once():
    after, _ = RUNNING.wave_complete(WaveComplete("a", 2, 3, Pauses()))
    assert (after.wave, after.running) == (4, False)
    assert after.wave_complete(WaveComplete("a", 2, 3, Pauses())) == (after, ())


def test_an_idle_rank_of_a_later_wave_shows_that_the_earlier_ones_are_over():
    assert RUNNING.report(report(4, running=False))[0] == msgspec.structs.replace(RUNNING, wave=4, running=False)
    assert RUNNING.report(report(3, running=False))[0] == RUNNING


def test_messages_of_another_epoch_or_an_older_wave_are_dropped():
    for message in (StartWave("a", 1, 9, Pauses()), StartWave("a", 2, 2, Pauses())):
        assert IDLE.start_wave(message) == (IDLE, ())
    assert IDLE.first_request(FirstRequest("a", 1, 9)) == (IDLE, ())
    assert IDLE.report(report(9, running=True, epoch=1)) == (IDLE, ())


def test_a_first_request_to_a_running_group_notifies_no_rank():
    assert RUNNING.first_request(FirstRequest("a", 2, 3)) == (RUNNING, ())


def test_a_wave_that_somebody_outside_of_the_group_was_told_of_is_none():
    outside = RankReport("c", GROUP, Place(2, 9), Pauses(1), running=False, opening=False)
    assert IDLE.report(outside) == (IDLE, ())

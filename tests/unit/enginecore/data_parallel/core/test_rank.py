"""A rank of a data-parallel group: when it enters an exchange, how it uses the result, and which peers it notifies."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock_common.types.data_parallel import (
    PauseMode,
    Pauses,
    PeerLost,
    PrepareFailed,
    RankGroup,
    Reconfigure,
    StartDpWave,
    StartWave,
    WaveComplete,
)
from penstock_enginecore.data_parallel.core.rank import (
    AbortCollective,
    Exchange,
    Forward,
    Hold,
    Join,
    Leave,
    Phase,
    Prepare,
    Rank,
    Release,
    ResumeRefused,
    RollBack,
    Row,
    agree,
    pack_row,
    unpack_row,
)

TWO = RankGroup(1, ("a", "b"))
THREE = RankGroup(2, ("a", "b", "c"))
KEEP = Pauses(1, PauseMode.KEEP)
IDLE = Rank("a", group=TWO, phase=Phase.IDLE)
NO_WORK = Row(1, 0, 0, unfinished=False, pauses=Pauses())
WORK = msgspec.structs.replace(NO_WORK, unfinished=True)


def kinds(effects):
    return [type(effect) for effect in effects]


def test_an_idle_rank_that_gets_a_request_enters_an_exchange_and_reports_a_start():
    rank, effects = IDLE.add(1, 0)
    assert (rank.phase, rank.unfinished) == (Phase.EXCHANGE, True)
    assert effects == (StartWave("a", 1, 0, Pauses()), Exchange(TWO, WORK))


def test_a_refused_request_starts_a_wave_without_work():
    rank, effects = IDLE.add(1, 0, refused=True)
    assert not rank.unfinished
    assert effects[-1] == Exchange(TWO, NO_WORK)


def test_a_newer_wave_of_a_request_is_adopted_and_one_of_another_epoch_is_not():
    assert IDLE.add(1, 4)[0].wave == 4
    assert IDLE.add(7, 4)[0].wave == 0


def test_all_ranks_step_if_one_has_work_and_idle_ranks_run_dummy_batches():
    rank, _ = IDLE.start_dp_wave(StartDpWave("a", 1, 0, Pauses()))
    rank, effects = rank.gathered([NO_WORK, WORK])
    assert effects == (Forward(1, 0, 0, Pauses(), dummy=True),)
    assert rank.stepped(unfinished=False)[0].step == 1


def test_the_wave_ends_when_no_rank_has_work_and_rank_0_reports_it():
    rank, _ = IDLE.start_dp_wave(StartDpWave("a", 1, 0, Pauses()))
    rank, effects = rank.gathered([NO_WORK, NO_WORK])
    assert (rank.phase, rank.wave, rank.step) == (Phase.IDLE, 1, 0)
    assert effects == (WaveComplete("a", 1, 0, Pauses()),)


def test_between_exchanges_steps_follow_each_other_whatever_is_left():
    rank = msgspec.structs.replace(IDLE, interval=2, phase=Phase.FORWARD)
    rank, effects = rank.stepped(unfinished=False)
    assert kinds(effects) == [Forward]
    assert kinds(rank.stepped(unfinished=False)[1]) == [Exchange]


def test_a_start_of_an_older_wave_or_another_epoch_changes_nothing():
    rank = msgspec.structs.replace(IDLE, wave=3)
    for message in (StartDpWave("a", 1, 2, KEEP), StartDpWave("a", 2, 3, KEEP)):
        assert rank.start_dp_wave(message) == (rank, ())


def test_a_start_of_the_next_wave_is_remembered_until_this_one_is_over():
    rank, _ = IDLE.add(1, 0)
    rank, effects = rank.start_dp_wave(StartDpWave("a", 1, 1, Pauses()))
    assert effects == ()
    rank, effects = rank.gathered([NO_WORK, NO_WORK])
    assert (rank.phase, rank.wave) == (Phase.EXCHANGE, 1)


def test_who_waits_in_a_first_exchange_says_so_again():
    rank, _ = IDLE.add(1, 0)
    assert rank.repeat() == (rank, (StartWave("a", 1, 0, Pauses()),))


def test_a_pause_of_an_idle_group_is_complete_when_all_have_heard_of_it():
    rank, effects = IDLE.pause(KEEP)
    assert kinds(effects) == [Hold, StartWave, Exchange]
    assert not rank.paused
    rank, _ = rank.gathered([effects[-1].row, NO_WORK])
    assert rank.paused


def test_a_paused_rank_comes_to_an_exchange_and_no_step_follows():
    rank = msgspec.structs.replace(IDLE, pauses=KEEP, agreed=KEEP)
    rank, effects = rank.start_dp_wave(StartDpWave("a", 1, 0, Pauses()))
    rank, effects = rank.gathered([effects[-1].row, WORK])
    assert rank.paused
    assert kinds(effects) == [WaveComplete]


def test_requests_of_a_pause_are_held_and_go_on_after_the_resume():
    rank = msgspec.structs.replace(IDLE, pauses=KEEP, agreed=KEEP)
    rank, effects = rank.add(1, 0)
    assert (rank.held, rank.unfinished, effects) == (True, False, ())
    rank, effects = rank.resume(Pauses(2))
    assert (rank.held, rank.unfinished) == (False, True)
    assert kinds(effects) == [Release, StartWave, Exchange]


def test_a_resume_is_refused_while_its_pause_is_not_complete():
    rank, _ = IDLE.pause(KEEP)
    assert rank.resume(Pauses(2)) == (rank, (ResumeRefused(KEEP),))


def test_old_and_repeated_pauses_and_resumes_change_nothing():
    rank = msgspec.structs.replace(IDLE, pauses=Pauses(2), agreed=Pauses(2))
    assert rank.pause(KEEP) == (rank, ())
    assert rank.resume(Pauses(2)) == (rank, ())


def test_a_pause_that_waits_lets_older_requests_finish():
    rank, _ = IDLE.add(1, 0)
    rank, _ = rank.pause(Pauses(1, PauseMode.WAIT))
    rank, _ = rank.gathered([WORK, NO_WORK])
    rank, effects = rank.stepped(unfinished=True)
    assert effects[-1].row.unfinished
    assert not rank.paused


def test_a_pause_that_aborts_leaves_no_request():
    rank, _ = IDLE.add(1, 0)
    rank, effects = rank.pause(Pauses(1, PauseMode.ABORT))
    assert not rank.unfinished
    assert effects == (Hold(PauseMode.ABORT),)


def test_a_lost_peer_rolls_the_step_back_and_is_reported_until_somebody_answers():
    rank = msgspec.structs.replace(IDLE, phase=Phase.FORWARD)
    rank, effects = rank.peer_lost()
    assert effects == (RollBack(), PeerLost("a", 1))
    assert rank.repeat()[1] == (rank.report, PeerLost("a", 1))
    assert rank.step == 0


def test_a_new_epoch_opens_with_an_exchange_at_once():
    rank = msgspec.structs.replace(IDLE, phase=Phase.FORWARD, unfinished=True, wave=2, step=5)
    alone = RankGroup(2, ("a",))
    rank, effects = rank.reconfigure(Reconfigure("a", alone, 3, KEEP))
    row = Row(2, 3, 0, unfinished=False, pauses=KEEP)
    assert effects == (Hold(PauseMode.KEEP), RollBack(), AbortCollective(), Join(alone), Exchange(alone, row))
    rank, effects = rank.gathered([row])
    assert effects == (rank.report,)
    assert (rank.wave, rank.phase, rank.report.opening) == (3, Phase.IDLE, False)


def test_a_rank_outside_the_new_epoch_leaves():
    rank, effects = IDLE.reconfigure(Reconfigure("a", RankGroup(2, ("b",)), 0, Pauses()))
    assert rank.phase is Phase.OUTSIDE
    assert effects == (Leave(),)


def test_an_epoch_that_is_not_newer_changes_nothing():
    assert IDLE.reconfigure(Reconfigure("a", RankGroup(1, ("a",)), 9, KEEP)) == (IDLE, ())


def test_a_planned_group_is_prepared_and_all_switch_after_one_exchange():
    rank, effects = IDLE.reconfigure(Reconfigure("a", THREE, 0, Pauses(), base=1))
    assert effects == (Prepare(THREE),)
    rank, effects = rank.prepared(2)
    mine = effects[-1].row
    assert mine.prepared == 2
    behind, effects = rank.gathered([mine, NO_WORK])
    assert (behind.phase, behind.group) == (Phase.IDLE, TWO)
    rank, effects = rank.gathered([mine, mine])
    assert (rank.group, rank.opening) == (THREE, True)
    assert kinds(effects) == [Join, Exchange]


def test_a_newcomer_waits_in_the_first_exchange_of_its_epoch():
    rank, _ = Rank("c").reconfigure(Reconfigure("c", THREE, 4, Pauses(2), base=1))
    rank, effects = rank.prepared(2)
    assert effects[0] == Join(THREE)
    assert (rank.wave, rank.pauses) == (4, Pauses(2))


def test_what_cannot_be_prepared_is_reported():
    rank, _ = IDLE.reconfigure(Reconfigure("a", THREE, 0, Pauses(), base=1))
    assert rank.prepare_failed(3) == (rank, ())
    failed, effects = rank.prepare_failed(2)
    assert effects == (PrepareFailed("a", 2),)
    assert failed.repeat()[1] == (failed.report, *effects)
    other, _ = failed.reconfigure(Reconfigure("a", RankGroup(3, ("a", "b")), 0, Pauses()))
    assert PrepareFailed("a", 2) not in other.repeat()[1]


# The agreement of the ranks depends only on their rows.

PAUSES = [Pauses(0), Pauses(1, PauseMode.WAIT), Pauses(1, PauseMode.KEEP), Pauses(2), Pauses(3, PauseMode.ABORT)]
ROWS = st.lists(
    st.builds(
        Row,
        epoch=st.just(4),
        wave=st.integers(0, 3),
        step=st.just(0),
        unfinished=st.booleans(),
        pauses=st.sampled_from(PAUSES),
        prepared=st.sampled_from([0, 5]),
    ),
    min_size=1,
    max_size=8,
)


@given(ROWS)
def test_the_newest_and_strongest_pause_is_that_of_all(rows):
    agreement = agree(rows)
    assert agreement.pauses == max(row.pauses for row in rows)
    assert agreement.wave == max(row.wave for row in rows)


@given(ROWS)
def test_no_rank_steps_in_a_pause_unless_the_pause_waits_for_work(rows):
    agreement = agree(rows)
    if agreement.pauses.on and agreement.pauses.mode is not PauseMode.WAIT:
        assert not agreement.run


@given(ROWS)
def test_an_epoch_begins_when_all_are_prepared_and_no_step_comes_before(rows):
    agreement = agree(rows)
    assert (agreement.switch_to == 5) == all(row.prepared == 5 for row in rows)
    assert not (agreement.switch_to and agreement.run)


@given(ROWS, st.randoms())
def test_the_order_of_ranks_decides_nothing(rows, random):
    shuffled = random.sample(rows, len(rows))
    assert agree(rows) == agree(shuffled)


numbers = st.integers(0, 2**64 - 1)
rows = st.builds(
    Row,
    numbers,
    numbers,
    numbers,
    st.booleans(),
    st.builds(Pauses, numbers, st.sampled_from(PauseMode)),
    numbers,
)


@given(rows)
def test_a_row_survives_the_exchange(row):
    assert unpack_row(pack_row(row)) == row


@given(rows, rows)
def test_all_rows_are_of_one_length(one, other):
    assert len(pack_row(one)) == len(pack_row(other))

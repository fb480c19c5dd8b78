"""Membership of engines: indexes, incarnations, leases, drains and departures."""

import pytest

from penstock_common.lora_registry import LoraHeld
from penstock_common.types.cluster import EngineRegistration, EngineState, EngineStatus
from penstock_common.types.outputs import LoraStats, SchedulerStats
from penstock_coordinator.membership import (
    Change,
    IdTaken,
    Member,
    MemberChanged,
    Membership,
    SessionEnded,
    engine_state,
    engine_status,
)

LEASE = 4.0


def engine(engine_id="engine-0", incarnation="first", *, address="10.0.0.1:50052", draining=False):
    return EngineRegistration(
        engine_id=engine_id, incarnation=incarnation, address=address, model="demo", draining=draining
    )


@pytest.fixture
def membership():
    return Membership(lease_seconds=LEASE, now=0.0)


def pass_time(membership, start, end):
    """Tick often enough that the coordinator itself never seems stalled."""
    effects = []
    now = start
    while now < end:
        now = min(now + 1.0, end)
        effects += membership.tick(now)
    return effects


def ids(membership):
    return [member.registration.engine_id for member in membership.members]


def test_a_registered_engine_is_a_member_with_index_0(membership):
    assert membership.register(1, engine(), 0.0) == [MemberChanged("engine-0", 0, Change.JOINED)]
    assert ids(membership) == ["engine-0"]


def test_an_index_is_the_lowest_free_one_and_stays(membership):
    for session, name in enumerate(["a", "b", "c"]):
        membership.register(session, engine(name), 0.0)
    membership.leave(1)
    membership.register(3, engine("d"), 0.0)
    assert {m.registration.engine_id: m.index for m in membership.members} == {"a": 0, "d": 1, "c": 2}


def test_a_new_incarnation_takes_over_index_and_starts_without_statistics(membership):
    membership.register(1, engine("a"), 0.0)
    membership.register(2, engine("b"), 0.0)
    membership.report(2, SchedulerStats(step_counter=9, num_running_reqs=3), 0.0)
    assert membership.register(3, engine("b", "second"), 1.0) == [MemberChanged("b", 1, Change.REPLACED)]
    assert membership.members[1].stats == SchedulerStats()


def test_reports_of_a_replaced_incarnation_are_refused_and_keep_no_lease(membership):
    membership.register(1, engine(incarnation="first"), 0.0)
    membership.register(2, engine(incarnation="second"), 0.0)
    assert isinstance(membership.report(1, SchedulerStats(num_running_reqs=7), 3.0)[0], SessionEnded)
    assert membership.members[0].stats.num_running_reqs == 0
    assert [effect.change for effect in pass_time(membership, 0.0, LEASE)] == [Change.EXPIRED]


def test_a_replaced_incarnation_can_not_come_back(membership):
    membership.register(1, engine(incarnation="first"), 0.0)
    membership.register(2, engine(incarnation="second"), 0.0)
    (refusal,) = membership.register(3, engine(incarnation="first"), 0.0)
    assert refusal == SessionEnded("incarnation 'first' has been replaced by 'second'")
    assert membership.members[0].registration.incarnation == "second"


def test_late_drain_and_leave_of_an_old_session_change_nothing(membership):
    membership.register(1, engine(), 0.0)
    membership.register(2, engine(), 0.0)
    assert isinstance(membership.drain(1, 0.0)[0], SessionEnded)
    assert isinstance(membership.leave(1)[0], SessionEnded)
    assert ids(membership) == ["engine-0"]
    assert not membership.members[0].draining


def test_a_silent_engine_stays_until_its_lease_expires(membership):
    membership.register(1, engine(), 0.0)
    assert pass_time(membership, 0.0, LEASE - 0.5) == []
    assert pass_time(membership, LEASE - 0.5, LEASE) == [MemberChanged("engine-0", 0, Change.EXPIRED)]


def test_a_reconnect_within_the_lease_keeps_index_and_statistics(membership):
    membership.register(1, engine(), 0.0)
    membership.report(1, SchedulerStats(step_counter=5, num_waiting_reqs=2), 0.0)
    assert membership.register(2, engine(address="10.0.0.9:50052"), 3.0) == [
        MemberChanged("engine-0", 0, Change.RECONNECTED)
    ]
    assert membership.members[0].stats.num_waiting_reqs == 2
    assert membership.members[0].registration.address == "10.0.0.9:50052"


def test_every_report_renews_the_lease(membership):
    membership.register(1, engine(), 0.0)
    now = 0.0
    for _ in range(10):
        assert pass_time(membership, now, now + LEASE - 1) == []
        now += LEASE - 1
        membership.report(1, None, now)
    assert ids(membership) == ["engine-0"]


def test_statistics_never_go_back_in_step(membership):
    membership.register(1, engine(), 0.0)
    membership.report(1, SchedulerStats(step_counter=5, num_running_reqs=5), 0.0)
    membership.report(1, SchedulerStats(step_counter=4, num_running_reqs=4), 0.0)
    assert membership.members[0].stats.num_running_reqs == 5
    membership.report(1, SchedulerStats(step_counter=5, num_running_reqs=0), 0.0)
    assert membership.members[0].stats.num_running_reqs == 0


def test_draining_is_told_once_and_survives_a_reconnect_but_not_a_restart(membership):
    membership.register(1, engine(), 0.0)
    assert membership.drain(1, 0.0) == [MemberChanged("engine-0", 0, Change.DRAINING)]
    assert membership.drain(1, 0.0) == []
    membership.register(2, engine(draining=False), 0.0)
    assert membership.members[0].draining
    membership.register(3, engine(incarnation="second"), 0.0)
    assert not membership.members[0].draining


def test_shutdown_complete_removes_at_once(membership):
    membership.register(1, engine(), 0.0)
    assert membership.leave(1) == [MemberChanged("engine-0", 0, Change.LEFT)]
    assert membership.members == []


def test_an_expired_engine_has_to_register_again(membership):
    membership.register(1, engine(), 0.0)
    pass_time(membership, 0.0, LEASE)
    assert isinstance(membership.report(1, SchedulerStats(), LEASE)[0], SessionEnded)
    assert membership.register(2, engine(), LEASE) == [MemberChanged("engine-0", 0, Change.JOINED)]


def test_a_stopped_coordinator_expires_no_member(membership):
    membership.register(1, engine("a"), 0.0)
    membership.register(2, engine("b"), 0.0)
    membership.tick(1.0)
    assert membership.tick(100.0) == []
    membership.report(1, None, 101.0)
    assert pass_time(membership, 100.0, 100.0 + LEASE) == [MemberChanged("b", 1, Change.EXPIRED)]


def test_a_second_engine_with_an_id_is_refused_while_the_first_lives(membership):
    membership.register(1, engine(incarnation="one", address="10.0.0.1:50052"), 0.0)
    (refusal,) = membership.register(2, engine(incarnation="two", address="10.0.0.2:50052"), LEASE - 0.5)
    assert isinstance(refusal, IdTaken)
    assert "10.0.0.1:50052" in refusal.reason
    assert "10.0.0.2:50052" in refusal.reason
    assert membership.report(1, None, LEASE - 0.5) == []
    assert membership.members[0].registration.incarnation == "one"


def test_two_engines_with_an_id_do_not_replace_each_other_in_turns(membership):
    membership.register(0, engine(incarnation="one", address="10.0.0.1:50052"), 0.0)
    for session in range(1, 9):
        membership.report(0, None, float(session))
        membership.tick(float(session))
        (refusal,) = membership.register(session, engine(incarnation="two", address="10.0.0.2:50052"), float(session))
        assert isinstance(refusal, IdTaken)


def test_the_second_engine_takes_the_id_over_when_the_firsts_lease_is_over(membership):
    membership.register(1, engine(incarnation="one", address="10.0.0.1:50052"), 0.0)
    assert membership.register(2, engine(incarnation="two", address="10.0.0.2:50052"), LEASE) == [
        MemberChanged("engine-0", 0, Change.REPLACED)
    ]


def test_a_restart_at_the_same_address_need_not_wait(membership):
    membership.register(1, engine(incarnation="one"), 0.0)
    assert membership.register(2, engine(incarnation="two"), 0.5) == [MemberChanged("engine-0", 0, Change.REPLACED)]


def test_an_engines_adapters_stay_until_its_next_report_or_restart(membership):
    held = LoraHeld(version=1, held=(7,))
    membership.register(1, engine("a"), 0.0)
    membership.report(1, SchedulerStats(lora=LoraStats(held=held), step_counter=1), 0.1)
    for stats in (SchedulerStats(lora=LoraStats(), step_counter=2), SchedulerStats(step_counter=3), None):
        membership.report(1, stats, 0.2)
        assert membership.members[0].loras == held
    membership.register(2, engine("a"), 0.3)
    assert membership.members[0].loras == held
    membership.register(3, engine("a", "second"), 0.4)
    assert membership.members[0].loras is None


def member(*, age=0.0, draining=False, wedged=False):
    registration = EngineRegistration(
        engine_id="a", incarnation="1", address="h:1", model="m", pool="spot", max_num_seqs=4
    )
    stats = SchedulerStats(
        num_waiting_reqs=3,
        num_running_reqs=2,
        kv_cache_usage=0.5,
        step_counter=7,
        seconds_since_last_step=age,
        wedged=wedged,
    )
    return Member(registration, 4, 1, 0.0, draining, stats)


def test_the_status_is_what_registration_and_statistics_say():
    assert engine_status(member(age=1.5)) == EngineStatus(
        engine_id="a",
        incarnation="1",
        address="h:1",
        model="m",
        state=EngineState.SERVING,
        num_waiting_reqs=3,
        num_running_reqs=2,
        kv_cache_usage=0.5,
        seconds_since_last_step=1.5,
        index=4,
        pool="spot",
        max_num_seqs=4,
    )


def test_the_load_is_of_what_runs_and_waits_and_unknown_without_slots():
    assert engine_status(member()).load == 1.25
    assert EngineStatus(engine_id="a", incarnation="1", address="h:1", num_running_reqs=3).load is None


@pytest.mark.parametrize(
    ("age", "wedged", "draining", "state"),
    [
        (0.0, False, False, EngineState.SERVING),
        (9000.0, False, False, EngineState.SERVING),
        (1.0, True, False, EngineState.WEDGED),
        (0.0, False, True, EngineState.DRAINING),
        (1.0, True, True, EngineState.WEDGED),
    ],
)
def test_states_are_told_apart_by_what_the_engine_says_of_itself(age, wedged, draining, state):
    assert engine_state(member(age=age, draining=draining, wedged=wedged)) is state

import pytest

from penstock_common.types.cluster import EngineRegistration, EngineState, EngineStatus
from penstock_common.types.outputs import SchedulerStats
from penstock_coordinator.membership import Member, engine_state, engine_status


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

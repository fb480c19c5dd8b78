"""The shutdown state machine, event by event."""

from penstock_enginecore.core.shutdown import ShutdownEffect, ShutdownPhase, ShutdownState


def test_nothing_happens_until_asked():
    state = ShutdownState(10)
    assert state.advance(0, has_requests=False) == []
    assert state.phase is ShutdownPhase.RUNNING
    assert not state.refuses_requests


def test_new_requests_are_refused_from_the_request_on():
    state = ShutdownState(10)
    state.request()
    assert state.phase is ShutdownPhase.REQUESTED
    assert state.refuses_requests


def test_an_idle_engine_exits_at_once():
    state = ShutdownState(10)
    state.request()
    assert state.advance(0, has_requests=False) == [ShutdownEffect.ANNOUNCE_DRAINING]
    assert state.phase is ShutdownPhase.EXIT


def test_requests_in_flight_may_finish_before_the_deadline():
    state = ShutdownState(10)
    state.request()
    assert state.advance(5, has_requests=True) == [ShutdownEffect.ANNOUNCE_DRAINING]
    assert state.deadline == 15
    assert state.advance(14, has_requests=True) == []
    assert state.phase is ShutdownPhase.SHUTTING_DOWN
    assert state.advance(14, has_requests=False) == []
    assert state.phase is ShutdownPhase.EXIT


def test_what_is_left_at_the_deadline_is_aborted_once():
    state = ShutdownState(10)
    state.request()
    state.advance(0, has_requests=True)
    assert state.advance(10, has_requests=True) == [ShutdownEffect.ABORT_REQUESTS]
    assert state.advance(11, has_requests=True) == []
    state.advance(12, has_requests=False)
    assert state.phase is ShutdownPhase.EXIT


def test_without_a_timeout_requests_are_aborted_at_once():
    state = ShutdownState(0)
    state.request()
    effects = state.advance(0, has_requests=True)
    assert effects == [ShutdownEffect.ANNOUNCE_DRAINING, ShutdownEffect.ABORT_REQUESTS]


def test_asking_again_changes_nothing():
    state = ShutdownState(10)
    state.request()
    state.advance(0, has_requests=True)
    state.request()
    assert state.advance(5, has_requests=True) == []
    assert state.deadline == 10

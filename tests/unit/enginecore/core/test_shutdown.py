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
    assert state.phase is ShutdownPhase.DRAINING
    assert state.advance(14, has_requests=False) == []
    assert state.phase is ShutdownPhase.EXIT


def test_requests_left_at_the_deadline_are_aborted_once():
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


def test_a_drain_alone_does_not_end_the_process():
    state = ShutdownState(10)
    state.drain(3)
    assert state.refuses_requests
    assert not state.leaves
    assert state.advance(0, has_requests=True) == [ShutdownEffect.ANNOUNCE_DRAINING]
    assert (state.timeout, state.deadline) == (3, 3)
    assert state.advance(3, has_requests=True) == [ShutdownEffect.ABORT_REQUESTS]
    assert state.advance(4, has_requests=False) == []
    assert (state.phase, state.deadline) == (ShutdownPhase.DRAINING, None)


def test_a_drained_engine_leaves_when_it_is_told_to():
    state = ShutdownState(10)
    state.drain(3)
    state.advance(0, has_requests=False)
    state.request()
    assert state.leaves
    assert state.advance(1, has_requests=False) == []
    assert state.phase is ShutdownPhase.EXIT


def test_a_stop_brings_the_deadline_of_a_drain_forward_but_never_back():
    state = ShutdownState(10)
    state.drain(3600)
    state.advance(0, has_requests=True)
    state.request()
    state.advance(5, has_requests=True)
    assert state.deadline == 15
    state.advance(6, has_requests=True)
    assert state.deadline == 15
    state = ShutdownState(10)
    state.drain(3)
    state.advance(0, has_requests=True)
    state.request()
    state.advance(1, has_requests=True)
    assert state.deadline == 3


def test_whoever_asks_for_the_shutdown_may_say_how_long_it_takes():
    state = ShutdownState(10)
    state.request(2)
    state.advance(0, has_requests=True)
    assert (state.timeout, state.deadline) == (2, 2)


def test_blocks_that_are_kept_for_others_hold_the_engine_until_the_deadline():
    state = ShutdownState(10)
    state.request()
    state.advance(0, has_requests=True, has_leases=False)
    assert state.advance(3, has_requests=False, has_leases=True) == []
    assert state.phase is ShutdownPhase.DRAINING
    assert state.advance(10, has_requests=False, has_leases=True) == [ShutdownEffect.ABORT_REQUESTS]
    assert state.advance(10, has_requests=False, has_leases=True) == []  # another engine is still reading blocks
    assert state.phase is ShutdownPhase.EXIT


def test_an_engine_goes_when_the_last_lease_is_over():
    state = ShutdownState(10)
    state.request()
    state.advance(0, has_requests=False, has_leases=True)
    assert state.phase is ShutdownPhase.DRAINING
    state.advance(1, has_requests=False, has_leases=False)
    assert state.phase is ShutdownPhase.EXIT

"""Tests of when a draining frontend has finished."""

from penstock_frontend.app.servers import QUIET, Draining

AGE = 100.0
MOVED = 110.1
"""Seconds after which a connection has certainly been moved."""


def test_it_is_done_when_for_a_while_nothing_ran_and_no_connection_was_open() -> None:
    draining = Draining(0.0, timeout=300.0, max_age=AGE)
    assert not draining.done(0.0, calls=1, connections=[])
    assert not draining.done(1.0, calls=0, connections=[])
    assert not draining.done(0.9 + QUIET, calls=0, connections=[])
    assert draining.done(1.0 + QUIET, calls=0, connections=[])


def test_what_comes_meanwhile_is_waited_for_again() -> None:
    draining = Draining(0.0, timeout=300.0, max_age=AGE)
    assert not draining.done(0.0, calls=0, connections=[])
    assert not draining.done(1.0, calls=0, connections=[1])
    assert not draining.done(0.5 + QUIET, calls=0, connections=[])
    assert not draining.done(1.0 + QUIET, calls=0, connections=[])
    assert draining.done(0.5 + 2 * QUIET, calls=0, connections=[])


def test_it_waits_for_connections_on_which_calls_may_come() -> None:
    draining = Draining(10.0, timeout=300.0, max_age=AGE)
    assert not draining.done(10.0, calls=0, connections=[1, 2])
    assert not draining.done(10.0 + AGE, calls=0, connections=[2])
    assert not draining.done(10.0 + MOVED, calls=0, connections=[2])
    assert draining.done(10.0 + MOVED + QUIET, calls=0, connections=[2])


def test_calls_on_moved_connections_are_waited_for() -> None:
    draining = Draining(0.0, timeout=300.0, max_age=AGE)
    assert not draining.done(0.0, calls=1, connections=[1])
    assert not draining.done(2 * MOVED, calls=1, connections=[1])
    assert not draining.done(2 * MOVED + 1.0, calls=0, connections=[1])
    assert draining.done(2 * MOVED + 1.0 + QUIET, calls=0, connections=[1])


def test_the_age_of_a_connection_that_comes_meanwhile_counts_from_then() -> None:
    draining = Draining(0.0, timeout=300.0, max_age=AGE)
    assert not draining.done(0.0, calls=0, connections=[1])
    assert not draining.done(50.0, calls=0, connections=[1, 2])
    assert not draining.done(MOVED, calls=0, connections=[1, 2])
    assert not draining.done(MOVED + QUIET, calls=0, connections=[1, 2])
    assert not draining.done(50.0 + MOVED, calls=0, connections=[1, 2])
    assert draining.done(50.0 + MOVED + QUIET, calls=0, connections=[1, 2])


def test_connections_that_are_not_moved_are_not_waited_for() -> None:
    draining = Draining(0.0, timeout=300.0, max_age=0.0)
    assert not draining.done(0.0, calls=1, connections=[1])
    assert draining.done(0.0, calls=0, connections=[1])


def test_the_deadline_is_the_timeout_away() -> None:
    assert Draining(5.0, timeout=300.0, max_age=AGE).deadline == 305.0

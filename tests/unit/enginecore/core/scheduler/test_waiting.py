"""Waiting requests: those with a hold are in nobody's way, and get their turn when the last reason has gone."""

import pytest

from penstock_enginecore.core.request import Hold, Request
from penstock_enginecore.core.scheduler.waiting_queue import WaitingRequests
from tests.fakes.engines.engine_harness import make_request, prepared

REASONS = [hold for hold in Hold if hold]


def make(hold: Hold = Hold.NONE, *, arrival: int = 0) -> Request:
    request = prepared(make_request(5))
    request.hold, request.arrival = hold, arrival
    return request


def make_waiting(*requests: Request) -> WaitingRequests:
    waiting = WaitingRequests(by_priority=False, fair=True)
    for request in requests:
        waiting.add(request)
    return waiting


@pytest.mark.parametrize("reason", REASONS)
def test_a_held_request_is_skipped_and_counts(reason: Hold) -> None:
    held, free = make(reason, arrival=1), make(arrival=2)
    waiting = make_waiting(held, free)
    assert waiting.head() is free
    assert (len(waiting), waiting.num_held, waiting.num_tokens) == (2, 1, 10)
    waiting.start(free)
    assert waiting.head() is None
    assert waiting.longest_held() is held


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("other", REASONS)
def test_only_the_last_reason_lets_a_request_go(reason: Hold, other: Hold) -> None:
    request = make(reason)
    waiting = make_waiting(request)
    waiting.hold(request, other)
    waiting.release(request, reason)
    assert (waiting.head() is request) == (other is reason)
    waiting.release(request, other)
    assert waiting.head() is request
    waiting.release(request, other)
    assert (len(waiting), waiting.num_held) == (1, 0)


def test_a_request_in_the_queue_can_be_held() -> None:
    request = make()
    waiting = make_waiting(request)
    waiting.hold(request, Hold.TRIAL)
    assert waiting.head() is None
    waiting.start(request)
    assert request.hold is Hold.NONE
    assert len(waiting) == 0


def test_the_end_of_a_pause_releases_those_that_wait_for_nothing_else() -> None:
    paused, compiling = make(Hold.PAUSE), make(Hold.PAUSE | Hold.GRAMMAR)
    waiting = make_waiting(compiling, paused)
    waiting.release_all(Hold.PAUSE)
    assert waiting.head() is paused
    assert compiling.hold is Hold.GRAMMAR


@pytest.mark.parametrize("hold", [Hold.NONE, *REASONS])
def test_an_ended_request_is_taken_out_wherever_it_is(hold: Hold) -> None:
    request = make(hold)
    waiting = make_waiting(request)
    waiting.remove(request)
    assert (len(waiting), waiting.num_tokens) == (0, 0)

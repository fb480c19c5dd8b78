"""A heap whose members leave it and change their rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_common.errors import ResourceExhausted
from penstock_enginecore.core.request import Hold, Request
from penstock_enginecore.core.scheduler.waiting_queue import KeyedHeap, RequestQueue, WaitingRequests
from tests.fakes.engines.engine_harness import (
    FakeClock,
    Transcript,
    add,
    assert_as_expected,
    make_engine,
    make_request,
    prepared,
    run_to_end,
    step,
)
from tests.fakes.engines.fake_executor import oracle_tokens

OPERATIONS = st.lists(st.tuples(st.sampled_from(["set", "remove"]), st.sampled_from("abcd"), st.integers(0, 4)))


@given(OPERATIONS)
def test_the_head_is_the_lowest_of_those_that_are_there(operations):
    heap, ranks = KeyedHeap(), {}
    for operation, key, rank in operations:
        if operation == "set":
            heap.set(key, rank)
            ranks[key] = rank
        elif key in ranks:
            heap.remove(key)
            del ranks[key]
        assert len(heap) == len(ranks)
        assert [heap.rank(key) for key in "abcd"] == [ranks.get(key) for key in "abcd"]
        if ranks:
            assert heap.peek() == min(ranks, key=lambda key: (ranks[key], key))


def test_what_is_out_of_date_does_not_pile_up():
    heap = KeyedHeap()
    heap.set("head", -1)
    for rank in range(1000):
        heap.set("moving", rank)
        heap.set(f"passing {rank}", 5)
        heap.remove(f"passing {rank}")
    assert len(heap._heap) < 100
    assert heap.peek() == "head"


# The order in which requests of one tenant wait.


def queued(*, by_priority=False, priorities=(0, 0, 0)):
    queue = RequestQueue(by_priority=by_priority)
    requests = [prepared(make_request(n + 1, priority=p, arrival_time=9 - n)) for n, p in enumerate(priorities)]
    for arrival, request in enumerate(requests):
        request.arrival = arrival
        queue.add(request)
    return queue, requests


def drained(queue):
    order = []
    while queue:
        order.append(queue.peek())
        queue.remove(order[-1])
    return order


def test_the_queue_counts_tokens_and_removes_from_the_middle():
    queue, (a, b, c) = queued()
    assert queue.num_tokens == 6
    queue.remove(b)
    assert queue.num_tokens == 4
    assert drained(queue) == [a, c]


def test_a_request_that_comes_back_takes_its_old_place():
    queue, (a, b, c) = queued()
    queue.remove(a)
    queue.remove(b)
    queue.add(b)
    queue.add(a)
    assert drained(queue) == [a, b, c]


def test_lower_priority_numbers_go_first_then_earlier_arrivals_at_the_frontend():
    queue, (a, b, c) = queued(by_priority=True, priorities=(1, 1, 0))
    assert drained(queue) == [c, b, a]


def test_a_long_queue_forgets_what_was_removed_from_it():
    queue, _ = queued()
    for _ in range(5):
        many = [prepared(make_request(1)) for _ in range(200)]
        for request in many:
            queue.add(request)
        for request in reversed(many):
            queue.remove(request)
    assert len(queue) == 3
    assert len(queue._heap) < 100


# Waiting requests with holds. A hold delays only its own request, until the last hold is removed.

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


# Requests that a full queue refuses, and the retry delay for clients.


def test_a_full_queue_refuses_with_a_time_to_retry_after():
    clock = FakeClock()
    engine = make_engine(clock=clock, max_waiting_requests=2)
    add(engine, make_request(5), make_request(5))
    clock.now += 8
    with pytest.raises(ResourceExhausted, match="2 requests are waiting.*max_waiting_requests is 2") as e:
        add(engine, make_request(5))
    assert e.value.retry_after == 4
    engine.step(lambda: None)
    add(engine, make_request(5))


def test_the_queue_is_bounded_in_tokens_but_takes_any_request_when_empty():
    engine = make_engine(max_waiting_tokens=20)
    add(engine, make_request(30))
    with pytest.raises(ResourceExhausted, match="31 tokens would be waiting.*max_waiting_tokens is 20"):
        add(engine, make_request(1))


def test_once_requests_have_left_the_queue_their_rate_says_when_to_retry():
    clock = FakeClock()
    engine = make_engine(clock=clock, max_num_seqs=1, max_waiting_requests=2, max_waiting_tokens=30)
    add(engine, make_request(5, max_tokens=1), make_request(5, max_tokens=1))
    for _ in range(30):
        clock.now += 3.0
        engine.step(lambda: None)
        add(engine, make_request(5, max_tokens=1))
    with pytest.raises(ResourceExhausted, match="max_waiting_requests") as e:
        add(engine, make_request(5))
    assert e.value.retry_after == pytest.approx(3.0, rel=0.2)
    clock.now += 3.0
    engine.step(lambda: None)
    with pytest.raises(ResourceExhausted, match="max_waiting_tokens") as e:
        add(engine, make_request(35))  # 10 tokens must leave, two requests
    assert e.value.retry_after == pytest.approx(6.0, rel=0.2)


def test_a_resumed_request_is_never_refused_by_a_full_queue_and_goes_first():
    engine = make_engine(max_num_seqs=1, max_waiting_requests=1, max_waiting_tokens=20)
    waiting = make_request(15, max_tokens=2)
    add(engine, waiting)
    prior = oracle_tokens(0, 3, 1000)
    outliving = [make_request(10, attempt=1 + i, prior=prior, max_tokens=5) for i in range(3)]
    transcript = run_to_end(engine, *outliving)
    assert_as_expected(engine, transcript, waiting, *outliving)
    assert list(transcript.ends) == [request.request_id for request in [*outliving, waiting]]


def test_a_request_refused_by_other_engines_may_be_refused_again_and_keeps_order():
    engine = make_engine(max_num_seqs=1, max_waiting_requests=2)
    first = make_request(5, max_tokens=2)
    passed_on = make_request(5, attempt=2, never_admitted=True, max_tokens=2)
    add(engine, first, passed_on)
    with pytest.raises(ResourceExhausted, match="max_waiting_requests is 2") as e:
        add(engine, make_request(5, attempt=1, never_admitted=True))
    assert e.value.retry_after is not None
    assert list(run_to_end(engine).ends) == [first.request_id, passed_on.request_id]


def of(tenant: str):
    return make_request(5, max_tokens=1, tenant=tenant)


def serve_beside_a_flood(engine, transcript) -> tuple[int, int]:
    """Tenant a floods with 50 times the queue of 4, tenant b sends 20 requests one by one. Returns the served of b, the
    refused of a."""
    served = refused = 0
    for _ in range(20):
        for _ in range(10):
            try:
                add(engine, of("a"))
            except ResourceExhausted:
                refused += 1
        mine = of("b")
        add(engine, mine)
        for _ in range(10):
            step(engine, transcript)
            if mine.request_id in transcript.ends:
                served += 1
                break
    return served, refused


def test_a_full_queue_refuses_the_flooding_tenant_and_always_serves_the_other():
    engine, transcript = make_engine(max_num_seqs=1, max_waiting_requests=4), Transcript()
    served, refused = serve_beside_a_flood(engine, transcript)
    assert served == 20
    assert refused >= 100
    run_to_end(engine, transcript=transcript)
    assert len(transcript.ends) == 220 - refused, "nothing that was taken is lost"


def test_without_fairness_a_full_queue_refuses_everybody():
    engine = make_engine(max_num_seqs=1, max_waiting_requests=2, fairness=False)
    add(engine, of("a"), of("a"))
    with pytest.raises(ResourceExhausted, match="max_waiting_requests is 2"):
        add(engine, of("b"))


def test_tokens_of_a_full_queue_are_shared_like_requests():
    engine = make_engine(max_waiting_tokens=50)
    add(engine, *(of("a") for _ in range(10)))
    with pytest.raises(ResourceExhausted, match="max_waiting_tokens is 50"):
        add(engine, of("a"))
    add(engine, of("b"))

"""What a full queue refuses, and when it tells clients to come back."""

import pytest

from penstock_common.errors import ResourceExhausted
from tests.fakes.engines.engine_harness import (
    FakeClock,
    Transcript,
    add,
    assert_as_expected,
    make_engine,
    make_request,
    run_to_end,
    step,
)
from tests.fakes.engines.fake_executor import oracle_tokens


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


def test_a_request_that_outlived_its_engine_is_never_refused_for_a_full_queue_and_goes_first():
    engine = make_engine(max_num_seqs=1, max_waiting_requests=1, max_waiting_tokens=20)
    waiting = make_request(15, max_tokens=2)
    add(engine, waiting)
    prior = oracle_tokens(0, 3, 1000)
    outliving = [make_request(10, attempt=1 + i, prior=prior, max_tokens=5) for i in range(3)]
    transcript = run_to_end(engine, *outliving)
    assert_as_expected(engine, transcript, waiting, *outliving)
    assert list(transcript.ends) == [request.request_id for request in [*outliving, waiting]]


def test_a_request_that_other_engines_have_only_refused_may_be_refused_again_and_waits_its_turn():
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
    """Tenant a floods with 50 times the queue of 4, tenant b sends 20 requests one by one. Returns the served of b, the refused
    of a."""
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


def test_a_full_queue_refuses_the_flooding_tenant_and_serves_the_other_one_every_time():
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

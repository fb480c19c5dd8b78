"""Running requests that have to make room come back with the same tokens."""

from penstock_common.types.outputs import EventType, FinishReason
from tests.fakes.engines.engine_harness import (
    assert_as_expected,
    assert_nothing_left,
    make_engine,
    make_request,
    prepared,
    run_to_end,
)
from tests.fakes.engines.fake_executor import oracle_tokens


def test_preemption_takes_the_last_and_it_comes_back_first_with_the_same_tokens():
    engine = make_engine(num_blocks=11, prefix_caching=False)
    requests = [make_request(8, max_tokens=20, seed=i) for i in range(4)]
    transcript = run_to_end(engine, *requests)
    assert_as_expected(engine, transcript, *requests)
    assert engine.scheduler.stats().num_preemptions > 0
    assert list(transcript.ends) == [request.request_id for request in requests]
    assert_nothing_left(engine)


def test_a_preempted_request_returns_with_all_its_tokens_and_events():
    engine = make_engine(num_blocks=11, prefix_caching=False)
    requests = [make_request(8, max_tokens=20, seed=i) for i in range(2)]
    transcript = run_to_end(engine, *requests)
    second = requests[1]
    returned = [new for scheduled in engine.executor.steps for new in scheduled.new_requests][2]
    done = len(returned.token_ids) - 8
    assert done > 0
    assert returned.token_ids == [*second.prompt_token_ids, *oracle_tokens(1, done, 1000)]
    assert returned.num_prompt_tokens == 8
    outputs = transcript.outputs[second.request_id]
    events = [event.type for output in outputs for event in output.events]
    assert events == [EventType.QUEUED, EventType.SCHEDULED, EventType.PREEMPTED, EventType.SCHEDULED]
    assert [output.prefill_stats is not None for output in outputs] == [True] + [False] * (len(outputs) - 1)


def test_nothing_new_starts_in_a_step_that_preempted():
    engine = make_engine(num_blocks=8, prefix_caching=False)
    run_to_end(engine, *[make_request(8, max_tokens=16, seed=i) for i in range(4)])
    preempting = [scheduled for scheduled in engine.executor.steps if scheduled.preempted_request_ids]
    assert preempting
    assert not any(scheduled.new_requests for scheduled in preempting)


def test_an_output_that_outgrows_the_pool_ends_with_an_error():
    engine = make_engine(num_blocks=8)
    engine.scheduler.add_request(prepared(make_request(20, request_id="grows", max_tokens=100)))
    transcript = run_to_end(engine)
    assert transcript.tokens["grows"] == oracle_tokens(0, 9, 1000)
    assert transcript.reason("grows") is FinishReason.ERROR
    assert_nothing_left(engine)

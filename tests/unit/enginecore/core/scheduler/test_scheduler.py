"""What each step computes: budget, order, chunking, admission, preemption, deadlines."""

import pytest

from penstock_common.errors import ConfigError, InvalidArgument, ResourceExhausted
from penstock_common.types.outputs import EventType, FinishReason, RequestError
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.config import SchedulerConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup
from penstock_enginecore.core.request import Request, RequestStatus
from penstock_enginecore.core.scheduler.base import SchedulerContext, create_scheduler, register_scheduler
from penstock_enginecore.core.scheduler.deadlines import DeadlineQueue
from penstock_enginecore.core.scheduler.queue import RequestQueue
from penstock_enginecore.core.scheduler.scheduler import DefaultScheduler
from tests.fakes.engines.engine_harness import (
    CLIENT,
    FakeClock,
    OtherScheduler,
    Transcript,
    add,
    assert_as_expected,
    assert_nothing_left,
    make_engine,
    make_request,
    run_to_end,
    step,
)
from tests.fakes.engines.fake_executor import oracle_tokens
from tests.fakes.engines.fake_grammars import FakeGrammars


def scheduled_counts(engine):
    """Tokens per request of each step so far, in batch order."""
    return [list(s.num_scheduled_tokens.values()) for s in engine.executor.steps if s.num_scheduled_tokens]


def context(num_blocks=8, max_model_len=1000, **scheduler):
    return SchedulerContext(
        config=SchedulerConfig(**scheduler),
        kv_cache=KVCacheConfig(
            num_blocks=num_blocks, block_size=4, groups=(KVCacheGroup(layer_names=("l",)),), max_model_len=max_model_len
        ),
        enable_prefix_caching=True,
        eos_token_ids=frozenset(),
        monotonic_clock=FakeClock(),
        wall_clock=FakeClock(),
    )


def prepared(request, client_id=CLIENT, max_model_len=1000):
    return Request(request, client_id=client_id, max_model_len=max_model_len)


# Budget and chunks


def test_a_long_prompt_is_computed_in_chunks_beside_decodes():
    engine = make_engine(max_num_batched_tokens=10, prefix_caching=False)
    requests = [make_request(3, max_tokens=6), make_request(25, max_tokens=2, seed=1)]
    transcript = run_to_end(engine, *requests)
    assert_as_expected(engine, transcript, *requests)
    assert scheduled_counts(engine) == [[3, 7], [1, 9], [1, 9], [1, 1], [1], [1]]


def test_the_threshold_caps_each_prompt_chunk():
    engine = make_engine(max_num_batched_tokens=30, long_prefill_token_threshold=8)
    run_to_end(engine, make_request(20, max_tokens=1), make_request(list(range(50, 62)), max_tokens=1))
    assert scheduled_counts(engine) == [[8, 8], [8, 4], [4]]


def test_without_chunking_a_prompt_waits_until_it_fits_whole():
    engine = make_engine(
        max_num_batched_tokens=64, max_model_len=64, enable_chunked_prefill=False, long_prefill_token_threshold=8
    )
    requests = [make_request(40, max_tokens=3), make_request(list(range(200, 240)), max_tokens=3)]
    transcript = run_to_end(engine, *requests)
    assert_as_expected(engine, transcript, *requests)
    assert scheduled_counts(engine) == [[40], [1, 40], [1, 1], [1]]


def test_without_chunking_a_budget_below_max_model_len_is_refused():
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 32.*at least max_model_len, 64"):
        make_engine(max_num_batched_tokens=32, max_model_len=64, enable_chunked_prefill=False)


def test_no_more_requests_run_than_max_num_seqs():
    engine = make_engine(max_num_seqs=3)
    requests = [make_request(5, seed=i) for i in range(10)]
    transcript = run_to_end(engine, *requests)
    assert_as_expected(engine, transcript, *requests)
    assert max(map(len, scheduled_counts(engine))) == 3


def test_no_more_requests_run_than_the_budget_has_tokens():
    engine = make_engine(max_num_batched_tokens=4, max_num_seqs=100)
    requests = [make_request(3, seed=i) for i in range(12)]
    transcript = run_to_end(engine, *requests)
    assert_as_expected(engine, transcript, *requests)
    assert max(map(len, scheduled_counts(engine))) == 4


def test_requests_start_in_order_of_arrival():
    engine = make_engine(max_num_seqs=1)
    requests = [make_request(5, max_tokens=2) for _ in range(5)]
    transcript = run_to_end(engine, *requests)
    assert list(transcript.ends) == [request.request_id for request in requests]


# Blocks


def test_the_watermark_keeps_blocks_free_when_a_request_starts_beside_others():
    engine = make_engine(num_blocks=21, watermark=0.5, prefix_caching=False)
    add(engine, make_request(20), make_request(20), make_request(20))
    engine.step(lambda: None)
    assert engine.scheduler.stats().num_running_reqs == 2


def test_a_request_alone_may_use_the_whole_pool_whatever_the_watermark():
    engine = make_engine(num_blocks=11, watermark=0.5)
    request = make_request(38, max_tokens=2)
    assert_as_expected(engine, run_to_end(engine, request), request)


def test_a_prompt_starts_beside_others_only_if_all_of_it_fits():
    engine = make_engine(num_blocks=11, max_num_batched_tokens=12, prefix_caching=False)
    add(engine, make_request(8, max_tokens=1), make_request(36, max_tokens=1))
    engine.step(lambda: None)
    assert scheduled_counts(engine) == [[8]]


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


def test_a_prompt_larger_than_the_pool_ends_with_an_error_and_disturbs_nobody():
    scheduler = DefaultScheduler(context(num_blocks=8))
    scheduler.add_request(prepared(make_request(29, request_id="big")))
    scheduler.add_request(prepared(make_request(5, request_id="small")))
    assert [new.num_prompt_tokens for new in scheduler.schedule().new_requests] == [5]
    [output] = scheduler.take_outputs()[CLIENT].outputs
    assert (output.request_id, output.finish_reason) == ("big", FinishReason.ERROR)
    assert output.error.code == "RESOURCE_EXHAUSTED"
    assert "29 tokens" in output.error.message
    assert "7 KV cache blocks" in output.error.message


def test_an_output_that_outgrows_the_pool_ends_with_an_error():
    engine = make_engine(num_blocks=8)
    engine.scheduler.add_request(prepared(make_request(20, request_id="grows", max_tokens=100)))
    transcript = run_to_end(engine)
    assert transcript.tokens["grows"] == oracle_tokens(0, 9, 1000)
    assert transcript.reason("grows") is FinishReason.ERROR
    assert_nothing_left(engine)


# Deadlines


def test_an_expired_waiting_request_ends_before_it_costs_a_prefill():
    clock = FakeClock()
    engine = make_engine(clock=clock, max_num_seqs=1)
    late = make_request(5, deadline=clock.now + 5)
    transcript = Transcript()
    add(engine, make_request(5, max_tokens=50), late)
    step(engine, transcript)
    clock.now += 5
    run_to_end(engine, transcript=transcript)
    end = transcript.ends[late.request_id]
    assert end.finish_reason is FinishReason.ABORT
    assert end.error.code == "DEADLINE_EXCEEDED"
    assert sum(len(scheduled.new_requests) for scheduled in engine.executor.steps) == 1


def test_an_expired_running_request_ends_and_its_tokens_stay_valid():
    clock = FakeClock()
    engine = make_engine(clock=clock)
    request = make_request(5, max_tokens=50, deadline=clock.now + 5)
    add(engine, request)
    for _ in range(3):
        engine.step(lambda: None)
    clock.now += 10
    [frame] = engine.step(lambda: None).values()
    [output] = frame.outputs
    assert (output.offset, output.new_token_ids, output.finish_reason) == (3, [], FinishReason.ABORT)
    assert "after 3 output tokens" in output.error.message
    assert_nothing_left(engine)


def test_a_request_that_arrives_expired_costs_no_prefill():
    clock = FakeClock()
    engine = make_engine(clock=clock)
    late = make_request(5, deadline=clock.now - 1)
    transcript = run_to_end(engine, late)
    assert transcript.ends[late.request_id].error.code == "DEADLINE_EXCEEDED"
    assert not [scheduled for scheduled in engine.executor.steps if scheduled.new_requests]
    assert_nothing_left(engine)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_place_in_the_queue_does_not_save_an_expired_request(policy):
    clock = FakeClock()
    engine = make_engine(clock=clock, max_num_seqs=1, policy=policy)
    late = [make_request(5, deadline=clock.now + 5, priority=-i, tenant=f"t{i % 3}") for i in range(7)]
    others = [make_request(5, tenant=f"t{i % 3}", max_tokens=2, seed=i) for i in range(3)]
    mixed = [late[0], others[0], *late[1:4], others[1], *late[4:], others[2]]
    add(engine, *mixed)
    clock.now += 5
    transcript = run_to_end(engine)
    assert all(transcript.ends[request.request_id].error.code == "DEADLINE_EXCEEDED" for request in late)
    assert sum(len(scheduled.new_requests) for scheduled in engine.executor.steps) == len(others)
    assert_as_expected(engine, transcript, *others)


def test_a_request_that_expires_while_its_grammar_compiles_is_never_scheduled():
    clock = FakeClock()
    grammars = FakeGrammars(1000, 999, manual=True)
    engine = make_engine(clock=clock, grammars=grammars)
    late = make_request(5, deadline=clock.now + 5, structured_output=StructuredOutput(regex="odd:3"))
    transcript = Transcript()
    add(engine, late)
    step(engine, transcript)
    clock.now += 5
    step(engine, transcript)
    assert transcript.ends[late.request_id].error.code == "DEADLINE_EXCEEDED"
    grammars.compile_all()
    run_to_end(engine, transcript=transcript)
    assert not [scheduled for scheduled in engine.executor.steps if scheduled.new_requests]
    assert_nothing_left(engine)


def test_the_next_deadline_is_that_of_a_living_request():
    clock = FakeClock()
    engine = make_engine(clock=clock)
    first, second = make_request(5, deadline=1010.0), make_request(5, deadline=1020.0)
    add(engine, second, first, make_request(5))
    assert engine.time_to_next_deadline() == 10
    engine.abort(CLIENT, [first.request_id])
    assert engine.time_to_next_deadline() == 20
    engine.abort(CLIENT, [second.request_id])
    assert engine.time_to_next_deadline() is None


def test_ended_requests_do_not_pile_up_among_the_deadlines():
    deadlines = DeadlineQueue()
    for i in range(1000):
        request = prepared(make_request(5, deadline=2000.0 + i))
        deadlines.add(request)
        request.status = RequestStatus.FINISHED_ABORTED
        deadlines.discard(request)
    assert len(deadlines) < 100


# Admission


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


def test_an_id_in_use_is_refused_per_client_and_free_again_after_the_end():
    engine = make_engine()
    request = make_request(5, request_id="same")
    add(engine, request)
    with pytest.raises(InvalidArgument, match="'same' is already in use") as e:
        add(engine, request)
    assert e.value.field == "request_id"
    add(engine, request, client_id="other")
    outputs = {}
    while engine.has_work:
        for client, frame in engine.step(lambda: None).items():
            outputs.setdefault(client, []).extend(t for o in frame.outputs for t in o.new_token_ids)
    assert outputs == {CLIENT: oracle_tokens(0, 8, 1000), "other": oracle_tokens(0, 8, 1000)}
    add(engine, request)


# Aborts


def test_aborts_end_waiting_and_running_requests_with_one_output_each():
    engine = make_engine(max_num_seqs=1)
    running, waiting, other = (make_request(5, max_tokens=50) for _ in range(3))
    transcript = Transcript()
    add(engine, running, waiting, other)
    step(engine, transcript)
    ids = [running.request_id, waiting.request_id]
    assert engine.abort(CLIENT, [*ids, "unknown", *ids]) == ids
    assert engine.abort(CLIENT, ids) == []
    assert engine.abort("somebody else", [other.request_id]) == []
    run_to_end(engine, transcript=transcript)
    assert [transcript.reason(i) for i in ids] == [FinishReason.ABORT] * 2
    assert transcript.reason(other.request_id) is FinishReason.LENGTH
    assert_nothing_left(engine)


def test_a_client_that_goes_takes_its_requests_along_silently():
    engine = make_engine()
    add(engine, make_request(5), make_request(5), client_id="gone")
    stays = make_request(5)
    add(engine, stays)
    engine.step(lambda: None)
    engine.abort_client("gone")
    frames = []
    while engine.has_work:
        frames.append(engine.step(lambda: None))
    assert all(set(frame) <= {CLIENT} for frame in frames)
    assert_nothing_left(engine)


def test_abort_all_tells_why():
    engine = make_engine()
    add(engine, make_request(5), make_request(5), client_id="a")
    engine.abort_all(RequestError(code="UNAVAILABLE", message="bye"))
    [frame] = engine.step(lambda: None).values()
    assert [(o.finish_reason, o.error.message) for o in frame.outputs] == [(FinishReason.ABORT, "bye")] * 2
    assert_nothing_left(engine)


def test_workers_hear_of_ended_requests_even_when_nothing_else_runs():
    engine = make_engine()
    run_to_end(engine, make_request(5))
    last = engine.executor.steps[-1]
    assert last.total_num_scheduled_tokens == 0
    assert len(last.finished_request_ids) == 1


# Statistics, plugging


@pytest.mark.parametrize("fairness", [True, False])
def test_tenants_take_turns_unless_that_is_off(fairness):
    engine = make_engine(max_num_seqs=1, fairness=fairness)
    flood = [make_request(5, tenant="flood", max_tokens=2, seed=i) for i in range(8)]
    light = [make_request(5, tenant="light", max_tokens=2, seed=i) for i in range(2)]
    transcript = run_to_end(engine, *flood, *light)
    assert_as_expected(engine, transcript, *flood, *light)
    places = [list(transcript.ends).index(request.request_id) for request in light]
    assert places == ([1, 3] if fairness else [8, 9])
    assert_nothing_left(engine)


def test_statistics_follow_the_load():
    engine = make_engine(max_num_seqs=2, num_blocks=11)
    add(engine, *[make_request(8) for _ in range(3)])
    transcript = Transcript()
    step(engine, transcript)
    stats = transcript.frames[0].scheduler_stats
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.step_counter) == (2, 1, 1)
    assert stats.kv_cache_usage == pytest.approx(0.4)
    run_to_end(engine, transcript=transcript)
    assert engine.scheduler.stats().kv_cache_usage == 0


def test_the_step_counter_counts_steps_with_work():
    engine = make_engine()
    engine.step(lambda: None)
    assert engine.scheduler.stats().step_counter == 0
    run_to_end(engine, make_request(5, max_tokens=3))
    assert engine.scheduler.stats().step_counter == 3


def test_another_scheduler_is_plugged_in_by_name_or_path():
    path = "tests.fakes.engines.engine_harness:OtherScheduler"
    register_scheduler("other", path)
    assert isinstance(create_scheduler(context(scheduler="other")), OtherScheduler)
    assert isinstance(create_scheduler(context(scheduler=path)), OtherScheduler)
    assert type(create_scheduler(context())) is DefaultScheduler


def test_an_unknown_scheduler_names_the_nearest():
    with pytest.raises(ConfigError, match=r"scheduler.scheduler is 'defualt'.*did you mean 'default'"):
        create_scheduler(context(scheduler="defualt"))


@pytest.mark.parametrize("path", ["no.such.module:Class", "penstock_enginecore.core.scheduler.scheduler:Nothing"])
def test_a_scheduler_that_cannot_be_loaded_says_so(path):
    with pytest.raises(ConfigError, match="cannot be loaded"):
        create_scheduler(context(scheduler=path))


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


def test_by_priority_the_lower_number_goes_first_then_the_earlier_arrival_at_the_frontend():
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

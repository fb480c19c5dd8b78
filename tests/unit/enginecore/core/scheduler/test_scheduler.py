"""Turns of tenants, statistics, and schedulers plugged in by name."""

import pytest

from penstock_common.errors import ConfigError
from penstock_common.types.outputs import EventType, FinishReason
from penstock_enginecore.core.scheduler.base import create_scheduler, register_scheduler
from penstock_enginecore.core.scheduler.scheduler import DefaultScheduler
from tests.fakes.engines.engine_harness import (
    CLIENT,
    OtherScheduler,
    Transcript,
    add,
    assert_as_expected,
    assert_nothing_left,
    make_engine,
    make_request,
    prepared,
    run_to_end,
    scheduler_context,
    step,
    tokens_by_step,
)


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
    assert isinstance(create_scheduler(scheduler_context(scheduler="other")), OtherScheduler)
    assert isinstance(create_scheduler(scheduler_context(scheduler=path)), OtherScheduler)
    assert type(create_scheduler(scheduler_context())) is DefaultScheduler


def test_an_unknown_scheduler_names_the_nearest():
    with pytest.raises(ConfigError, match=r"scheduler.scheduler is 'defualt'.*did you mean 'default'"):
        create_scheduler(scheduler_context(scheduler="defualt"))


@pytest.mark.parametrize("path", ["no.such.module:Class", "penstock_enginecore.core.scheduler.scheduler:Nothing"])
def test_a_scheduler_that_cannot_be_loaded_says_so(path):
    with pytest.raises(ConfigError, match="cannot be loaded"):
        create_scheduler(scheduler_context(scheduler=path))


# Waiting requests that start in a step, and requests that wait for blocks.


def test_requests_start_in_order_of_arrival():
    engine = make_engine(max_num_seqs=1)
    requests = [make_request(5, max_tokens=2) for _ in range(5)]
    transcript = run_to_end(engine, *requests)
    assert list(transcript.ends) == [request.request_id for request in requests]


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
    assert tokens_by_step(engine) == [[8]]


def test_a_prompt_larger_than_the_pool_ends_with_an_error_and_affects_no_other():
    scheduler = DefaultScheduler(scheduler_context(num_blocks=8))
    scheduler.add_request(prepared(make_request(29, request_id="big")))
    scheduler.add_request(prepared(make_request(5, request_id="small")))
    assert [new.num_prompt_tokens for new in scheduler.schedule().new_requests] == [5]
    [output] = scheduler.take_outputs()[CLIENT].outputs
    assert (output.request_id, output.finish_reason) == ("big", FinishReason.ERROR)
    assert output.error.code == "RESOURCE_EXHAUSTED"
    assert "29 tokens" in output.error.message
    assert "7 KV cache blocks" in output.error.message


# The priority policy: requests with lower numbers run first and are preempted last.


def order_of_starts(engine, *requests):
    add(engine, *requests)
    transcript = Transcript()
    started = []
    while engine.has_work:
        step(engine, transcript)
        started += [r for r in transcript.tokens if r not in started]
    return started


def test_the_lower_number_starts_first_whenever_it_came():
    engine = make_engine(policy="priority", max_num_seqs=1)
    low, high, middle = (make_request(priority=p, max_tokens=2) for p in (5, -1, 2))
    assert order_of_starts(engine, low, high, middle) == [high.request_id, middle.request_id, low.request_id]


def test_equal_numbers_start_as_they_arrived_at_the_frontend():
    engine = make_engine(policy="priority", max_num_seqs=1)
    late, early = make_request(arrival_time=2.0, max_tokens=2), make_request(arrival_time=1.0, max_tokens=2)
    assert order_of_starts(engine, late, early) == [early.request_id, late.request_id]


def test_first_come_first_served_looks_at_no_number():
    engine = make_engine(max_num_seqs=1)
    first, second = make_request(priority=9, max_tokens=2), make_request(priority=0, max_tokens=2)
    assert order_of_starts(engine, first, second) == [first.request_id, second.request_id]


def test_the_highest_number_gives_up_its_blocks_wherever_it_stands():
    # There are 12 usable blocks of 4 tokens. Each request needs 7 blocks at its end.
    engine = make_engine(policy="priority", num_blocks=13, prefix_caching=False)
    unimportant = make_request(8, priority=3, max_tokens=20, seed=1)
    important = make_request(8, priority=1, max_tokens=20, seed=2)
    transcript = run_to_end(engine, unimportant, important)
    assert_as_expected(engine, transcript, unimportant, important)
    preempted = {
        request_id: sum(event.type is EventType.PREEMPTED for o in outputs for event in o.events)
        for request_id, outputs in transcript.outputs.items()
    }
    assert preempted[unimportant.request_id] >= 1
    assert preempted[important.request_id] == 0

"""Which waiting requests start in a step, and which have to wait for blocks."""

from penstock_common.types.outputs import FinishReason
from penstock_enginecore.core.scheduler.scheduler import DefaultScheduler
from tests.fakes.engines.engine_harness import (
    CLIENT,
    add,
    assert_as_expected,
    make_engine,
    make_request,
    prepared,
    run_to_end,
    scheduler_context,
    tokens_by_step,
)


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


def test_a_prompt_larger_than_the_pool_ends_with_an_error_and_disturbs_nobody():
    scheduler = DefaultScheduler(scheduler_context(num_blocks=8))
    scheduler.add_request(prepared(make_request(29, request_id="big")))
    scheduler.add_request(prepared(make_request(5, request_id="small")))
    assert [new.num_prompt_tokens for new in scheduler.schedule().new_requests] == [5]
    [output] = scheduler.take_outputs()[CLIENT].outputs
    assert (output.request_id, output.finish_reason) == ("big", FinishReason.ERROR)
    assert output.error.code == "RESOURCE_EXHAUSTED"
    assert "29 tokens" in output.error.message
    assert "7 KV cache blocks" in output.error.message

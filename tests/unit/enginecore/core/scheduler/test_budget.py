"""What one step may hold: tokens, running requests, chunks of prompts."""

import pytest

from penstock_common.errors import ConfigError
from penstock_enginecore.config import SchedulerConfig
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.core.scheduler.token_budget import StepBudget
from tests.fakes.engines.engine_harness import (
    assert_as_expected,
    make_engine,
    make_request,
    run_to_end,
    tokens_by_step,
)


def test_a_long_prompt_is_computed_in_chunks_beside_decodes():
    engine = make_engine(max_num_batched_tokens=10, prefix_caching=False)
    requests = [make_request(3, max_tokens=6), make_request(25, max_tokens=2, seed=1)]
    transcript = run_to_end(engine, *requests)
    assert_as_expected(engine, transcript, *requests)
    assert tokens_by_step(engine) == [[3, 7], [1, 9], [1, 9], [1, 1], [1], [1]]


def test_the_threshold_caps_each_prompt_chunk():
    engine = make_engine(max_num_batched_tokens=30, long_prefill_token_threshold=8)
    run_to_end(engine, make_request(20, max_tokens=1), make_request(list(range(50, 62)), max_tokens=1))
    assert tokens_by_step(engine) == [[8, 8], [8, 4], [4]]


def test_without_chunking_a_prompt_waits_until_it_fits_whole():
    engine = make_engine(
        max_num_batched_tokens=64, max_model_len=64, enable_chunked_prefill=False, long_prefill_token_threshold=8
    )
    requests = [make_request(40, max_tokens=3), make_request(list(range(200, 240)), max_tokens=3)]
    transcript = run_to_end(engine, *requests)
    assert_as_expected(engine, transcript, *requests)
    assert tokens_by_step(engine) == [[40], [1, 40], [1, 1], [1]]


def test_without_chunking_a_budget_below_max_model_len_is_refused():
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 32.*at least max_model_len, 64"):
        make_engine(max_num_batched_tokens=32, max_model_len=64, enable_chunked_prefill=False)


def test_no_more_requests_run_than_max_num_seqs():
    engine = make_engine(max_num_seqs=3)
    requests = [make_request(5, seed=i) for i in range(10)]
    transcript = run_to_end(engine, *requests)
    assert_as_expected(engine, transcript, *requests)
    assert max(map(len, tokens_by_step(engine))) == 3


def test_no_more_requests_run_than_the_budget_has_tokens():
    engine = make_engine(max_num_batched_tokens=4, max_num_seqs=100)
    requests = [make_request(3, seed=i) for i in range(12)]
    transcript = run_to_end(engine, *requests)
    assert_as_expected(engine, transcript, *requests)
    assert max(map(len, tokens_by_step(engine))) == 4


@pytest.mark.parametrize(("largest_span", "tokens"), [(0, 256), (300, 300), (4000, 2048)])
def test_a_stages_piece_holds_what_is_computed_together(largest_span, tokens):
    config = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=8)
    budget = StepBudget(
        config, supports_chunked_prefill=True, max_model_len=8192, num_stages=2, largest_span=largest_span
    )
    assert budget.max_num_tokens == tokens


def test_beside_requests_that_decode_prompts_have_few_tokens_of_a_step():
    engine = make_engine(max_num_batched_tokens=40, max_prompt_batch_tokens=16, prefix_caching=False)
    requests = [make_request(3, max_tokens=6), make_request(25, max_tokens=2, seed=1)]
    transcript = run_to_end(engine, *requests)
    assert_as_expected(engine, transcript, *requests)
    assert tokens_by_step(engine) == [[3], [1, 8], [1, 8], [1, 8], [1, 1], [1, 1]]


def test_prompts_share_what_they_have_beside_decodes_and_have_whole_steps_without():
    engine = make_engine(max_num_batched_tokens=40, max_prompt_batch_tokens=16, prefix_caching=False)
    first = make_request(3, max_tokens=3)
    requests = [make_request(30, max_tokens=1, seed=1), make_request(list(range(90, 96)), max_tokens=1)]
    transcript = run_to_end(engine, first, *requests)
    assert_as_expected(engine, transcript, first, *requests)
    # One decodes in two steps, in which a token of each prompt is not counted.
    assert tokens_by_step(engine) == [[3], [1, 8, 1], [1, 8, 1], [14, 4]]


def test_drafts_are_not_counted_as_tokens_of_prompts():
    config = SchedulerConfig(max_num_batched_tokens=100, max_prompt_batch_tokens=16)
    budget = StepBudget(config, supports_chunked_prefill=True, max_model_len=8192)
    budget.begin_step(None, decoding=True)
    output = SchedulerOutput(
        num_scheduled_tokens={"a": 20}, total_num_scheduled_tokens=20, scheduled_spec_decode_tokens={"a": [7] * 19}
    )
    assert budget.tokens_for(50, output) == 8
    assert budget.may_join(50, output)
    output.num_scheduled_tokens["b"] = 8
    output.total_num_scheduled_tokens += 8
    assert budget.tokens_for(50, output) == 1  # a token of each request is not counted
    assert not budget.may_join(10, output)

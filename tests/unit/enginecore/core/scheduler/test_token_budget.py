"""Limits of one step: tokens, running requests, chunks of prompts."""

import pytest

from penstock_common.errors import ConfigError
from penstock_enginecore.config import SchedulerConfig
from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.core.scheduler.token_budget import StepBudget, count_as_computed, num_tokens_due
from tests.fakes.engines.engine_harness import (
    Transcript,
    add,
    assert_as_expected,
    assert_nothing_left,
    make_engine,
    make_request,
    prepared,
    run_to_end,
    step,
    tokens_by_step,
)
from tests.fakes.engines.fake_executor import FakeExecutor


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
    # One request decodes in two steps. In these steps, one token of each prompt does not count towards the budget.
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
    assert budget.tokens_for(50, output) == 1  # one token of each request does not count towards the budget
    assert not budget.may_join(10, output)


# Tokens of a request that must be computed, including sampled tokens that are not yet known.


def computed(num_prompt: int, num_computed: int, **sampling: int) -> Request:
    request = prepared(make_request(num_prompt, **sampling))
    request.num_computed_tokens = num_computed
    return request


def scheduled(request: Request, num_tokens: int) -> SchedulerOutput:
    return SchedulerOutput(num_scheduled_tokens={request.key: num_tokens})


def test_uncomputed_tokens_are_due() -> None:
    assert num_tokens_due(computed(10, 0)) == 10
    assert num_tokens_due(computed(10, 4)) == 6
    assert num_tokens_due(computed(10, 10)) == 0


def test_a_step_that_catches_up_brings_a_token() -> None:
    request = computed(10, 4)
    count_as_computed(scheduled(request, 6), {request.key: request}, expect_tokens=True)
    assert (request.num_computed_tokens, request.num_placeholders) == (10, 1)
    assert num_tokens_due(request) == 1


def test_a_step_with_drafts_may_yield_more_tokens_and_the_next_waits_for_them() -> None:
    request = computed(10, 9)
    step = scheduled(request, 4)
    step.scheduled_spec_decode_tokens = {request.key: [1, 2, 3]}
    count_as_computed(step, {request.key: request}, expect_tokens=True)
    assert (request.num_computed_tokens, request.num_placeholders) == (13, 4)
    assert request.unsettled
    assert num_tokens_due(request) == 0


def test_a_step_inside_the_prompt_brings_none() -> None:
    request = computed(10, 0)
    count_as_computed(scheduled(request, 6), {request.key: request}, expect_tokens=True)
    assert (request.num_computed_tokens, request.num_placeholders) == (6, 0)


def test_without_asynchronous_scheduling_a_token_counts_when_it_is_there() -> None:
    request = computed(10, 4)
    count_as_computed(scheduled(request, 6), {request.key: request}, expect_tokens=False)
    assert (request.num_computed_tokens, request.num_placeholders) == (10, 0)
    assert num_tokens_due(request) == 0


def test_nothing_is_due_behind_the_last_token_that_is_on_its_way() -> None:
    request = computed(10, 10, max_tokens=1)
    request.num_placeholders = 1
    assert num_tokens_due(request) == 0


# Decodes are distributed over the steps in flight. Prompts are not distributed.


def scheduled_by_step(executor: FakeExecutor) -> list[dict[str, int]]:
    """Tokens of each step by request id."""
    return [
        {key.partition("#")[0]: count for key, count in each.num_scheduled_tokens.items()}
        for each in executor.steps
        if each.num_scheduled_tokens
    ]


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize(("num_stages", "num_requests"), [(2, 8), (3, 7), (4, 2)])
def test_each_request_decodes_once_in_as_many_steps_as_there_are_stages(
    num_stages: int, num_requests: int, async_scheduling: bool
) -> None:
    executor = FakeExecutor(late=True)
    engine = make_engine(executor, num_stages=num_stages, async_scheduling=async_scheduling)
    requests = [make_request(2, max_tokens=20, seed=i) for i in range(num_requests)]
    transcript = run_to_end(engine, *requests)
    assert_as_expected(engine, transcript, *requests)
    assert_nothing_left(engine)
    share = -(-num_requests // num_stages)
    middle = scheduled_by_step(executor)[2 * num_stages : 6 * num_stages]
    assert all(len(each) <= share for each in middle)
    assert len(middle) == 4 * num_stages
    if share * num_stages == num_requests:
        rounds = [middle[i : i + num_stages] for i in range(len(middle) - num_stages + 1)]
        assert all(len({key for each in of_round for key in each}) == num_requests for of_round in rounds)


def test_prompts_are_not_dealt_out_and_come_behind_the_decodes() -> None:
    executor = FakeExecutor(late=True)
    engine = make_engine(executor, num_stages=2, max_num_batched_tokens=16, async_scheduling=True)
    transcript = Transcript()
    add(engine, *[make_request(2, max_tokens=12, seed=i, request_id=f"d{i}") for i in range(4)])
    for _ in range(4):
        step(engine, transcript)
    late = [make_request(30, max_tokens=2, seed=9, request_id=f"p{i}") for i in range(2)]
    transcript.prior |= {request.request_id: 0 for request in late}
    before = len(tokens_by_step(engine))
    add(engine, *late)
    for _ in range(3):
        step(engine, transcript)
    first, second = scheduled_by_step(executor)[before : before + 2]
    assert [count for key, count in first.items() if key.startswith("p")] == [14]
    assert sum(second.values()) == 16
    assert [key[0] for key in second] == ["d", "d", "p"]  # the tokens of the other requests are still in flight
    run_to_end(engine, transcript=transcript)
    assert_as_expected(engine, transcript, *late)


def test_steps_in_flight_equal_the_stages_plus_one_with_async_scheduling() -> None:
    for async_scheduling, most in ((False, 3), (True, 4)):
        executor = FakeExecutor(late=True)
        engine = make_engine(executor, num_stages=3, async_scheduling=async_scheduling)
        add(engine, *[make_request(2, max_tokens=9, seed=i) for i in range(8)])
        in_flight = 0
        while engine.has_work:
            engine.step(lambda: None)
            in_flight = max(in_flight, len(engine._steps))
        # If no further step fits in flight, the call waits for a step before it returns.
        assert in_flight == most - 1

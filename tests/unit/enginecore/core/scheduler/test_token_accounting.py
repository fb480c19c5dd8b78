"""Tokens of a request that are due, and those that count before they are known."""

from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.core.scheduler.token_budget import count_as_computed, num_tokens_due
from tests.fakes.engines.engine_harness import make_request, prepared


def computed(num_prompt: int, num_computed: int, **sampling: int) -> Request:
    request = prepared(make_request(num_prompt, **sampling))
    request.num_computed_tokens = num_computed
    return request


def scheduled(request: Request, num_tokens: int) -> SchedulerOutput:
    return SchedulerOutput(num_scheduled_tokens={request.key: num_tokens})


def test_what_is_not_computed_is_due() -> None:
    assert num_tokens_due(computed(10, 0)) == 10
    assert num_tokens_due(computed(10, 4)) == 6
    assert num_tokens_due(computed(10, 10)) == 0


def test_a_step_that_catches_up_brings_a_token() -> None:
    request = computed(10, 4)
    count_as_computed(scheduled(request, 6), {request.key: request}, expect_tokens=True)
    assert (request.num_computed_tokens, request.num_placeholders) == (10, 1)
    assert num_tokens_due(request) == 1


def test_a_step_with_drafts_may_bring_as_many_more_and_nothing_is_due_before_that_is_known() -> None:
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

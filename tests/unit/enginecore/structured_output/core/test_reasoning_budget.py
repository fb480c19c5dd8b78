"""When a request's reasoning must end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_common.types.request import EngineCoreRequest, ReasoningTokens
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.structured_output.core.reasoning import ReasoningBudget

BEGIN, END = 2, 3


def budget_of(prompt: list[int], limit: int | None = 2, *, ended: bool | None = None) -> ReasoningBudget | None:
    return ReasoningBudget.of(
        EngineCoreRequest(
            request_id="a",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(thinking_token_budget=limit),
            reasoning_parser_kwargs=ReasoningTokens(BEGIN, END),
            reasoning_ended=ended,
        )
    )


@pytest.mark.parametrize(
    ("prompt", "output", "forced"),
    [
        ([9, BEGIN], [], False),
        ([9, BEGIN], [8], False),
        ([9, BEGIN], [8, 8], True),
        ([9, BEGIN], [8, END], False),
        ([9, BEGIN], [8, 8, END], False),
        ([9, BEGIN], [8, 8, END, 8, 8], False),
        ([9], [], False),
        ([9], [8, 8], False),
        ([9], [BEGIN, 8], False),
        ([9], [BEGIN, 8, 8], True),
        ([9], [7, BEGIN, 8, 8], True),
        ([9], [7, 7, 7, 7, BEGIN, 8, 8], False),
        ([9, BEGIN], [BEGIN, 8, 8], True),
        ([9, BEGIN], [8, BEGIN], True),
    ],
)
def test_the_end_is_forced_behind_as_many_tokens_as_the_budget_has(
    prompt: list[int], output: list[int], forced: bool
) -> None:
    budget = budget_of(prompt)
    assert budget is not None
    assert budget.forced(np.array(output, dtype=np.int32)) == (END if forced else None)


def test_no_budget_without_a_limit_or_after_reasoning_ended_in_the_prompt() -> None:
    assert budget_of([9, BEGIN], None) is None
    assert budget_of([9, BEGIN, END]) is None
    assert budget_of([9], ended=True) is None


def test_what_the_frontend_knows_goes_before_what_the_prompt_ends_with() -> None:
    budget = budget_of([9], 0, ended=False)
    assert budget is not None
    assert budget.forced([]) == END


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(0, 6))
def test_no_output_that_obeys_has_more_reasoning_than_its_budget(tokens: list[int], limit: int) -> None:
    budget = budget_of([9, BEGIN], limit)
    assert budget is not None
    output: list[int] = []
    for token in tokens:
        output.append(budget.forced(output) if budget.forced(output) is not None else token)
    first = 1 if output[:1] == [BEGIN] else 0
    reasoning = output[first : output.index(END, first)] if END in output[first:] else output[first:]
    assert len(reasoning) <= limit

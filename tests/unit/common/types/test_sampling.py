"""Ranges of sampling parameters, equal in frontends and engines. Errors name the field, the value and the limit."""

import math
from typing import Any

import pytest

from penstock_common.errors import InvalidArgument
from penstock_common.types.sampling import RepetitionDetection, SamplingParams, check_values


def pattern(longest: int, **values: int) -> dict[str, RepetitionDetection]:
    return {"repetition_detection": RepetitionDetection(max_pattern_size=longest, **values)}


BEYOND: dict[str, list[Any]] = {
    "temperature": [-0.1, 100.5, math.nan, math.inf],
    "top_p": [0.0, 1.1, math.nan],
    "top_k": [-1, -2],
    "min_p": [-0.1, 1.1, math.nan],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0.0, math.nan, math.inf],
    "seed": [-(2**63) - 1, 2**63],
    "max_tokens": [0, -5],
    "min_tokens": [-1],
    "logprobs": [-2],
    "prompt_logprobs": [-2],
    "stream_interval": [0],
    "truncate_prompt_tokens": [0],
    "num_speculative_tokens": [-1, 33],
    "thinking_token_budget": [-1],
    "logit_bias": [{5: 100.5}, {5: -100.5}, {5: math.nan}],
}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        *(({name: value}, name) for name, values in BEYOND.items() for value in values),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        (pattern(0), "repetition_detection.max_pattern_size"),
        (pattern(1001), "repetition_detection.max_pattern_size"),
        (pattern(2, min_pattern_size=3), "repetition_detection.max_pattern_size"),
        (pattern(2, min_pattern_size=0), "repetition_detection.min_pattern_size"),
        (pattern(2, min_count=1), "repetition_detection.min_count"),
    ],
)
def test_values_out_of_range_are_refused_naming_the_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as e:
        check_values(SamplingParams(**given))
    assert e.value.field == f"sampling_params.{field}"
    assert e.value.field in e.value.message


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 100.0, "top_p": 1.0, "top_k": 0, "min_p": 1.0},
        {"top_k": 10**9, "top_p": 1e-6, "temperature": 0.0},
        {"max_tokens": 1, "min_tokens": 1},
        {"max_tokens": None, "min_tokens": 1000},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 1e-3},
        {"presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"logprobs": -1, "prompt_logprobs": 0, "stream_interval": 1, "truncate_prompt_tokens": 1},
        {"logit_bias": {0: -100.0, 99: 100.0}, "thinking_token_budget": 0},
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 32},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        pattern(1000, min_pattern_size=1000, min_count=2),
    ],
)
def test_values_at_the_limit_are_taken(given: dict[str, Any]) -> None:
    check_values(SamplingParams(**given))


def test_the_message_names_the_value_and_the_limit() -> None:
    with pytest.raises(InvalidArgument, match=r"top_p is 1.5; it must be above 0 and at most 1"):
        check_values(SamplingParams(top_p=1.5))

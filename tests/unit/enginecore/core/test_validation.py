"""Wrong requests are refused with the field's name, and nobody else notices."""

import math

import msgspec
import pytest

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.sampling import RepetitionDetection, StructuredOutput
from penstock_enginecore.core.validation import RequestLimits, validate_request
from tests.fakes.engine_harness import make_request

LIMITS = RequestLimits(max_model_len=20, vocab_size=100)


def field_of(request, error=InvalidArgument):
    with pytest.raises(error) as e:
        validate_request(request, LIMITS)
    assert e.value.field.rsplit(".", 1)[-1] in e.value.message
    return e.value.field


@pytest.mark.parametrize(
    ("request_args", "field"),
    [
        ({"prompt": []}, "prompt_token_ids"),
        ({"prompt": 20}, "prompt_token_ids"),
        ({"prompt": [1, 100]}, "prompt_token_ids"),
        ({"prompt": [1, -1]}, "prompt_token_ids"),
        ({"prior": [100]}, "prior_output_token_ids"),
        ({"deadline": math.nan}, "deadline"),
        ({"deadline": math.inf}, "deadline"),
        ({"attempt": -1}, "attempt"),
    ],
)
def test_a_wrong_request_field_is_named(request_args, field):
    assert field_of(make_request(**request_args)) == field


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 2),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("min_tokens", -1),
        ("min_tokens", 9),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("seed", None),
        ("seed", -1),
        ("seed", 2**64),
        ("stop_token_ids", (100,)),
        ("stop_token_ids", (5, -1)),
    ],
)
def test_a_wrong_sampling_parameter_is_named(name, value):
    assert field_of(make_request(**{name: value})) == f"sampling_params.{name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.2),
        ("logprobs", 0),
        ("prompt_logprobs", 1),
        ("logit_bias", {1: 2.0}),
        ("allowed_token_ids", (1,)),
        ("bad_words", ("x",)),
        ("structured_output", StructuredOutput(regex="a")),
        ("repetition_detection", RepetitionDetection(max_pattern_size=3)),
    ],
)
def test_what_is_not_served_yet_is_refused_not_ignored(name, value):
    assert field_of(make_request(**{name: value}), Unimplemented) == f"sampling_params.{name}"


def test_other_ranks_and_empty_ids_are_refused():
    request = make_request()
    assert field_of(msgspec.structs.replace(request, data_parallel_rank=1)) == "data_parallel_rank"
    assert field_of(msgspec.structs.replace(request, request_id="")) == "request_id"


def test_messages_name_the_value_and_the_limit():
    with pytest.raises(InvalidArgument, match=r"prompt_token_ids\[1\] is 100; token ids go from 0 to 99"):
        validate_request(make_request([5, 100]), LIMITS)
    with pytest.raises(InvalidArgument, match="has 20 tokens; at most 19 leave room"):
        validate_request(make_request(20), LIMITS)
    with pytest.raises(InvalidArgument, match=r"top_p is 1.5; it must be above 0.0 and at most 1.0"):
        validate_request(make_request(top_p=1.5), LIMITS)


@pytest.mark.parametrize(
    "request_args",
    [
        {"prompt": 19},
        {"prompt": [0, 99]},
        {"prompt": 19, "prior": [5] * 10},
        {"seed": None, "temperature": 0.0},
        {"seed": 2**64 - 1},
        {"max_tokens": None, "min_tokens": 1000},
        {"max_tokens": 1, "min_tokens": 1},
        {"top_k": 10**9, "min_p": 1.0, "top_p": 1e-6, "temperature": 100.0},
        {"stop": ("text",), "detokenize": False, "cache_salt": "ü"},
    ],
)
def test_limits_themselves_are_allowed(request_args):
    validate_request(make_request(**request_args), LIMITS)

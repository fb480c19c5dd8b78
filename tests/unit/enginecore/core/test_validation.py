"""Invalid requests are refused with the field's name, and no other request is affected."""

import math

import msgspec
import pytest

from penstock_common.errors import InvalidArgument
from penstock_common.types.request import PoolingParams, PoolingTask
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.pooling_validation import PoolingLimits
from penstock_enginecore.core.validation import RequestLimits, validate_request
from tests.fakes.engines.engine_harness import make_request

LIMITS = RequestLimits(model=ModelInfo(max_len=20, vocab_size=100), max_model_len=20)


def field_of(request):
    with pytest.raises(InvalidArgument) as e:
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
        ({"tenant_weight": 0.0}, "tenant_weight"),
        ({"tenant_weight": math.nan}, "tenant_weight"),
        ({"tenant_weight": 1001.0}, "tenant_weight"),
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
        ("temperature", -0.1),  # the ranges of numbers are in tests/unit/common/types/test_sampling.py
        ("seed", None),
        ("stop_token_ids", (100,)),
        ("stop_token_ids", (5, -1)),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("allowed_token_ids", (1, 100)),
        ("bad_words", ("word",)),
        ("bad_word_token_ids", ((),)),
        ("bad_word_token_ids", ((1,), (2, 100))),
        ("bad_word_token_ids", ((1,),) * 1025),
        ("bad_word_token_ids", ((1,) * 1025,)),
    ],
)
def test_a_wrong_sampling_parameter_is_named(name, value):
    assert field_of(make_request(**{name: value})) == f"sampling_params.{name}"


def test_bad_words_must_leave_an_allowed_token():
    banned = ((1,), (2,), (3, 4))
    request = make_request(allowed_token_ids=(1, 2), bad_word_token_ids=banned)
    assert field_of(request) == "sampling_params.allowed_token_ids"
    validate_request(make_request(allowed_token_ids=(1, 2, 4), bad_word_token_ids=banned), LIMITS)


def test_the_number_of_biases_is_limited():
    limits = RequestLimits(model=ModelInfo(max_len=20, vocab_size=5000), max_model_len=20)
    validate_request(make_request(logit_bias=dict.fromkeys(range(1024), 1.0)), limits)
    with pytest.raises(InvalidArgument, match=r"logit_bias has 1025 entries; the limit is 1024"):
        validate_request(make_request(logit_bias=dict.fromkeys(range(1025), 1.0)), limits)


def test_an_engine_that_reports_the_whole_vocabulary_takes_minus_one():
    limits = RequestLimits(model=ModelInfo(max_len=20, vocab_size=100), max_model_len=20, max_logprobs=-1)
    for count in (-1, 0, 100):
        validate_request(make_request(logprobs=count, prompt_logprobs=count), limits)
    with pytest.raises(InvalidArgument, match=r"logprobs is 101; it must be from 0 to 100"):
        validate_request(make_request(logprobs=101), limits)
    with pytest.raises(
        InvalidArgument, match=r"is -1, which requests all 100 tokens of the vocabulary; the limit of this engine is 20"
    ):
        validate_request(make_request(logprobs=-1), LIMITS)


def test_sampling_parameters_of_a_pooling_request_mean_nothing():
    request = msgspec.structs.replace(make_request(top_p=7.0), pooling_params=PoolingParams(task=PoolingTask.EMBED))
    embeds = PoolingLimits(tasks=frozenset({PoolingTask.EMBED}), embedding_size=8)
    validate_request(
        request, msgspec.structs.replace(LIMITS, model=msgspec.structs.replace(LIMITS.model, pooling=embeds))
    )


@pytest.mark.parametrize("priority", [-(2**31), 2**31 - 1])
def test_priorities_are_any_int32(priority):
    validate_request(make_request(priority=priority), LIMITS)


def test_other_ranks_wide_priorities_and_empty_ids_are_refused():
    assert field_of(make_request(priority=2**31)) == "priority"
    assert field_of(make_request(data_parallel_rank=1)) == "data_parallel_rank"
    assert field_of(msgspec.structs.replace(make_request(), request_id="")) == "request_id"


def test_messages_name_the_value_and_the_limit():
    with pytest.raises(InvalidArgument, match=r"prompt_token_ids\[1\] is 100; token ids go from 0 to 99"):
        validate_request(make_request([5, 100]), LIMITS)
    with pytest.raises(InvalidArgument, match="has 20 tokens; at most 19 leave room"):
        validate_request(make_request(20), LIMITS)


@pytest.mark.parametrize(
    "request_args",
    [
        {"prompt": 19},
        {"prompt": [0, 99]},
        {"prompt": 19, "prior": [5] * 10},
        {"seed": None, "temperature": 0.0},
        {"stop": ("text",), "detokenize": False, "cache_salt": "ü"},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"logit_bias": {0: -100.0, 99: 100.0}, "allowed_token_ids": (0, 99)},
        {"bad_words": ("word",), "bad_word_token_ids": ((99,), (1,) * 1024)},
        {"structured_output": StructuredOutput(regex="a")},
    ],
)
def test_limits_themselves_are_allowed(request_args):
    validate_request(make_request(**request_args), LIMITS)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([3, 100], r"prediction_token_ids\[1\] is 100; token ids go from 0 to 99"),
        ([1] * 21, "prediction_token_ids has 21 tokens; the limit is max_model_len, 20"),
    ],
)
def test_a_wrong_prediction_is_named(token_ids, message):
    request = msgspec.structs.replace(make_request(), prediction_token_ids=token_ids)
    with pytest.raises(InvalidArgument, match=message) as e:
        validate_request(request, LIMITS)
    assert e.value.field == "prediction_token_ids"


def test_a_prediction_as_long_as_a_sequence_is_allowed():
    validate_request(msgspec.structs.replace(make_request(), prediction_token_ids=[99] * 20), LIMITS)


def test_a_pooled_request_has_no_prediction():
    model = ModelInfo(
        max_len=20, vocab_size=100, pooling=PoolingLimits(tasks=frozenset({PoolingTask.EMBED}), embedding_size=4)
    )
    request = msgspec.structs.replace(
        make_request(), pooling_params=PoolingParams(task=PoolingTask.EMBED), prediction_token_ids=[1]
    )
    with pytest.raises(InvalidArgument, match="prediction_token_ids is set together with pooling_params"):
        validate_request(request, RequestLimits(model=model, max_model_len=20))

"""Sampling parameters: precedence of defaults, and refused values."""

from typing import Any

import pytest

from penstock_common.errors import ConfigError, InvalidArgument
from penstock_common.types.request import EngineCoreRequest, RequestContext
from penstock_common.types.sampling import SamplingParams, StructuredOutput
from penstock_frontend.config import LimitsConfig
from penstock_frontend.processing.prompts import sampling_params

LIMITS = LimitsConfig()
MODEL = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 64}


def test_request_values_override_the_models_defaults_and_those_override_ours() -> None:
    params = sampling_params.resolve({"temperature": 0.0}, sampling_params.model_defaults(MODEL), LIMITS)
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (0.0, 0.9, 20, 0.0, 64)


def test_the_spelling_of_vllm_switches_top_k_off_in_requests_and_models() -> None:
    assert sampling_params.resolve({"top_k": -1}, sampling_params.model_defaults(MODEL), LIMITS).top_k == 0
    assert sampling_params.resolve({}, sampling_params.model_defaults(MODEL | {"top_k": -1}), LIMITS).top_k == 0


def test_a_model_that_does_not_sample_gives_no_filters() -> None:
    defaults = sampling_params.model_defaults(MODEL | {"do_sample": False})
    assert defaults == {"max_tokens": 64}


def test_the_models_repetition_penalty_counts_also_where_it_does_not_sample() -> None:
    assert sampling_params.model_defaults({"repetition_penalty": 1.3}) == {"repetition_penalty": 1.3}


def test_a_generation_config_out_of_range_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="generation_config.*temperature is -1"):
        sampling_params.model_defaults({"do_sample": True, "temperature": -1})


def test_a_seed_is_concrete_and_differs_when_none_is_given() -> None:
    seeds = {sampling_params.resolve({}, {}, LIMITS).seed for _ in range(20)}
    assert None not in seeds
    assert len(seeds) == 20
    assert sampling_params.resolve({"seed": 0}, {}, LIMITS).seed == 0


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"temperature": -0.1}, "temperature"),  # the ranges of numbers are in tests/unit/common/types/test_sampling.py
        ({"n": 0}, "n"),
        ({"stop": ("",)}, "stop[0]"),
        ({"stop": ("a", "")}, "stop[1]"),
        ({"stop": ("x",) * 65}, "stop"),
        ({"stop": ("x" * 257,)}, "stop[0]"),
        ({"stop": ("x",), "detokenize": False}, "stop"),
        ({"stop_token_ids": (1,) * 1025}, "stop_token_ids"),
        ({"n": 129}, "n"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
        ({"allowed_token_ids": range(65_537)}, "allowed_token_ids"),
        ({"bad_words": ("a", "")}, "bad_words[1]"),
        ({"bad_words": ("x" * 257,)}, "bad_words[0]"),
        ({"bad_words": ("x",) * 257}, "bad_words"),
        ({"bad_word_token_ids": ((1,), ())}, "bad_word_token_ids[1]"),
        ({"bad_word_token_ids": ((1,) * 257,)}, "bad_word_token_ids[0]"),
        ({"bad_word_token_ids": ((1,),) * 257}, "bad_word_token_ids"),
        ({"structured_output": StructuredOutput()}, "structured_output"),
        ({"structured_output": StructuredOutput(regex="a", json_object=True)}, "structured_output"),
        ({"structured_output": StructuredOutput(grammar="")}, "structured_output.grammar"),
        ({"structured_output": StructuredOutput(choice=("a", ""))}, "structured_output.choice"),
        ({"structured_output": StructuredOutput(regex="x" * 262_145)}, "structured_output.regex"),
        ({"structured_output": StructuredOutput(choice=("x" * 262_144, "y"))}, "structured_output.choice"),
    ],
)
def test_values_out_of_range_are_refused_naming_the_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as e:
        sampling_params.resolve(given, {}, LIMITS)
    assert e.value.field == f"sampling_params.{field}"
    assert e.value.field in e.value.message


@pytest.mark.parametrize(
    "given",
    [
        {"stop": ("x" * 256,) * 64},
        {"n": 128, "temperature": 0.0},
        {"logit_bias": dict.fromkeys(range(1024), -100.0), "allowed_token_ids": range(65_536)},
        {"bad_words": ("x" * 256,) * 256, "bad_word_token_ids": ((1,) * 256,)},
        {"structured_output": StructuredOutput(json_object=True)},
        {"structured_output": StructuredOutput(json_schema="x" * 262_144)},
    ],
)
def test_values_at_the_limit_are_taken(given: dict[str, Any]) -> None:
    sampling_params.resolve(given, {}, LIMITS)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_token_ids_outside_the_vocabulary_are_refused(name: str) -> None:
    params = sampling_params.resolve({name: (5, 300)}, {}, LIMITS)
    with pytest.raises(InvalidArgument, match=rf"{name}\[1\] is 300; it must be below the vocabulary size, 256"):
        sampling_params.check_vocabulary(params, 256)


def test_a_logit_bias_outside_the_vocabulary_is_refused() -> None:
    params = sampling_params.resolve({"logit_bias": {5: 1.0, 256: 1.0}}, {}, LIMITS)
    with pytest.raises(InvalidArgument, match="logit_bias is given for token id 256"):
        sampling_params.check_vocabulary(params, 256)


def test_a_bad_sequence_outside_the_vocabulary_is_refused() -> None:
    params = sampling_params.resolve({"bad_word_token_ids": ((1, 2), (256, 3))}, {}, LIMITS)
    with pytest.raises(InvalidArgument, match=r"bad_word_token_ids\[1\] is 256"):
        sampling_params.check_vocabulary(params, 256)


# Splitting one request into several sequences.


def request(**params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r-1",
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(**params),
        context=RequestContext(external_request_id="r"),
    )


def test_each_sequence_has_the_next_seed_and_an_id_of_its_own() -> None:
    children = sampling_params.sequences(request(n=3, seed=7, temperature=0.5))
    assert [child.request_id for child in children] == ["r-1.0", "r-1.1", "r-1.2"]
    assert [child.sampling_params.seed for child in children] == [7, 8, 9]
    assert {child.sampling_params.n for child in children} == {1}
    assert {child.sampling_params.temperature for child in children} == {0.5}
    assert {child.context.external_request_id for child in children} == {"r"}


def test_a_single_sequence_is_the_request_itself() -> None:
    single = request(seed=7)
    assert sampling_params.sequences(single) == [single]


def test_the_seed_behind_the_largest_is_the_smallest() -> None:
    children = sampling_params.sequences(request(n=2, seed=2**63 - 1))
    assert [child.sampling_params.seed for child in children] == [2**63 - 1, -(2**63)]


def test_only_the_first_sequence_computes_the_prompts_log_probabilities() -> None:
    children = sampling_params.sequences(request(n=3, prompt_logprobs=2, logprobs=1))
    assert [child.sampling_params.prompt_logprobs for child in children] == [2, None, None]
    assert [child.sampling_params.logprobs for child in children] == [1, 1, 1]

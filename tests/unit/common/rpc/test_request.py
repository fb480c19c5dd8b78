"""SamplingParams on the wire and in the domain."""

from typing import Any

import pytest

from penstock.common.v1 import sampling_pb2 as pb
from penstock_common.errors import InvalidArgument
from penstock_common.rpc import request
from penstock_common.types.sampling import (
    JsonWhitespace,
    OutputKind,
    RepetitionDetection,
    SamplingParams,
    StructuredOutput,
)


def over_the_wire(params: SamplingParams) -> SamplingParams:
    return request.from_proto(pb.SamplingParams.FromString(request.to_proto(params).SerializeToString()))


def test_parameters_survive_the_wire() -> None:
    params = SamplingParams(
        n=3,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        seed=-5,
        max_tokens=9,
        min_tokens=2,
        stop=("a", "b"),
        stop_token_ids=(3, 4),
        ignore_eos=True,
        include_stop_str_in_output=True,
        logprobs=0,
        prompt_logprobs=2,
        logit_bias={3: 1.5, 4: -100.0},
        allowed_token_ids=(1, 2),
        bad_words=("x",),
        bad_word_token_ids=((1,), (2, 3)),
        detokenize=False,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        output_kind=OutputKind.CUMULATIVE,
        stream_interval=3,
        repetition_detection=RepetitionDetection(max_pattern_size=5, min_pattern_size=2, min_count=4),
        truncate_prompt_tokens=5,
        skip_reading_prefix_cache=True,
    )
    assert over_the_wire(params) == params


@pytest.mark.parametrize(
    "constraint",
    [
        {"json_schema": '{"type": "object"}'},
        {"json_object": True},
        {"regex": "a+"},
        {"choice": ("yes", "no")},
        {"grammar": 'root ::= "a"'},
        {"structural_tag": "{}"},
    ],
)
def test_each_kind_of_constraint_survives_the_wire(constraint: dict[str, Any]) -> None:
    params = SamplingParams(structured_output=StructuredOutput(**constraint))
    assert over_the_wire(params) == params


@pytest.mark.parametrize("whitespace", JsonWhitespace)
def test_the_blanks_of_json_survive_the_wire(whitespace: JsonWhitespace) -> None:
    params = SamplingParams(structured_output=StructuredOutput(json_object=True, json_whitespace=whitespace))
    assert over_the_wire(params) == params


def test_unknown_blanks_are_refused_with_the_known_ones() -> None:
    message = pb.SamplingParams(structured_output={"json_object": True, "json_whitespace": 9})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="json_whitespace is 9; known: DUMPS, COMPACT, ANY") as error:
        request.from_proto(message)
    assert error.value.field == "sampling_params.structured_output.json_whitespace"


@pytest.mark.parametrize(("kind", "value"), [("regex", "a"), ("choice", ("b",)), ("grammar", 'root ::= "c"')])
def test_blanks_of_json_go_with_json_alone(kind: str, value: Any) -> None:
    with pytest.raises(
        ValueError, match=f"json_whitespace is COMPACT, but the constraint is {kind}; set json_whitespace only with"
    ):
        _ = StructuredOutput(**{kind: value}, json_whitespace=JsonWhitespace.COMPACT).constraint


def test_zero_is_told_from_unset() -> None:
    assert request.set_fields(pb.SamplingParams(temperature=0.0, max_tokens=0, logprobs=0)) == {
        "temperature": 0.0,
        "max_tokens": 0,
        "logprobs": 0,
    }
    assert request.set_fields(pb.SamplingParams()) == {}


def test_top_k_minus_one_means_off() -> None:
    assert request.from_proto(pb.SamplingParams(top_k=-1)).top_k == 0


def test_repetition_detection_has_defaults() -> None:
    message = pb.SamplingParams(repetition_detection={"max_pattern_size": 3})
    assert request.from_proto(message).repetition_detection == RepetitionDetection(max_pattern_size=3)


@pytest.mark.parametrize("constraint", [{}, {"json_object": False}])
def test_an_empty_constraint_is_a_mistake(constraint: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="structured_output is empty") as error:
        request.set_fields(pb.SamplingParams(structured_output=constraint))
    assert error.value.field == "sampling_params.structured_output"


@pytest.mark.parametrize("constraint", [{}, {"regex": "a", "choice": ("b",)}])
def test_a_constraint_is_exactly_one(constraint: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="exactly one constraint"):
        _ = StructuredOutput(**constraint).constraint


def test_zero_sequences_are_a_mistake() -> None:
    with pytest.raises(InvalidArgument, match="sampling_params.n is 0"):
        request.set_fields(pb.SamplingParams(n=0))


@pytest.mark.parametrize("kind", [4, 99, -1])
def test_an_unknown_output_kind_is_refused_with_the_known_ones(kind: int) -> None:
    with pytest.raises(InvalidArgument, match=f"output_kind is {kind}; known: DELTA, CUMULATIVE, FINAL") as error:
        request.from_proto(pb.SamplingParams(output_kind=kind))  # type: ignore[arg-type]
    assert error.value.field == "sampling_params.output_kind"

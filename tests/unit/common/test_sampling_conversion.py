"""SamplingParams on the wire and in the domain."""

import pytest

from penstock.common.v1 import sampling_pb2 as pb
from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.rpc import sampling
from penstock_common.types.sampling import OutputKind, SamplingParams


def test_parameters_survive_the_wire() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=-5,
        max_tokens=9,
        min_tokens=2,
        stop=("a", "b"),
        stop_token_ids=(3, 4),
        ignore_eos=True,
        include_stop_str_in_output=True,
        detokenize=False,
        skip_special_tokens=False,
        output_kind=OutputKind.CUMULATIVE,
        stream_interval=3,
        truncate_prompt_tokens=5,
        skip_reading_prefix_cache=True,
    )
    wire = pb.SamplingParams.FromString(sampling.to_proto(params).SerializeToString())
    assert sampling.from_proto(wire) == params


def test_zero_is_told_from_unset() -> None:
    assert sampling.set_fields(pb.SamplingParams(temperature=0.0, max_tokens=0)) == {
        "temperature": 0.0,
        "max_tokens": 0,
    }
    assert sampling.set_fields(pb.SamplingParams()) == {}


def test_top_k_minus_one_means_off() -> None:
    assert sampling.from_proto(pb.SamplingParams(top_k=-1)).top_k == 0


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.SamplingParams(n=2), "n"),
        (pb.SamplingParams(logprobs=0), "logprobs"),
        (pb.SamplingParams(prompt_logprobs=1), "prompt_logprobs"),
        (pb.SamplingParams(presence_penalty=0.5), "presence_penalty"),
        (pb.SamplingParams(frequency_penalty=-0.5), "frequency_penalty"),
        (pb.SamplingParams(repetition_penalty=1.5), "repetition_penalty"),
        (pb.SamplingParams(logit_bias={3: 1.0}), "logit_bias"),
        (pb.SamplingParams(allowed_token_ids=[1]), "allowed_token_ids"),
        (pb.SamplingParams(bad_words=["x"]), "bad_words"),
        (pb.SamplingParams(spaces_between_special_tokens=False), "spaces_between_special_tokens"),
        (pb.SamplingParams(structured_output={"json_object": True}), "structured_output"),
        (pb.SamplingParams(repetition_detection={"max_pattern_size": 3}), "repetition_detection"),
    ],
)
def test_a_field_of_a_later_feature_is_refused_by_name(message: pb.SamplingParams, field: str) -> None:
    with pytest.raises(Unimplemented) as error:
        sampling.set_fields(message)
    assert error.value.field == f"sampling_params.{field}"
    assert field in error.value.message


def test_zero_sequences_are_a_mistake_and_not_a_later_feature() -> None:
    with pytest.raises(InvalidArgument, match="sampling_params.n is 0"):
        sampling.set_fields(pb.SamplingParams(n=0))


def test_a_value_that_asks_for_nothing_is_not_refused() -> None:
    neutral = pb.SamplingParams(
        n=1, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, spaces_between_special_tokens=True
    )
    assert sampling.set_fields(neutral) == {}

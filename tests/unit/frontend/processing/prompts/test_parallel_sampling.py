"""One request as several sequences."""

from typing import Any

from penstock_common.types.request import EngineCoreRequest, RequestContext
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.processing.prompts import sampling_params


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

"""Fields for speculation in session messages arrive unchanged, in both directions."""

import pytest

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.types.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    SchedulerStats,
    SpecDecodingStats,
)
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.rpc import convert
from penstock_frontend.rpc import session_messages

DRAFTS = SpecDecodingStats(
    num_drafts=3, num_draft_tokens=9, num_accepted_tokens=4, num_accepted_tokens_per_pos=[2, 1, 1]
)


@pytest.mark.parametrize("limit", [None, 0, 7])
@pytest.mark.parametrize("prediction", [[], [5, 0, 5]])
def test_a_request_keeps_its_prediction_and_its_limit(limit: int | None, prediction: list[int]) -> None:
    params = SamplingParams(seed=1, num_speculative_tokens=limit)
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=[1], sampling_params=params, prediction_token_ids=prediction
    )
    sent = session_messages.add_request(request).SerializeToString()
    read = convert.request_from_proto(pb.SessionRequest.FromString(sent).add)
    assert (read.prediction_token_ids, read.sampling_params.num_speculative_tokens) == (prediction, limit)


@pytest.mark.parametrize("drafts", [None, DRAFTS, SpecDecodingStats()])
def test_an_output_and_the_load_keep_what_drafts_have_brought(drafts: SpecDecodingStats | None) -> None:
    output = EngineCoreOutput(
        request_id="r", new_token_ids=[1, 2, 3], finish_reason=FinishReason.STOP, spec_decoding_stats=drafts
    )
    sent = convert.outputs_to_proto(
        EngineCoreOutputs(outputs=[output], scheduler_stats=SchedulerStats(spec_decoding_stats=drafts))
    ).SerializeToString()
    read = session_messages.engine_core_outputs(pb.EngineCoreOutputs.FromString(sent))
    assert read.outputs == [output]
    assert read.scheduler_stats == SchedulerStats(spec_decoding_stats=drafts)


def test_an_engine_of_an_earlier_version_says_nothing_of_drafts() -> None:
    message = pb.EngineCoreOutputs(outputs=[pb.EngineCoreOutput(request_id="r", finish_reason=1)])
    message.scheduler_stats.num_running_reqs = 1
    read = session_messages.engine_core_outputs(message)
    assert read.outputs[0].spec_decoding_stats is None
    assert read.scheduler_stats is not None
    assert read.scheduler_stats.spec_decoding_stats is None

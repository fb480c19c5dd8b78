"""A request from the frontend's struct over the wire to the engine's: every field arrives as it was."""

import msgspec
import pytest

from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.rpc.convert import request_from_proto
from penstock_frontend.rpc.convert import add_request

PLAIN = EngineCoreRequest(request_id="r", prompt_token_ids=[1, 2], sampling_params=SamplingParams(seed=3))


def over_the_wire(request: EngineCoreRequest) -> EngineCoreRequest:
    message = add_request(request).add
    return request_from_proto(type(message).FromString(message.SerializeToString()))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tenant": "t"},
        {"tenant": "großkunde", "tenant_weight": 2.5},
        {"tenant_weight": 0.001},
        {"deadline": 1234.5},
        {"priority": -7, "arrival_time": 12.5, "cache_salt": "s", "external_request_id": "e"},
        {"attempt": 3, "prior_output_token_ids": [4, 5]},
        {"trace_context": {"traceparent": "00-a-b-01"}},
    ],
    ids=str,
)
def test_fields_arrive_as_they_were(fields: dict[str, object]) -> None:
    request = msgspec.structs.replace(PLAIN, **fields)
    assert over_the_wire(request) == request


def test_a_weight_that_is_not_sent_is_one() -> None:
    message = add_request(PLAIN).add
    assert not message.HasField("tenant_weight")
    assert request_from_proto(message).tenant_weight == 1.0

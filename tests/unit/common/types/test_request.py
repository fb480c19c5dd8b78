"""A request from the frontend's struct over the wire to the engine's: every field arrives as it was."""

import msgspec
import pytest

from penstock_common.errors import InvalidArgument
from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.kv_transfer import KvParams
from penstock_common.types.request import EngineCoreRequest, ReasoningTokens, RequestContext
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.rpc.convert import request_from_proto
from penstock_frontend.rpc.session_messages import add_request

PLAIN = EngineCoreRequest(request_id="r", prompt_token_ids=[1, 2], sampling_params=SamplingParams(seed=3))
STAYS = ("model", "lora", "data_parallel_rank")
"""Fields of the context that the frontend has used up when it sends a request."""
CONTEXT: dict[str, object] = {
    "external_request_id": "e",
    "priority": -7,
    "tenant": "großkunde",
    "tenant_weight": 2.5,
    "cache_salt": "s",
    "arrival_time": 12.5,
    "deadline": 1234.5,
    "kv": KvParams(lease=True, params='{"a": 1}'),
    "trace_context": {"traceparent": "00-a-b-01"},
}


def over_the_wire(request: EngineCoreRequest) -> EngineCoreRequest:
    message = add_request(request).add
    return request_from_proto(type(message).FromString(message.SerializeToString()))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attempt": 3, "prior_output_token_ids": [4, 5]},
        {"reasoning_parser_kwargs": ReasoningTokens(7, 8)},
        {"reasoning_parser_kwargs": ReasoningTokens(7, 8), "reasoning_ended": False},
        {"reasoning_parser_kwargs": ReasoningTokens(7, 8), "reasoning_ended": True},
    ],
    ids=str,
)
def test_fields_arrive_as_they_were(fields: dict[str, object]) -> None:
    request = msgspec.structs.replace(PLAIN, **fields)
    assert over_the_wire(request) == request


@pytest.mark.parametrize("name", [name for name in RequestContext.__struct_fields__ if name not in STAYS])
def test_each_field_of_the_context_arrives_as_it_was(name: str) -> None:
    context = RequestContext(**{name: CONTEXT[name]})  # type: ignore[arg-type]
    assert context != RequestContext()
    assert over_the_wire(msgspec.structs.replace(PLAIN, context=context)).context == context


def test_the_whole_context_arrives_as_it_was() -> None:
    context = RequestContext(**CONTEXT)  # type: ignore[arg-type]
    assert over_the_wire(msgspec.structs.replace(PLAIN, context=context)).context == context


def test_an_adapter_is_sent_with_its_path_and_content() -> None:
    message = add_request(msgspec.structs.replace(PLAIN, lora=LoraAdapter("n", "/p", b"d" * 16))).add
    assert (message.lora.name, message.lora.path, message.lora.digest) == ("n", "/p", b"d" * 16)
    assert not add_request(PLAIN).add.HasField("lora")


@pytest.mark.parametrize("weight", [0.001, 2.5])
def test_weights_arrive_as_they_were(weight: float) -> None:
    context = RequestContext(tenant="t", tenant_weight=weight)
    assert over_the_wire(msgspec.structs.replace(PLAIN, context=context)).context == context


def test_a_weight_that_is_not_sent_is_one() -> None:
    message = add_request(PLAIN).add
    assert not message.HasField("tenant_weight")
    assert request_from_proto(message).context.tenant_weight == 1.0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "truncated"),
        ('{"begin_token_id": 7}', "missing required field `end_token_id`"),
        ('{"begin_token_id": 7, "end_token_id": "8"}', "Expected `int`"),
        ('{"begin_token_id": 7, "end_token_id": 8, "x": 1}', "unknown field `x`"),
    ],
)
def test_a_reasoning_that_cannot_be_read_is_refused_by_name(text: str, why: str) -> None:
    message = add_request(PLAIN).add
    message.reasoning_parser_kwargs = text
    with pytest.raises(InvalidArgument, match=why) as error:
        request_from_proto(message)
    assert error.value.field == "reasoning_parser_kwargs"

"""Every sampling parameter is known in all places that need it.

The places are contract, struct, messages, engine, workers, handover, LLM, HTTP and docs.
"""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.common.v1 import sampling_pb2
from penstock_common.rpc import request as wire
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import OutputKind, RepetitionDetection, SamplingParams, StructuredOutput
from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.rpc.convert import request_from_proto
from penstock_enginecore.worker.messages import Execute, decode_call, encode, execute
from penstock_frontend.api.openai import sampling_fields
from penstock_frontend.api.openai.chat_completions import ChatCompletionRequest
from penstock_frontend.api.openai.completions import CompletionRequest
from penstock_frontend.api.openai.responses.response import ResponseBody
from penstock_frontend.dispatch.journal import Call, JournalEntry
from penstock_frontend.rpc.session_messages import add_request
from penstock_local.llm.inputs import sampling_of

ROOT = Path(__file__).resolve().parents[2]
FIELDS = SamplingParams.__struct_fields__
VALUES: dict[str, Any] = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_k": 7,
    "min_p": 0.125,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "seed": -5,
    "max_tokens": 9,
    "min_tokens": 2,
    "stop": ("a", "b"),
    "stop_token_ids": (3, 4),
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "logit_bias": {3: 1.5},
    "allowed_token_ids": (1, 2),
    "bad_words": ("x",),
    "detokenize": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "output_kind": OutputKind.FINAL,
    "stream_interval": 3,
    "structured_output": StructuredOutput(regex="a"),
    "repetition_detection": RepetitionDetection(max_pattern_size=5),
    "truncate_prompt_tokens": 5,
    "skip_reading_prefix_cache": True,
    "bad_word_token_ids": ((1,), (2, 3)),
    "num_speculative_tokens": 4,
    "thinking_token_budget": 6,
    "logprob_token_ids": (5, 3),
}
"""A value for each parameter that differs from the default. Add a new parameter here first."""
NOT_OVER_HTTP = {
    "detokenize": "answers over HTTP are texts",
    "output_kind": "stream says it",
    "skip_reading_prefix_cache": "a knob for measurements; cache_salt keeps callers apart",
    "bad_word_token_ids": "the frontend makes them of bad_words",
}
"""Parameters without a field in OpenAI's request bodies, with the reason."""
OTHERWISE: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "structured_output": {"structured_outputs": {"regex": "a"}},
}
"""HTTP fields of parameters whose form differs over HTTP."""
OVER_HTTP = [name for name in FIELDS if name not in NOT_OVER_HTTP]


def params_with(name: str) -> SamplingParams:
    return SamplingParams(**{name: VALUES[name]})


def request_with(name: str) -> EngineCoreRequest:
    return EngineCoreRequest(request_id="r", prompt_token_ids=[1, 2], sampling_params=params_with(name))


def test_contract_struct_docstring_and_this_test_have_the_same_parameters() -> None:
    documented = set(re.findall(r"^ {8}(\w+): ", SamplingParams.__doc__ or "", re.MULTILINE))
    for known in (VALUES.keys(), {field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields}, documented):
        assert set(known) == set(FIELDS)
    assert NOT_OVER_HTTP.keys() | OTHERWISE.keys() <= set(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_a_parameter_survives_the_wire(name: str) -> None:
    assert getattr(SamplingParams(), name) != VALUES[name], "it is the default"
    message = sampling_pb2.SamplingParams.FromString(wire.to_proto(params_with(name)).SerializeToString())
    assert wire.from_proto(message) == params_with(name)


@pytest.mark.parametrize("name", FIELDS)
def test_a_parameter_reaches_the_engine_and_its_workers(name: str) -> None:
    message = add_request(request_with(name)).add
    received = request_from_proto(type(message).FromString(message.SerializeToString()))
    assert received.sampling_params == params_with(name)
    step = SchedulerOutput()
    step.add_new(Request(received, client_id="c", max_model_len=64), 2, ([1],))
    call = decode_call(encode(execute(step)))
    assert isinstance(call, Execute)
    assert call.step.new_requests[0].sampling_params == params_with(name)


@pytest.mark.parametrize("name", FIELDS)
def test_an_engine_that_a_request_moves_to_gets_the_parameter(name: str) -> None:
    assert JournalEntry(request_with(name), Call()).to_send().sampling_params == params_with(name)


# LLM has no output_kind, because its answers are complete.
@pytest.mark.parametrize("name", [name for name in FIELDS if name != "output_kind"])
def test_an_llm_takes_the_parameter(name: str) -> None:
    fields = next(sampling_of({name: VALUES[name]}, 1))
    assert isinstance(fields, dict)
    assert fields[name] == VALUES[name]


def body_of(kind: type[sampling_fields.SamplingFields], name: str) -> sampling_fields.SamplingFields:
    given = OTHERWISE.get(name, {name: msgspec.to_builtins(VALUES[name])})
    text = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x", **given}
    return msgspec.json.decode(json.dumps(text, default=str).encode(), type=kind)


@pytest.mark.parametrize("name", OVER_HTTP)
@pytest.mark.parametrize(
    "kind", [ChatCompletionRequest, ResponseBody, CompletionRequest], ids=lambda kind: kind.__name__
)
def test_a_parameter_has_a_field_in_openais_bodies(kind: type[sampling_fields.SamplingFields], name: str) -> None:
    if name == "logprobs":
        assert "logprobs" in ChatCompletionRequest.__struct_fields__
        assert "top_logprobs" in ResponseBody.__struct_fields__
        return
    assert sampling_fields.values(body_of(kind, name))[name] == VALUES[name]


@pytest.mark.parametrize("name", OVER_HTTP)
def test_a_parameter_is_in_the_docs(name: str) -> None:
    page = (ROOT / "docs/reference/openai-api.md").read_text()
    assert all(re.search(rf"`{field}\b", page) for field in OTHERWISE.get(name, {name: None}))

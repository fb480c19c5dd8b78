"""Fields of other servers' APIs on every route.

Each field is supported, refused by name, or listed as ignored because ignoring the field breaks no constraint.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_frontend.api.anthropic.protocol import MessagesBody
from penstock_frontend.api.ignored_fields import ignored_in
from penstock_frontend.api.openai.chat_completions import ChatCompletionRequest
from penstock_frontend.api.openai.completions import CompletionRequest
from penstock_frontend.api.openai.responses.response import ResponseBody
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.frontends.unusual_fields import COMMON, GRAMMAR, SCHEMA, UNUSUAL, UnusualField
from tests.fakes.models.chat_templates import save_chat_model
from tests.fakes.models.small_tokenizers import byte_level

pytestmark = pytest.mark.asyncio(loop_scope="module")

HI: Any = {"role": "user", "content": "hi"}
CHAT, COMPLETIONS, RESPONSES, MESSAGES = ROUTES = tuple(UNUSUAL)
STRUCTS: dict[str, type[msgspec.Struct]] = {
    CHAT: ChatCompletionRequest,
    COMPLETIONS: CompletionRequest,
    RESPONSES: ResponseBody,
    MESSAGES: MessagesBody,
}
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HI], "seed": 7},
    COMPLETIONS: {"prompt": "x", "seed": 7},
    RESPONSES: {"input": "hi", "seed": 7},
    MESSAGES: {"messages": [HI], "max_tokens": 4, "seed": 7},
}
SERVED, REFUSED, IGNORED = "served", "refused", "ignored"


class Api:
    """A frontend with an engine that records its requests."""

    def __init__(self, server: OpenAIServer, asked: list[pb.EngineCoreRequest]) -> None:
        self._server = server
        self._asked = asked

    async def post(self, route: str, **fields: Any) -> tuple[int, Any]:
        response = await self._server.http.post(route, json={**BASES[route], **fields})
        return response.status_code, response.json()

    async def post_raw(self, route: str, body: bytes) -> httpx.Response:
        return await self._server.http.post(route, content=body)

    async def asked(self, route: str, **fields: Any) -> bytes:
        """Send a request. Returns the prompt and the parameters that the engine got."""
        status, answer = await self.post(route, **fields)
        assert status == 200, answer
        request = self._asked[-1]
        return repr(list(request.prompt_token_ids)).encode() + request.sampling_params.SerializeToString(
            deterministic=True
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    path: Path = save_chat_model(tmp_path_factory.mktemp("models") / "chatml")
    asked: list[pb.EngineCoreRequest] = []

    def keep(request: pb.EngineCoreRequest) -> None:
        asked.append(request)

    engine = FakeEngine(vocab_size=byte_level().get_vocab_size(), max_model_len=2048)
    engine.script = keep
    async with engine, openai_server(path, engines=[engine.address]) as server:
        yield Api(server, asked)


def verdict(route: str, field: UnusualField, status: int, answer: Any) -> str:
    struct = STRUCTS[route]
    if status == 400:
        assert answer["error"]["message"].startswith(field.name)
        return REFUSED
    assert status == 200, answer
    if field.name in {each.encode_name for each in msgspec.structs.fields(struct)}:
        return SERVED
    assert field.name in ignored_in(struct.__name__), f"{field.name} is dropped"
    return IGNORED


@pytest.mark.parametrize(
    ("route", "field"),
    [(route, field) for route, fields in UNUSUAL.items() for field in fields],
    ids=lambda value: value.name if isinstance(value, UnusualField) else value,
)
async def test_a_field_is_served_refused_or_listed(api: Api, route: str, field: UnusualField) -> None:
    found = verdict(route, field, *await api.post(route, **{field.name: field.value}))
    assert (found == IGNORED) is not field.constrains


async def test_there_are_121_fields_for_each_route() -> None:
    assert [len({field.name for field in fields}) for fields in UNUSUAL.values()] == [121] * 4


async def test_common_fields_are_treated_alike_on_every_route(api: Api) -> None:
    for field in COMMON:
        found = {route: verdict(route, field, *await api.post(route, **{field.name: field.value})) for route in ROUTES}
        assert len(set(found.values())) == 1, (field.name, found)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"max_new_tokens": 3}, {"max_tokens": 3}),
        ({"max_completion_tokens": 3}, {"max_tokens": 3}),
        ({"n_predict": 3}, {"max_tokens": 3}),
        ({"num_predict": 3}, {"max_tokens": 3}),
        ({"n_predict": -1}, {}),
        ({"num_predict": -2}, {}),
        ({"max_output_tokens": 3}, {"max_tokens": 3}),
        ({"min_new_tokens": 2}, {"min_tokens": 2}),
        ({"stop_sequences": ["x"]}, {"stop": ["x"]}),
        ({"random_seed": 7}, {"seed": 7}),
        ({"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
        ({"guided_json": json.dumps(SCHEMA)}, {"structured_outputs": {"json": json.dumps(SCHEMA)}}),
        ({"guided_regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ({"guided_grammar": GRAMMAR}, {"structured_outputs": {"grammar": GRAMMAR}}),
        ({"grammar": GRAMMAR}, {"structured_outputs": {"grammar": GRAMMAR}}),
        ({"grammar": {"type": "regex", "value": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
        ({"ebnf": GRAMMAR}, {"structured_outputs": {"grammar": GRAMMAR}}),
        ({"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"json_schema": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
        ({"format": "json"}, {"structured_outputs": {"json_object": True}}),
        ({"format": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
        ({"format": "", "grammar": "", "ebnf": ""}, {}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"structured_outputs": {"json": SCHEMA}}),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"structured_outputs": {"json": SCHEMA}}),
        ({"response_format": {"type": "json", "value": SCHEMA}}, {"structured_outputs": {"json": SCHEMA}}),
        (
            {"response_format": {"type": "json_schema", "value": {"name": "a", "schema": SCHEMA}}},
            {"structured_outputs": {"json": SCHEMA}},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            {"structured_outputs": {"json": SCHEMA}},
        ),
        ({"response_format": {"type": "regex", "value": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
        ({"response_format": {"type": "grammar", "grammar": GRAMMAR}}, {"structured_outputs": {"grammar": GRAMMAR}}),
        ({"response_format": {"type": "text"}}, {}),
        (
            {"guided_json": SCHEMA, "structured_outputs": {"json_whitespace": "compact"}},
            {"structured_outputs": {"json": SCHEMA, "json_whitespace": "compact"}},
        ),
    ],
    ids=str,
)
async def test_another_name_asks_the_engine_for_the_same(
    api: Api, route: str, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    if route == MESSAGES and "max_completion_tokens" in theirs:
        theirs = {**theirs, "max_tokens": 100}  # the tested field overrides max_tokens
    elif route == MESSAGES and "max_tokens" in ours:  # /v1/messages requires max_tokens
        status, answer = await api.post(route, **theirs)
        assert (status, "they are two names of the same" in answer["error"]["message"]) == (400, True)
        theirs = {**theirs, **ours}
    assert await api.asked(route, **theirs) == await api.asked(route, **ours)


NEUTRAL: dict[str, Any] = {
    "mirostat": 0,
    "typical_p": 1,
    "top_a": 0,
    "dry_multiplier": 0.0,
    "xtc_probability": 0,
    "repeat_penalty": 1.0,
    "dynatemp_range": 0,
    "samplers": [],
    "do_sample": True,
    "num_beams": 1,
    "length_penalty": 1.0,
    "functions": [],
    "options": {"num_ctx": 4096, "num_gpu": 1},
    "extra_body": {},
    "parse_tool_calls": True,
    "reasoning_budget": -1,
}


@pytest.mark.parametrize("route", ROUTES)
async def test_values_that_ask_for_nothing_change_nothing(api: Api, route: str) -> None:
    assert await api.asked(route, **NEUTRAL) == await api.asked(route)


@pytest.mark.parametrize(
    ("route", "fields", "message"),
    [
        (
            CHAT,
            {"repeat_penalty": 1.1},
            "repeat_penalty is not supported; use repetition_penalty, which counts all tokens",
        ),
        (CHAT, {"mirostat": True}, "mirostat is not supported; use temperature and top_p"),
        (CHAT, {"do_sample": 1}, "do_sample is not supported; use temperature 0"),
        (
            CHAT,
            {"options": {"num_ctx": 5, "top_k": 1}},
            "options is not supported; use its members as fields of the body",
        ),
        (CHAT, {"think": False}, "think is not supported; use chat_template_kwargs.enable_thinking"),
        (
            CHAT,
            {"messages": [HI, {**HI, "prefix": True}]},
            "messages[1].prefix is not supported; use continue_final_message",
        ),
        *(
            (
                route,
                {"structured_output": {"json_schema": "{}"}},
                "structured_output is not supported; use response_format or structured_outputs, in which the field "
                "json_schema has the name json",
            )
            for route in ROUTES
        ),
        (CHAT, {"choice": ["a"]}, "choice is not supported; use structured_outputs.choice"),
        (RESPONSES, {"json_object": True}, "json_object is not supported; use structured_outputs.json_object"),
        (
            MESSAGES,
            {"json_whitespace": "any"},
            "json_whitespace is not supported; use structured_outputs.json_whitespace",
        ),
        (CHAT, {"messages": [{**HI, "parts": [{"text": "a"}]}]}, "messages[0].parts is not supported; use content"),
        (
            MESSAGES,
            {"tools": [{"name": "f", "parameters": SCHEMA}]},
            "tools[0].parameters is not supported; use input_schema",
        ),
        (
            CHAT,
            {"tools": [{"type": "function", "function": {"name": "f", "input_schema": SCHEMA}}]},
            "tools[0].function.input_schema is not supported; use parameters",
        ),
        (CHAT, {"detokenize": False}, "detokenize is not supported; leave it out"),
        (COMPLETIONS, {"output_kind": "OUTPUT_KIND_FINAL"}, "output_kind is not supported; use stream"),
        (COMPLETIONS, {"routing": {"priority": 1}}, "routing is not supported; use the headers x-penstock-priority, "),
        (CHAT, {"structured_outputs": {"foo": 1}}, "structured_outputs.foo is not a known field; remove it"),
        (CHAT, {"response_format": {"type": "json_object", "foo": 1}}, "response_format.foo is not a known field"),
        (CHAT, {"response_format": {"type": "regex"}}, "response_format.pattern is not set"),
        (CHAT, {"response_format": {"type": "text", "schema": {}}}, "response_format.schema is set, but"),
        (
            CHAT,
            {"response_format": {"type": "regex", "pattern": "a", "value": "b"}},
            "response_format.value and response_format.pattern are both set; set only one of them",
        ),
        (CHAT, {"format": "xml"}, "format is 'xml'; it must be 'json' or a JSON schema"),
        (CHAT, {"n_predict": 0}, "n_predict is 0; it must be at least 1"),
        (COMPLETIONS, {"n_predict": 3, "min_tokens": 5}, "min_tokens is 5; it must be at most n_predict, which is 3"),
        (
            COMPLETIONS,
            {"grammar": GRAMMAR, "regex": "a"},
            "grammar and regex both constrain the output; set only one of them",
        ),
        (COMPLETIONS, {"stop_sequences": [""]}, "stop_sequences[0] is empty"),
        (MESSAGES, {"stop": [""]}, "stop[0] is empty"),
        (MESSAGES, {"stop_sequences": [""]}, "stop_sequences[0] is empty"),
        (
            MESSAGES,
            {"regex": "a", "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            "regex: output_",
        ),
    ],
    ids=str,
)
async def test_a_refusal_names_the_field_and_the_remedy(
    api: Api, route: str, fields: dict[str, Any], message: str
) -> None:
    status, answer = await api.post(route, **fields)
    assert status == 400
    assert answer["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    "field",
    [
        b'"plugins":"\xff"',
        b'"\xff":1',
        b'"grammar":"\xff"',
        b'"guided_json":"\xff"',
        b'"response_format":{"type":"\xff"}',
        b'"response_format":{"type":"json_schema","value":"\xff"}',
        b'"options":{"\xff":1}',
        b'"options":{"a":"\xff"}',
    ],
    ids=str,
)
async def test_values_that_are_no_text_are_refused(api: Api, field: bytes) -> None:
    for body in (b'{"prompt":"x",%b}', b"{%b}"):
        response = await api.post_raw(COMPLETIONS, body % field)
        assert response.status_code == 400, response.text


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        (RESPONSES, {"inputs": "hi"}, "input is not set; the body has 'inputs': did you mean 'input'?"),
        (CHAT, {"message": [HI]}, "messages is not set; the body has 'message': did you mean 'messages'?"),
        (COMPLETIONS, {"q": "hi"}, "prompt is not set"),
    ],
)
async def test_a_missing_field_is_told_with_the_field_that_may_be_meant(
    api: Api, route: str, body: dict[str, Any], message: str
) -> None:
    response = await api.post_raw(route, json.dumps(body).encode())
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)

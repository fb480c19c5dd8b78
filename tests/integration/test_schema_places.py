"""The error for a refused schema has the schema's path in the client's request, on every route with schemas."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from penstock.common.v1 import finish_pb2
from penstock.enginecore.v1 import messages_pb2 as pb
from penstock_common.errors import InvalidArgument
from penstock_common.rpc import request
from penstock_enginecore.structured_output.constraints.source import check_constraint
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.small_tokenizers import byte_level

HI: Any = {"role": "user", "content": "hi"}
FINE: Any = {"type": "object", "properties": {"a": {"type": "boolean"}}}
WRONG: Any = {
    "type": "object",
    "properties": {"to": {"$ref": "#/$defs/place"}},
    "$defs": {"place": {"type": "array", "items": {"type": "string", "pattern": r"\bx"}}},
}
WHY = "#/$defs/place/items/pattern cannot be enforced: a word boundary, which is not supported, at position 0"


class CheckingEngine(FakeEngine):
    """Refuses the same schemas as a real engine, with the same messages."""

    def _add(self, message: pb.EngineCoreRequest, session: Any) -> None:
        constraint = request.from_proto(message.sampling_params).structured_output
        self.refusal = None
        try:
            if constraint is not None:
                check_constraint(constraint, self.most_bytes)
        except InvalidArgument as e:
            self.refusal = finish_pb2.RequestError(code=e.code, message=e.message, field=e.field, reason=e.reason)
        super()._add(message, session)

    most_bytes = 1 << 18


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[CheckingEngine]:
    async with CheckingEngine(vocab_size=byte_level().get_vocab_size(), max_model_len=4096) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(engine: CheckingEngine, chatml: Path) -> AsyncIterator[OpenAIServer]:
    async with openai_server(chatml, engines=[engine.address]) as server:
        yield server


def functions(*schemas: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": s}} for i, s in enumerate(schemas)]


def flat(*schemas: Any) -> list[Any]:
    return [{"type": "function", "name": f"f{i}", "parameters": s} for i, s in enumerate(schemas)]


def inputs(*schemas: Any) -> list[Any]:
    return [{"name": f"f{i}", "input_schema": s} for i, s in enumerate(schemas)]


TAG = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": WRONG}, "end": "</a>"}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": WRONG}}},
            "response_format.json_schema.schema",
        ),
        (CHAT, {"structured_outputs": {"json": WRONG}}, "structured_outputs.json"),
        (CHAT, {"tools": functions(FINE, WRONG), "tool_choice": "required"}, "tools[1].function.parameters"),
        (
            CHAT,
            {
                "tools": functions(FINE, FINE, FINE, WRONG),
                "tool_choice": {"type": "function", "function": {"name": "f3"}},
            },
            "tools[3].function.parameters",
        ),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": WRONG}}}, "text.format.schema"),
        (RESPONSES, {"tools": flat(FINE, FINE, WRONG), "tool_choice": "required"}, "tools[2].parameters"),
        (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": WRONG}}},
            "output_config.format.schema",
        ),
        (MESSAGES, {"tools": inputs(FINE, WRONG), "tool_choice": {"type": "any"}}, "tools[1].input_schema"),
        (
            MESSAGES,
            {"tools": inputs(FINE, WRONG), "tool_choice": {"type": "tool", "name": "f1"}},
            "tools[1].input_schema",
        ),
    ],
)
async def test_the_place_is_the_clients(api: OpenAIServer, route: str, body: Any, field: str, stream: bool) -> None:
    asked = {"input": "hi"} if route == RESPONSES else {"messages": [HI]}
    asked |= {"model": "model", "max_tokens": 5} if route == MESSAGES else {}
    response = await api.http.post(route, json={**asked, "stream": stream, **body})
    error = response.json()["error"]
    assert (response.status_code, error["message"]) == (400, f"{field}: {WHY}")
    assert error.get("param", field) == field


@pytest.mark.asyncio(loop_scope="module")
async def test_the_place_in_a_tag_of_the_clients_own_is_one_pointer(api: OpenAIServer) -> None:
    body = {"messages": [HI], "response_format": {"type": "structural_tag", "format": TAG}}
    error = (await api.http.post(CHAT, json=body)).json()["error"]
    assert error["message"] == f"response_format: #/format/content/json_schema{WHY[1:]}"
    assert error["param"] == "response_format"


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_wrong_with_all_tools_together_is_said_of_the_tools(
    api: OpenAIServer, engine: CheckingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "most_bytes", 100)
    body = {"messages": [HI], "tools": functions(FINE, FINE), "tool_choice": "required"}
    error = (await api.http.post(CHAT, json=body)).json()["error"]
    assert error["param"] == "tools"
    assert error["message"].startswith("tools has ")
    assert error["message"].endswith("bytes; the limit is 100")

"""Tools and conversation histories of coding agents, over HTTP and gRPC.

The frontend leaves out unsupported tools and items, with a warning.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from penstock.inference.v1 import messages_pb2 as pb
from penstock.inference.v1 import service_pb2_grpc
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.models.small_tokenizers import EOS, byte_level, ids_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENIZER = byte_level()
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
TOOLS: dict[str, Any] = {
    CHAT: {"type": "function", "function": FUNCTION},
    RESPONSES: {"type": "function", **FUNCTION},
    MESSAGES: {"name": "weather", "input_schema": SCHEMA},
}
LEFT_OUT: dict[str, list[dict[str, Any]]] = {
    CHAT: [{"type": "web_search", "web_search": {"x": 1}}, {"type": "mcp", "server_label": "x"}],
    RESPONSES: [
        {"type": "web_search", "external_web_access": False},
        {"type": "web_search_preview"},
        {"type": "file_search", "vector_store_ids": ["v"]},
        {"type": "computer_use_preview", "display_width": 1},
        {"type": "image_generation", "output_format": "png"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "local_shell"},
        {"type": "shell"},
        {"type": "apply_patch"},
        {"type": "tool_search"},
        {"type": "mcp", "server_label": "x"},
    ],
    MESSAGES: [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search"},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
    ],
}
CASES = [(route, tool) for route, tools in LEFT_OUT.items() for tool in tools]
INPUT = 'a "b"\n\\ ü 🙂'
PATCH = f"<tool_call>\n{json.dumps({'name': 'patch', 'arguments': {'input': INPUT}})}\n</tool_call>"
CUSTOM = {"name": "patch", "description": "Changes files."}


class Served:
    """A server and its engine."""

    def __init__(self, api: OpenAIServer, engine: FakeEngine) -> None:
        self.api = api
        self.engine = engine

    def says(self, text: str) -> None:
        self.engine.script = lambda _: ids_of(text + EOS)

    @property
    def prompt(self) -> str:
        return TOKENIZER.decode(self.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)

    async def post(self, route: str, **body: Any) -> tuple[Any, str]:
        """Post a body, check that the status is 200, and return the answer and its warnings."""
        response = await self.api.http.post(route, json=body_of(route, **body))
        assert response.status_code == 200, response.text
        return response.json(), response.headers.get("penstock-warning", "")

    async def events(self, route: str, **body: Any) -> list[Any]:
        response = await self.api.http.post(route, json=body_of(route, **body, stream=True))
        assert response.status_code == 200, response.text
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    async def refused(self, route: str, **body: Any) -> str:
        response = await self.api.http.post(route, json=body_of(route, **body))
        assert response.status_code == 400, response.text
        message: str = response.json()["error"]["message"]
        return message


def body_of(route: str, **body: Any) -> dict[str, Any]:
    turn = [{"role": "user", "content": "hi"}]
    if route == RESPONSES:
        return {"input": turn, "store": False, "max_output_tokens": 1000, **body}
    return {"messages": turn, "max_tokens": 1000, **body}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(chatml: Path) -> AsyncIterator[Served]:
    async with FakeEngine(vocab_size=TOKENIZER.get_vocab_size(), max_model_len=8192) as engine:
        [engine.eos_token_id] = ids_of(EOS)
        # Unknown fields are refused, so this shows that the frontend does not check the fields of left-out tools.
        async with openai_server(chatml, engines=[engine.address], http={"unknown_fields": "refuse"}) as api:
            served = Served(api, engine)
            served.says("Hello!")
            yield served


@pytest.mark.parametrize(("route", "tool"), CASES, ids=lambda value: value if isinstance(value, str) else value["type"])
async def test_a_tool_that_this_server_does_not_run_is_left_out_with_a_warning(
    served: Served, route: str, tool: Any
) -> None:
    served.says("Hello!")
    _, warnings = await served.post(route, tools=[TOOLS[route], tool])
    expected = f"tool_left_out: tools[1] is of type '{tool['type']}', which this server does not run, and is left out"
    assert warnings == expected
    with_tool = served.prompt
    await served.post(route, tools=[TOOLS[route]])
    assert served.prompt == with_tool


@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
async def test_a_request_whose_tools_are_all_left_out_is_answered(served: Served, route: str) -> None:
    served.says("<tool_call> is text here")
    answer, _ = await served.post(route, tools=LEFT_OUT[route][:1])
    assert "<tool_call> is text here" in json.dumps(answer)


@pytest.mark.parametrize(
    ("route", "choice"),
    [
        (RESPONSES, {"type": "web_search"}),
        (RESPONSES, "required"),
        (CHAT, "required"),
        (MESSAGES, {"type": "tool", "name": "web_search"}),
        (MESSAGES, {"type": "any"}),
    ],
    ids=str,
)
async def test_a_choice_of_a_tool_that_is_left_out_is_refused(served: Served, route: str, choice: Any) -> None:
    message = await served.refused(route, tools=LEFT_OUT[route][:1], tool_choice=choice)
    assert message.startswith("tool_choice")
    assert f"tools[0], whose type is '{LEFT_OUT[route][0]['type']}'" in message or "tools[0] is of type" in message


async def test_a_custom_tool_of_a_chat_is_called_with_a_text(served: Served) -> None:
    served.says(PATCH)
    tools = [{"type": "custom", "custom": CUSTOM}]
    answer, warnings = await served.post(CHAT, tools=tools)
    [choice] = answer["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (call["type"], call["custom"], choice["finish_reason"]) == (
        "custom",
        {"name": "patch", "input": INPUT},
        "tool_calls",
    )
    assert warnings == ""
    pieces = [
        piece
        for event in await served.events(CHAT, tools=tools)
        for piece in event["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert (pieces[0]["type"], pieces[0]["custom"]["name"]) == ("custom", "patch")
    assert "".join(piece["custom"]["input"] for piece in pieces) == INPUT
    assert len(pieces) > 2
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    _, warnings = await served.post(CHAT, tools=tools, messages=[{"role": "user", "content": "x"}, message, result])
    assert json.dumps({"input": INPUT}, ensure_ascii=False) in served.prompt
    assert warnings == ""


async def test_a_custom_tool_of_a_response_is_called_with_a_text(served: Served) -> None:
    served.says(PATCH)
    tools = [{"type": "custom", **CUSTOM}]
    answer, _ = await served.post(RESPONSES, tools=tools)
    [item] = answer["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", INPUT)
    assert item["id"].startswith("ctc_")
    events = await served.events(RESPONSES, tools=tools)
    deltas = [event for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(event["delta"] for event in deltas) == INPUT
    [done] = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == INPUT
    assert not [event for event in events if "function_call" in event["type"]]
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    _, warnings = await served.post(RESPONSES, tools=tools, input=[{"role": "user", "content": "x"}, item, output])
    assert json.dumps({"input": INPUT}, ensure_ascii=False) in served.prompt
    assert "<tool_response>\ndone" in served.prompt
    assert warnings == ""


async def test_a_kept_response_with_a_custom_call_is_gone_on_with(served: Served) -> None:
    served.says(PATCH)
    tools = [{"type": "custom", **CUSTOM}]
    first, _ = await served.post(RESPONSES, tools=tools, store=True)
    output = {"type": "custom_tool_call_output", "call_id": first["output"][0]["call_id"], "output": "done"}
    _, warnings = await served.post(RESPONSES, tools=tools, input=[output], previous_response_id=first["id"])
    assert json.dumps({"input": INPUT}, ensure_ascii=False) in served.prompt
    assert warnings == ""


@pytest.mark.parametrize("syntax", ["lark", "regex"])
async def test_a_grammar_that_constrains_no_call_is_shown_to_the_model(served: Served, syntax: str) -> None:
    served.says("Hello!")
    format_ = {"type": "grammar", "syntax": syntax, "definition": "[a-z]+x"}
    _, warnings = await served.post(RESPONSES, tools=[{"type": "custom", **CUSTOM, "format": format_}])
    assert warnings.startswith(f"tool_format_not_enforced: tools[0].format is a {syntax} grammar")
    assert "[a-z]+x" in served.prompt
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": "[a-z]+x"}}
    _, warnings = await served.post(CHAT, tools=[{"type": "custom", "custom": {**CUSTOM, "format": grammar}}])
    assert warnings.startswith(f"tool_format_not_enforced: tools[0].custom.format is a {syntax} grammar")


async def test_a_regular_expression_of_a_call_that_must_be_made_is_enforced(served: Served) -> None:
    served.says("Hello!")
    format_ = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+x"}
    choice = {"type": "custom", "name": "patch"}
    _, warnings = await served.post(
        RESPONSES, tools=[{"type": "custom", **CUSTOM, "format": format_}], tool_choice=choice
    )
    tag = served.engine.requests[-1].sampling_params.structured_output.structural_tag
    assert "^(?:[a-z]+x)$" in tag
    assert warnings == ""


async def test_functions_in_a_namespace_are_called_by_their_names_and_the_namespace(served: Served) -> None:
    served.says('<tool_call>\n{"name": "mcp__x__weather", "arguments": {"city": "Bonn"}}\n</tool_call>')
    tools = [{"type": "namespace", "name": "mcp__x", "description": "d", "tools": [TOOLS[RESPONSES]]}]
    answer, warnings = await served.post(RESPONSES, tools=tools)
    [item] = answer["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "mcp__x", "weather")
    assert '"name": "mcp__x__weather"' in served.prompt
    assert warnings == ""
    events = await served.events(RESPONSES, tools=tools)
    [added] = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert (added["namespace"], added["name"]) == ("mcp__x", "weather")
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "rain"}
    await served.post(RESPONSES, tools=tools, input=[{"role": "user", "content": "x"}, item, output])
    assert '<tool_call>\n{"name": "mcp__x__weather", "arguments": {"city": "Bonn"}}' in served.prompt


PNG = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
CALLED = {"type": "function_call", "name": "weather", "arguments": "{}", "call_id": "c1"}
HISTORIES: list[tuple[list[Any], str, str]] = [
    (
        [
            {"type": "local_shell_call", "call_id": "c1", "status": "completed", "action": {"command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "c1", "output": "README"},
        ],
        '{"name": "local_shell", "arguments": {"command":["ls"]}}',
        "",
    ),
    (
        [
            {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "c1", "output": [{"stdout": "README", "stderr": ""}]},
        ],
        '<tool_response>\n[{"stdout":',
        "",
    ),
    (
        [{"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "x"}}],
        '[web_search_call {"action":{"type":"search","query":"x"}}]',
        "history_as_text: input[1] is of type 'web_search_call', which the model sees as text",
    ),
    (
        [{"type": "compaction", "encrypted_content": "abc"}],
        "",
        "history_left_out: input[1] is of type 'compaction' and is left out, because only the server that "
        "encrypted it can read it",
    ),
    (
        [{"type": "reasoning", "summary": [], "encrypted_content": "abc"}],
        "",
        "history_left_out: input[1] is of type 'reasoning' and is left out, because only the server that "
        "encrypted it can read it",
    ),
    (
        [CALLED | {"arguments": '{"city": "a'}, {"type": "function_call_output", "call_id": "c1", "output": "no"}],
        '"INVALID_JSON": "{\\"city\\": \\"a"',
        "arguments_not_json: input[1].arguments is not a JSON object, so the model sees it as text under the key "
        "INVALID_JSON",
    ),
    ([CALLED | {"arguments": ""}], '"arguments": {}', ""),
    ([CALLED | {"arguments": None}], '"arguments": {}', ""),
    (
        [{"type": "function_call_output", "call_id": "c9", "output": "ok"}],
        "<tool_response>\nok",
        "result_without_call: input[1] is the result of a call that is not in the conversation",
    ),
    (
        [CALLED, {"type": "function_call_output", "call_id": "c1", "output": [PNG]}],
        "[image left out: this model does not read it]",
        "media_left_out: input[2].output[0].image_url is an image of a tool, which this model does not read",
    ),
]


@pytest.mark.parametrize(("items", "shown", "warning"), HISTORIES, ids=lambda value: str(value)[:40])
async def test_items_of_a_response_are_shown_or_warned_of(served: Served, items: Any, shown: str, warning: str) -> None:
    served.says("Hello!")
    question = {"role": "user", "content": "x"}
    _, warnings = await served.post(RESPONSES, input=[question, *items, question], tools=[TOOLS[RESPONSES]])
    assert warnings == warning
    assert shown.replace('":"', '": "').replace('":[', '": [').replace('","', '", "') in spaced(served.prompt)


def spaced(prompt: str) -> str:
    return prompt.replace('":"', '": "').replace('":[', '": [').replace('","', '", "')


USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}}
TEXT_DOCUMENT = {
    "type": "document",
    "title": "T",
    "source": {"type": "text", "media_type": "text/plain", "data": "hi!"},
}
BLOCKS: list[tuple[list[Any], list[Any], str, str]] = [
    ([USE], [{"type": "tool_reference", "tool_name": "weather"}], "[tool weather]", ""),
    ([USE], [TEXT_DOCUMENT], "T\nhi!", ""),
    (
        [USE],
        [{"type": "search_result", "source": "u", "title": "t", "content": [{"type": "text", "text": "found"}]}],
        "t\nu\nfound",
        "",
    ),
    ([USE | {"input": '{"city": "Rom"}'}], [{"type": "text", "text": "rain"}], '{"city": "Rom"}', ""),
    ([USE | {"input": None}], [{"type": "text", "text": "rain"}], '"arguments": {}', ""),
    ([{"type": "compaction", "content": "So far."}, USE], [{"type": "text", "text": "rain"}], "So far.", ""),
    (
        [
            {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s1",
                "content": [{"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "secret"}],
            },
            USE,
        ],
        [{"type": "text", "text": "rain"}],
        '<tool_response>\n[{"type": "web_search_result", "url": "u", "title": "t"}]',
        "history_left_out: messages[1].content[1].content has encrypted parts, which only the server that "
        "encrypted them can read",
    ),
    (
        [{"type": "redacted_thinking", "data": "s"}, USE],
        [{"type": "text", "text": "rain"}],
        "rain",
        "history_left_out: messages[1].content[0] is redacted thinking, which only the server that encrypted it can read",
    ),
]


@pytest.mark.parametrize(("said", "result", "shown", "warning"), BLOCKS, ids=lambda value: str(value)[:40])
async def test_blocks_of_messages_are_shown_or_warned_of(
    served: Served, said: Any, result: Any, shown: str, warning: str
) -> None:
    served.says("Hello!")
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": result}]},
    ]
    _, warnings = await served.post(MESSAGES, messages=messages, tools=[TOOLS[MESSAGES]])
    assert warnings == warning
    assert spaced(shown) in spaced(served.prompt)


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
TURNS: list[tuple[dict[str, Any], str, str]] = [
    ({"content": None, "tool_calls": [CALL], "refusal": None, "audio": None, "annotations": []}, '"arguments": {}', ""),
    ({"tool_calls": [CALL | {"type": None, "index": 0}]}, '"arguments": {}', ""),
    ({"tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": None}}]}, '"arguments": {}', ""),
    ({"tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": '"{}"'}}]}, '"arguments": {}', ""),
    (
        {"tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": "[1]"}}]},
        '"INVALID_JSON": "[1]"',
        "arguments_not_json: messages[1].tool_calls[0].function.arguments is not a JSON object, so the model sees it as "
        "text under the key INVALID_JSON",
    ),
    ({"content": [{"type": "refusal", "refusal": "no!"}], "tool_calls": [CALL]}, "no!", ""),
    (
        {"content": "", "function_call": {"name": "weather", "arguments": "{}"}},
        '"name": "weather", "arguments": {}',
        "",
    ),
    (
        {"content": "b", "audio": {"id": "a"}, "tool_calls": [CALL]},
        "b",
        "history_left_out: messages[1].audio is an audio answer, which this server does not store",
    ),
    (
        {"content": "b"},
        "<tool_response>\n42",
        "result_without_call: messages[2] is the result of a call that is not in the conversation",
    ),
]


@pytest.mark.parametrize(("said", "shown", "warning"), TURNS, ids=lambda value: str(value)[:40])
async def test_turns_of_a_chat_are_shown_or_warned_of(served: Served, said: Any, shown: str, warning: str) -> None:
    served.says("Hello!")
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", **said},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    _, warnings = await served.post(CHAT, messages=messages, tools=[TOOLS[CHAT]])
    assert warnings == warning
    assert shown in served.prompt


async def test_a_result_in_the_oldest_form_is_a_result(served: Served) -> None:
    served.says("Hello!")
    call = {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}}
    result = {"role": "function", "name": "weather", "content": "42"}
    await served.post(CHAT, messages=[{"role": "user", "content": "x"}, call, result], function_call="none")
    assert "<tool_response>\n42" in served.prompt


OTHER = {"type": "function", "function": {"name": "other"}}
CHOICES: list[tuple[Any, list[str]]] = [
    ("any", ["other", "weather"]),
    ({"type": "any"}, ["other", "weather"]),
    ({"type": "required"}, ["other", "weather"]),
    ({"type": "function", "name": "weather"}, ["weather"]),
    ({"type": "function", "function": {"name": "weather"}}, ["weather"]),
    (
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"function": {"name": "weather"}}]}},
        ["weather"],
    ),
    ({"type": "auto"}, []),
    ({"type": "none"}, []),
]


@pytest.mark.parametrize(("choice", "forced"), CHOICES, ids=str)
async def test_choices_of_tools_in_all_forms(served: Served, choice: Any, forced: list[str]) -> None:
    served.says("Hello!")
    await served.post(CHAT, tools=[TOOLS[CHAT], OTHER], tool_choice=choice)
    tag = served.engine.requests[-1].sampling_params.structured_output.structural_tag
    assert [name for name in ("other", "weather") if name in tag] == forced


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_are_the_only_ones_that_the_model_knows(served: Served, mode: str) -> None:
    served.says("Hello!")
    allowed = [{"type": "function", "name": "weather"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    await served.post(RESPONSES, tools=[TOOLS[RESPONSES], {"type": "function", "name": "other"}], tool_choice=choice)
    assert ('"weather"' in served.prompt, '"other"' in served.prompt) == (True, False)
    choice["tools"] = [{"type": "function", "name": "nobody"}]
    if mode == "required":
        message = await served.refused(RESPONSES, tools=[TOOLS[RESPONSES]], tool_choice=choice)
        assert message == "tool_choice requires a tool call, but allows none of the request's tools, which are: weather"


@pytest.mark.parametrize(
    ("route", "tools", "message"),
    [
        (
            CHAT,
            [{"type": "web_search"}, {"type": "function", "function": {"name": ""}}],
            "tools[1].function.name is empty",
        ),
        (RESPONSES, [{"type": "web_search"}, {"type": "function", "name": ""}], "tools[1].name is empty"),
        (
            RESPONSES,
            [
                {
                    "type": "namespace",
                    "name": "n",
                    "tools": [{"type": "function", "name": "f", "parameters": {"type": "x"}}],
                }
            ],
            "tools[0].tools[0].parameters.type is 'x'; it must be 'object', because the arguments of a tool are an object",
        ),
        (MESSAGES, [{"type": "bash_20250124", "name": "bash"}, {"name": ""}], "tools[1].name is empty"),
        (
            MESSAGES,
            [{"name": "f", "input_schema": {"type": "string"}}],
            "tools[0].input_schema.type is 'string'; it must be 'object', because the arguments of a tool are an object",
        ),
    ],
    ids=str,
)
async def test_errors_of_tools_name_the_clients_tool(served: Served, route: str, tools: Any, message: str) -> None:
    assert await served.refused(route, tools=tools) == message


async def test_a_chat_over_grpc_has_its_warnings_as_initial_metadata(served: Served) -> None:
    served.says("Hello!")
    result = pb.ChatMessage(role="tool", content="42", tool_call_id="c9")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served.api.server.frontend.port}") as channel:
        stub = service_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Chat(pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x"), result]))
        metadata = dict(await call.initial_metadata())
        assert [response.content async for response in call][-1] is not None
        assert metadata["penstock-warning"].startswith("result_without_call: messages[1] is the result")
        plain = stub.Chat(pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x")]))
        assert "penstock-warning" not in dict(await plain.initial_metadata())
        assert [response async for response in plain]


async def test_thinking_that_is_to_be_omitted_is_in_its_signature_alone(served: Served) -> None:
    served.says("<think>\nA city.\n</think>\n\nHello!")
    shown, _ = await served.post(MESSAGES, thinking={"type": "adaptive"})
    assert [block["type"] for block in shown["content"]] == ["thinking", "text"]
    omitted, _ = await served.post(MESSAGES, thinking={"type": "adaptive", "display": "omitted"})
    thought, text = omitted["content"]
    assert (thought["type"], thought["thinking"], text["text"]) == ("thinking", "", "Hello!")
    prompts = []
    for content in (shown["content"], omitted["content"]):
        history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
        await served.post(MESSAGES, messages=[*history, {"role": "user", "content": "Again?"}])
        prompts.append(served.prompt)
    assert prompts[0] == prompts[1]
    assert "<think>\nA city.\n</think>" in prompts[0]
    foreign = {"type": "thinking", "thinking": "", "signature": "EqQBCgIYAhIM"}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [foreign, text]}]
    _, warning = await served.post(MESSAGES, messages=[*turns, {"role": "user", "content": "Again?"}])
    assert warning.startswith("history_left_out: messages[1].content[0] is thinking that another server omitted")
    events = await served.events(MESSAGES, thinking={"type": "adaptive", "display": "omitted"})
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta" and event["index"] == 0]
    assert deltas == [{"type": "signature_delta", "signature": thought["signature"]}]


async def test_warnings_of_hints(served: Served) -> None:
    served.says("Hello!")
    _, warnings = await served.post(RESPONSES, truncation="auto", stream_options={"include_obfuscation": False})
    assert warnings == (
        "hint_ignored: stream_options has no effect without stream, "
        "hint_ignored: truncation is 'auto', but a conversation that is too long is refused, not cut"
    ).replace(", hint", "; hint")
    message = await served.refused(CHAT, reasoning_effort="banana")
    assert message.startswith("reasoning_effort is 'banana'; known: none, minimal, low, medium, high, xhigh, max")


async def test_the_published_client_reads_calls_of_custom_tools(served: Served) -> None:
    served.says(PATCH)
    client: Any = served.api.client
    tools = [{"type": "custom", **CUSTOM}]
    stream = await client.responses.create(model="model", input="hi", tools=tools, stream=True, max_output_tokens=1000)
    events = [event async for event in stream]
    kinds = dict.fromkeys(type(event).__name__ for event in events)
    assert list(kinds) == [
        "ResponseCreatedEvent",
        "ResponseInProgressEvent",
        "ResponseOutputItemAddedEvent",
        "ResponseCustomToolCallInputDeltaEvent",
        "ResponseCustomToolCallInputDoneEvent",
        "ResponseOutputItemDoneEvent",
        "ResponseCompletedEvent",
    ]
    [item] = events[-1].response.output
    assert (type(item).__name__, item.input) == ("ResponseCustomToolCall", INPUT)
    answer = await client.chat.completions.create(
        model="model",
        messages=[{"role": "user", "content": "hi"}],
        tools=[{"type": "custom", "custom": CUSTOM}],
        max_tokens=1000,
    )
    [call] = answer.choices[0].message.tool_calls
    assert (type(call).__name__, call.custom.input) == ("ChatCompletionMessageCustomToolCall", INPUT)

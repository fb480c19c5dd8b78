"""Fields of bodies that nobody knows are found, wherever their object's fields are known."""

import json
from typing import Any

import msgspec
import pytest

from penstock_frontend.api.anthropic.messages_body import MessagesBody
from penstock_frontend.api.openai import unknown_fields
from penstock_frontend.api.openai.chat_completions import ChatCompletionRequest
from penstock_frontend.api.openai.completions import CompletionRequest
from penstock_frontend.api.openai.pooling.scoring import RerankBody
from penstock_frontend.api.openai.responses.response_body import ResponseBody
from penstock_frontend.api.openai.unknown_fields import find_unknown

HI: Any = {"role": "user", "content": "hi"}


def paths(kind: type, **body: Any) -> set[str]:
    text = json.dumps(body).encode()
    msgspec.json.decode(text, type=kind)  # it is a body that is served
    return {field.path for field in find_unknown(text, kind)}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"max_tokns": 5}, "max_tokns"),
        ({"messages": [HI, HI | {"nmae": "x"}]}, "messages[1].nmae"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "txt": 1}]}]},
            "messages[0].content[0].txt",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:,", "detial": "low"}}],
                    }
                ]
            },
            "messages[0].content[0].image_url.detial",
        ),
        ({"tools": [{"function": {"name": "f", "params": {}}}]}, "tools[0].function.params"),
        ({"tools": [{"function": {"name": "f"}, "kind": "x"}]}, "tools[0].kind"),
        ({"tool_choice": {"type": "function", "fn": 1}}, "tool_choice.fn"),
        ({"stream_options": {"include_usgae": True}}, "stream_options.include_usgae"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
            "response_format.json_schema.x",
        ),
    ],
    ids=str,
)
def test_an_unknown_field_is_found_with_its_place(body: dict[str, Any], path: str) -> None:
    assert paths(ChatCompletionRequest, **{"messages": [HI], **body}) == {path}


@pytest.mark.parametrize(
    "body",
    [
        {"nobody_knows": None},
        {"chat_template_kwargs": {"anything": 1}},
        {"tools": [{"function": {"name": "f", "parameters": {"type": "object", "anything": 1}}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"anything": 1}}}},
        {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
        {"metadata": {"anything": 1}},
        {"tool_choice": "auto"},
        {"messages": [HI, {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None}]},
    ],
    ids=str,
)
def test_null_and_clients_own_objects_are_not_unknown(body: dict[str, Any]) -> None:
    assert paths(ChatCompletionRequest, **{"messages": [HI], **body}) == set()


def test_blocks_are_looked_at_at_every_depth_and_beside_texts() -> None:
    block = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x", "txet": "y"}]}
    said = {"max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}
    assert paths(MessagesBody, **said) == {"messages[0].content[0].content[0].txet"}
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x", "txet": "y"}], "rloe": 1}
    assert paths(ResponseBody, input=[item]) == {"input[0].content[0].txet", "input[0].rloe"}
    # A document's further fields are its own.
    assert paths(RerankBody, query="a", documents=["b", {"text": "c", "title": "d"}]) == set()
    assert paths(CompletionRequest, prompt=["a", [5, 6]], promt="x") == {"promt"}


def test_a_field_of_every_message_is_told_once_and_there_is_an_end_of_telling() -> None:
    body = json.dumps({"messages": [HI | {"nmae": "x"}] * 9}).encode()
    [field] = find_unknown(body, ChatCompletionRequest)
    assert (field.path, field.shape, field.name) == ("messages[0].nmae", "messages[].nmae", "nmae")
    many = json.dumps({"messages": [HI], **{f"x{number}": 1 for number in range(1000)}}).encode()
    assert len(find_unknown(many, ChatCompletionRequest)) == 32


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (
            ChatCompletionRequest,
            {"messages": [HI, {"role": "user", "content": [{"type": "text", "text": "x"}]}], "n": 2},
        ),
        (
            ChatCompletionRequest,
            {"messages": [HI], "tools": [{"function": {"name": "f", "parameters": {"any": {"x": 1}}}}]},
        ),
        (ChatCompletionRequest, {"messages": [HI], "response_format": {"type": "json_object"}, "store": True}),
        (ResponseBody, {"input": [{"role": "user", "content": "hi"}]}),
        (
            MessagesBody,
            {
                "max_tokens": 1,
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "x"}]}]}
                ],
            },
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_body_of_known_fields_is_read_in_one_pass(
    monkeypatch: pytest.MonkeyPatch, kind: type, body: dict[str, Any]
) -> None:
    def walk(*_: object) -> None:
        raise AssertionError("every object was looked at")

    monkeypatch.setattr(unknown_fields, "_walk", walk)
    assert paths(kind, model="m", **body) == set()


@pytest.mark.parametrize("levels", [1, 2, 3, 6])
def test_blocks_within_blocks_are_looked_at_however_deep(levels: int) -> None:
    block: dict[str, Any] = {"type": "text", "text": "x", "unknown": 1}
    for _ in range(levels):
        block = {"type": "tool_result", "content": [block]}
    messages = [{"role": "user", "content": [block]}]
    (path,) = paths(MessagesBody, model="m", max_tokens=1, messages=messages)
    assert path == "messages[0].content[0]" + ".content[0]" * levels + ".unknown"

"""Arguments of calls in conversations that clients send back."""

import json
from typing import Any

import pytest

from penstock_frontend.call_types import ChatMessage, ToolCall
from penstock_frontend.call_warnings import WarningLog
from penstock_frontend.processing.chat.histories import arguments_text, warn_of_lost_calls


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"a": 1}, {"a": 1}),
        ('{"a": 1}', {"a": 1}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        (None, {}),
        ("", {}),
        (" ", {}),
        ("null", {}),
        ('""', {}),
        ('"{}"', {}),
    ],
)
async def test_an_object_is_read_in_every_form(given: object, read: Any) -> None:
    warnings = WarningLog().begin("a")
    assert json.loads(arguments_text(given, "x")) == read
    assert warnings.headers == {}


@pytest.mark.parametrize("given", ['{"city": "a', "[1]", "7", '"a"', "[" * 100_000, '{"a": 1} b'])
async def test_anything_else_is_shown_as_a_text_with_a_warning(given: str) -> None:
    warnings = WarningLog().begin("a")
    assert json.loads(arguments_text(given, "tool_calls[0].arguments")) == {"INVALID_JSON": given}
    assert warnings.headers["penstock-warning"].startswith(
        "arguments_not_json: tool_calls[0].arguments is not a JSON object"
    )


async def test_a_result_belongs_to_a_call_before_it() -> None:
    def warned(*ids: str) -> str:
        warnings = WarningLog().begin("a")
        messages = [
            ChatMessage(role="assistant", tool_calls=[ToolCall(id=each, name="f") for each in ids]),
            ChatMessage(role="tool", tool_call_id="c1"),
        ]
        warn_of_lost_calls(messages, ["input[4]", "input[5]"])
        return warnings.headers.get("penstock-warning", "")

    assert warned("c1") == ""
    assert warned("") == "", "a client that gives calls no ids cannot be told of them"
    assert warned("c2") == "result_without_call: input[5] is the result of a call that is not in the conversation"

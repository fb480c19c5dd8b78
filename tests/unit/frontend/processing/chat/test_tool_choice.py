"""Constraints for each choice of a tool, and refused choices."""

import json
from typing import Any

import pytest

from penstock_common.errors import InvalidArgument
from penstock_frontend.call_types import Tool
from penstock_frontend.processing.chat.tool_choice import tool_constraint
from penstock_frontend.processing.parsers.gpt_oss import GptOssReasoningParser, GptOssToolParser
from penstock_frontend.processing.parsers.hermes import HermesToolParser
from penstock_frontend.processing.parsers.kimi_k2 import KimiK2ToolParser
from penstock_frontend.processing.parsers.llama3_json import Llama3JsonToolParser
from penstock_frontend.processing.parsers.mistral import MistralToolParser
from penstock_frontend.processing.parsers.reasoning_tags import Qwen3ReasoningParser

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [Tool(name="weather", parameters=SCHEMA), Tool(name='"now"')]


def format_of(choice: str, **options: Any) -> Any:
    constraint = tool_constraint(TOOLS, choice, options.pop("parser", HermesToolParser), **options)
    assert constraint is not None
    assert constraint.structural_tag is not None
    return json.loads(constraint.structural_tag)["format"]


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_what_may_be_left_is_no_constraint(choice: str) -> None:
    assert tool_constraint(TOOLS, choice, HermesToolParser) is None
    assert tool_constraint([], choice, None) is None


def test_required_is_one_or_more_of_any_tool() -> None:
    calls = format_of("required")
    assert (calls["at_least_one"], calls["stop_after_first"], calls["separator"]) == (True, False, "\n")
    first, second = calls["tags"]
    assert first["begin"] == '<tool_call>\n{"name": "weather", "arguments": '
    assert first["content"] == {"type": "json_schema", "json_schema": SCHEMA}
    assert first["end"] == "}\n</tool_call>"
    assert second["begin"] == r"<tool_call>" + "\n" + r'{"name": "\"now\"", "arguments": '
    assert second["content"]["json_schema"]["properties"] == {}


def test_a_named_tool_is_called_once() -> None:
    calls = format_of("auto", named="weather")
    assert [tag["content"]["json_schema"] for tag in calls["tags"]] == [SCHEMA]
    assert calls["stop_after_first"]


def test_llama_makes_one_call_at_a_time() -> None:
    calls = format_of("required", parser=Llama3JsonToolParser)
    assert calls["tags"][0]["begin"] == '{"name": "weather", "parameters": '
    assert calls["stop_after_first"]


def test_a_model_that_reasons_may_do_so_first() -> None:
    first, calls = format_of("required", reasoning=Qwen3ReasoningParser)["elements"]
    assert (first["type"], first["content"]["begin"], first["content"]["end"]) == (
        "optional",
        "<think>",
        "</think>\n\n",
    )
    assert calls["type"] == "tags_with_separator"


def test_a_list_of_calls_stands_between_brackets() -> None:
    opening, calls, closing = format_of("required", parser=MistralToolParser)["elements"]
    assert (opening["value"], calls["separator"], closing["value"]) == ("[TOOL_CALLS] [", ", ", "]")


def test_a_name_may_stand_as_it_is() -> None:
    _, calls, _ = format_of("required", parser=KimiK2ToolParser)["elements"]
    assert calls["tags"][1]["begin"] == '<|tool_call_begin|>functions."now":0<|tool_call_argument_begin|>'


def test_gpt_oss_makes_a_call_that_must_be_made_at_once() -> None:
    calls = format_of("required", parser=GptOssToolParser, reasoning=GptOssReasoningParser)
    assert calls["type"] == "tags_with_separator"


def test_reasoning_that_the_prompt_has_begun_must_end() -> None:
    first, _ = format_of("required", reasoning=Qwen3ReasoningParser, prompt="<think>\n")["elements"]
    assert (first["begin"], first["end"]) == ("", "</think>\n\n")


def test_reasoning_that_the_prompt_has_ended_is_over() -> None:
    calls = format_of("required", reasoning=Qwen3ReasoningParser, prompt="<think>\n\n</think>\n\n")
    assert calls["type"] == "tags_with_separator"


@pytest.mark.parametrize(
    ("tools", "choice", "options", "message"),
    [
        (TOOLS, "any", {}, "tool_choice is 'any'; known: auto, none, required"),
        ([], "required", {}, "tool_choice is 'required', but there are no tools; set tools"),
        (TOOLS, "auto", {"named": "x"}, "tool_choice names 'x'; the tools are: weather, \"now\""),
        ([], "auto", {"named": "x"}, "tool_choice names 'x'; the tools are: none"),
    ],
)
def test_invalid_tool_choices_are_refused(tools: list[Tool], choice: str, options: Any, message: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        tool_constraint(tools, choice, HermesToolParser, **options)
    assert (error.value.message, error.value.field) == (message, "tool_choice")


def test_a_call_in_an_unknown_form_cannot_be_insisted_on() -> None:
    with pytest.raises(InvalidArgument, match="but the format of tool calls of this model is unknown"):
        tool_constraint(TOOLS, "required", None)


@pytest.mark.parametrize(
    ("given", "enforced"),
    [
        ({}, {"type": "object"}),
        ({"properties": {"a": {}}}, {"properties": {"a": {}}, "type": "object"}),
        ({"type": None}, {"type": "object"}),
        ({"anyOf": [{"type": "object"}]}, {"anyOf": [{"type": "object"}]}),
        ({"$ref": "#/$defs/a", "$defs": {}}, {"$ref": "#/$defs/a", "$defs": {}}),
    ],
)
def test_arguments_are_an_object_though_the_schema_does_not_say_so(given: Any, enforced: Any) -> None:
    constraint = tool_constraint([Tool(name="f", parameters=given)], "required", HermesToolParser)
    assert constraint is not None
    assert constraint.structural_tag is not None
    tag = json.loads(constraint.structural_tag)["format"]["tags"][0]
    assert tag["content"]["json_schema"] == enforced

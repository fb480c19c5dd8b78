"""Names of tools in namespaces, the schemas of custom tools, and choices among supported tools."""

import json
import random
from typing import Any

import pytest

from penstock_common.errors import InvalidArgument
from penstock_common.types.outputs import FinishReason
from penstock_frontend.api.openai.conversation import effort_kwargs
from penstock_frontend.api.tools import CustomInputs, InputReader, ServedTools, ToolChoice, flat_name, input_arguments
from penstock_frontend.call_types import Finish, Usage
from penstock_frontend.call_warnings import WarningLog
from penstock_frontend.processing.chat.answers import ChatOutput
from penstock_frontend.processing.parsers.base import ToolCallDelta


def tools() -> ServedTools:
    made = ServedTools()
    made.leave_out("web_search", "tools[0]", "search")
    made.function("get", None, {"type": "object"}, "tools[1].function")
    made.custom("patch", "Changes files.", "tools[2].custom", syntax="regex", definition="[a-z]+")
    return made


@pytest.mark.parametrize(
    ("namespace", "name"), [("", "get"), (None, "get"), ("mcp__x", "mcp__x__get"), ("mcp__x__", "mcp__x__get")]
)
def test_the_model_sees_a_namespace_as_the_begin_of_a_name(namespace: str | None, name: str) -> None:
    assert flat_name("get", namespace) == name


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    served = tools().called("patch")
    assert served is not None
    assert served.tool.description.startswith("Changes files.\n\nThe input must match this regex grammar:\n[a-z]+")
    assert served.tool.parameters == {
        "type": "object",
        "properties": {"input": {"type": "string", "pattern": "^(?:[a-z]+)$"}},
        "required": ["input"],
        "additionalProperties": False,
    }


def test_errors_find_the_clients_place_behind_tools_that_are_left_out() -> None:
    chosen = tools().chosen(ToolChoice("auto"))
    assert chosen.names["tools[0]"] == "tools[1].function"
    assert chosen.names["tools[0].parameters"] == "tools[1].function.parameters"
    assert chosen.names["tools[1].parameters"] == "tools[2].custom.format"


def test_a_choice_applies_to_what_is_served() -> None:
    def names(**choice: Any) -> list[str]:
        return [tool.name for tool in tools().chosen(ToolChoice(**{"mode": "auto", **choice})).tools]

    assert names() == names(mode="required") == names(named="get") == ["get", "patch"]
    assert names(allowed=["patch", "search"]) == ["patch"]
    assert tools().chosen(ToolChoice("auto", allowed=["search"])).mode == "none"


@pytest.mark.parametrize(
    "choice",
    [
        ToolChoice("auto", named="search"),
        ToolChoice("auto", hosted="web_search"),
        ToolChoice("auto", hosted="mcp"),
        ToolChoice("required", allowed=["search"]),
    ],
    ids=str,
)
def test_a_choice_of_what_is_not_served_is_refused(choice: ToolChoice) -> None:
    with pytest.raises(InvalidArgument) as error:
        tools().chosen(choice)
    assert error.value.field == "tool_choice"


@pytest.mark.parametrize(
    ("choice", "warned"),
    [
        (ToolChoice("auto"), True),
        (ToolChoice("auto", named="get"), False),
        (ToolChoice("auto", named="patch"), False),
        (ToolChoice("required"), False),
        (ToolChoice("none"), False),
    ],
    ids=str,
)
async def test_a_grammar_that_is_not_enforced_is_warned_of(choice: ToolChoice, warned: bool) -> None:
    served = tools()
    warnings = WarningLog().begin("a")
    served.chosen(choice)
    assert bool(warnings.headers) is warned


def test_an_effort_is_one_of_the_protocols() -> None:
    assert effort_kwargs(None, "x") == {}
    assert effort_kwargs("none", "x") == {"enable_thinking": False}
    assert effort_kwargs("xhigh", "x") == {"reasoning_effort": "xhigh"}
    with pytest.raises(InvalidArgument, match=r"^reasoning_effort is 'banana'; known: none, minimal, low"):
        effort_kwargs("banana", "reasoning_effort")


# Inputs of custom tools: the text in a call's arguments, for any split of the arguments into pieces.

TEXTS = ["", "a", 'a "b" \\ \n\t', "ü 🙂 \ud83d", "*** Begin Patch\n+x = {}\n", "\\u0041", "]}\"'"]
ENDED = Finish(FinishReason.STOP, None, Usage())


def read(pieces: list[str]) -> str:
    reader = InputReader()
    return "".join([*(reader.push(piece) for piece in pieces), reader.finish()])


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("escaped", [False, True])
def test_a_text_is_read_whatever_the_pieces_are(text: str, escaped: bool) -> None:
    shown = text.replace("\ud83d", "\ufffd")
    written = json.dumps({"input": text}, ensure_ascii=escaped)
    written = written if escaped else written.replace("\ud83d", "\\ud83d")
    assert read([written]) == shown
    assert read(list(written)) == shown
    for seed in range(20):
        cuts = sorted(random.Random(seed).sample(range(len(written)), 3))
        assert read([written[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]) == shown


def test_a_text_that_was_cut_off_is_what_there_is_of_it() -> None:
    assert read(['{"input": "ab', "c\\"]) == "abc"
    assert read(['{"input": "ab\\ud83d"}']) == "ab\ufffd"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("{}", ""),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"why": "y", "input": "x"}', "x"),
        ('{"input": 7}', '{"input": 7}'),
        ("no JSON", "no JSON"),
        ("[1]", "[1]"),
    ],
)
def test_other_arguments_are_handed_on_whole(arguments: str, shown: str) -> None:
    assert read([arguments]) == shown
    assert read(list(arguments)) == shown


def test_only_calls_of_custom_tools_are_changed() -> None:
    tools = ServedTools()
    tools.custom("patch", None, "tools[0]")
    tools.function("get", None, None, "tools[1]")
    inputs = CustomInputs(tools)
    calls = [
        ToolCallDelta(index=0, id="a", name="patch", arguments='{"why": 1, "in'),
        ToolCallDelta(index=0, id="a", arguments='put": "x"}'),
        ToolCallDelta(index=1, id="b", name="get", arguments='{"input": "y"}'),
        ToolCallDelta(index=2, id="c", name="patch", arguments=input_arguments("z")),
    ]
    found = inputs.read(ChatOutput(tool_calls=calls, finish=ENDED)).tool_calls
    assert [(call.index, call.name, call.arguments) for call in found] == [
        (0, "patch", "x"),
        (1, "get", '{"input": "y"}'),
        (2, "patch", "z"),
    ]
    pieces = CustomInputs(tools)
    outputs = [pieces.read(ChatOutput(tool_calls=[call])) for call in calls]
    outputs.append(pieces.read(ChatOutput(finish=ENDED)))
    told = [(call.index, call.name, call.arguments) for output in outputs for call in output.tool_calls]
    assert told == [(0, "patch", ""), (0, "", "x"), (1, "get", '{"input": "y"}'), (2, "patch", "z")]

"""Names of tools in namespaces, the schemas of custom tools, and choices among what is served."""

from typing import Any

import pytest

from penstock_common.errors import InvalidArgument
from penstock_frontend.api.openai.conversation import effort_kwargs
from penstock_frontend.api.tools import ServedTools, ToolChoice, flat_name
from penstock_frontend.call_warnings import WarningLog


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

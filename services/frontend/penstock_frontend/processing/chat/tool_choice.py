"""Forced tool calls, which are enforced by constraints on the model's output."""

import json
import re
from collections.abc import Sequence
from typing import Any

from penstock_common.errors import InvalidArgument, RequestFailed, excerpt, quoted
from penstock_common.types.sampling import StructuredOutput
from penstock_frontend.call_types import Tool
from penstock_frontend.processing.parsers.base import ReasoningParser, ToolParser

CHOICES = ("auto", "none", "required")
_FIELD = "sampling_params.structured_output"
_OF_TOOL = re.compile(r"\S+: #\S*?/tags/(?P<index>[0-9]+)/content/json_schema(?P<what>.*)", re.DOTALL)
"""Pattern of an error message about the schema of one tool. The message contains the position of the tool in the
constraint.
"""
_OPEN_FORMS = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const", "type")
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def tool_constraint(
    tools: Sequence[Tool],
    choice: str,
    parser: type[ToolParser] | None,
    *,
    named: str = "",
    reasoning: type[ReasoningParser] | None = None,
    prompt: str = "",
) -> StructuredOutput | None:
    """Return the output constraint that forces tool calls.

    The tool choice ``required`` forces at least one call. ``named`` forces exactly one call of the tool with this name.

    For ``auto`` and ``none``, the result is None. The constraint requires arguments that match the tool's schema, in
    the call format of ``parser``. If ``reasoning`` is set, the constraint also allows reasoning before the calls.
    Callers set it for reasoning formats that engines do not handle themselves. ``prompt`` shows whether the prompt has
    already begun the reasoning. Raises InvalidArgument if the tool choice cannot be enforced.
    """
    check_choice(tools, choice, named)
    if not named and choice != "required":
        return None
    if parser is None:
        raise InvalidArgument(
            "tool_choice requires a tool call, but the format of tool calls of this model is unknown; set the frontend's "
            "model.tool_parser",
            field="tool_choice",
        )
    form = parser.form
    allowed = [tool for tool in tools if not named or tool.name == named]
    calls = {
        "type": "tags_with_separator",
        "tags": [_tag(form.begin, form.end, tool) for tool in allowed],
        "separator": form.separator or "",
        "at_least_one": True,
        "stop_after_first": bool(named) or form.separator is None,
    }
    if form.opening or form.closing:
        around = [{"type": "const_string", "value": text} for text in (form.opening, form.closing)]
        calls = {"type": "sequence", "elements": [around[0], calls, around[1]]}
    format_ = _after_reasoning(calls, reasoning, prompt) if reasoning is not None else calls
    return StructuredOutput(structural_tag=json.dumps({"type": "structural_tag", "format": format_}))


def blamed_on_tools(error: RequestFailed, tools: Sequence[Tool], named: str) -> RequestFailed:
    """Convert an error about the constraint from ``tool_constraint`` to an error about the tools that the client sent."""
    if not error.field.startswith(_FIELD):
        return error
    message, field = error.message, "tools"
    if (found := _OF_TOOL.fullmatch(message)) is not None:
        allowed = [index for index, tool in enumerate(tools) if not named or tool.name == named]
        field = f"tools[{allowed[int(found['index'])]}].parameters"
        message = f"{field}: #{found['what']}"
    else:
        message = message.replace(error.field, field)
    result = type(error)(message, field=field, reason=error.reason, retry_after=error.retry_after)
    result.__cause__ = error
    return result


def named_choice(name: str, *, field: str) -> tuple[str, str]:
    """Return the values of ``tool_choice`` and ``named_tool`` that force a call of the tool ``name``. Raises
    InvalidArgument.
    """
    if not name:
        raise InvalidArgument(f"{field} is empty", field=field)
    return "auto", name


def check_choice(tools: Sequence[Tool], choice: str, named: str) -> None:
    """Raise InvalidArgument for an unknown ``tool_choice``, or for a choice that the request's tools do not allow."""
    if choice not in CHOICES:
        raise InvalidArgument(f"tool_choice is {quoted(choice)}; known: {', '.join(CHOICES)}", field="tool_choice")
    if named and named not in {tool.name for tool in tools}:
        known = excerpt(", ".join(tool.name for tool in tools) or "none")
        raise InvalidArgument(f"tool_choice names {quoted(named)}; the tools are: {known}", field="tool_choice")
    if choice == "required" and not tools:
        raise InvalidArgument("tool_choice is 'required', but there are no tools; set tools", field="tool_choice")


def _tag(begin: str, end: str, tool: Tool) -> dict[str, Any]:
    schema = _NO_ARGUMENTS if tool.parameters is None else tool.parameters
    if not any(schema.get(name) is not None for name in _OPEN_FORMS):
        # tool call arguments are always an object, even if the schema has no type
        schema = {**schema, "type": "object"}
    return {
        "type": "tag",
        "begin": begin.replace("{name}", json.dumps(tool.name, ensure_ascii=False)).replace("{bare}", tool.name),
        "content": {"type": "json_schema", "json_schema": schema},
        "end": end,
    }


def _after_reasoning(calls: dict[str, Any], reasoning: type[ReasoningParser], prompt: str) -> dict[str, Any]:
    begin, end = reasoning.tags
    ended = reasoning.ended_by(prompt)
    if ended or reasoning.before_calls is None:
        return calls
    begun = ended is False
    end += reasoning.before_calls
    thoughts = {"type": "tag", "begin": "" if begun else begin, "content": {"type": "any_text"}, "end": end}
    first = thoughts if begun else {"type": "optional", "content": thoughts}
    return {"type": "sequence", "elements": [first, calls]}

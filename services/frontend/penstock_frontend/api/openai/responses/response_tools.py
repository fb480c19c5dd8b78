"""A response's tools, and which of them must or may be called, to the domain's."""

from collections.abc import Sequence

import msgspec

from penstock_common.errors import InvalidArgument, quoted
from penstock_frontend.api.openai.chat_tools import MODES, check_syntax, mode_of
from penstock_frontend.api.openai.responses.response_body import AllowedToolBody, FunctionTool, ToolChoiceBody
from penstock_frontend.api.served_tools import ServedTools, ToolChoice, flat_name

SERVED = ("function", "custom", "namespace")
"""Types of tools that the model is told of."""


def tools_of(bodies: Sequence[FunctionTool] | None) -> ServedTools:
    """The tools of a body. Those in a namespace are functions whose names begin with the namespace's. Raises InvalidArgument."""
    tools = ServedTools()
    for index, body in enumerate(bodies or ()):
        _add(tools, body, f"tools[{index}]", "")
    return tools


def choice_of(choice: str | ToolChoiceBody | None) -> ToolChoice:
    """The choice of a body. Raises InvalidArgument."""
    if choice is None:
        return ToolChoice("auto")
    if isinstance(choice, str):
        return ToolChoice(mode_of(choice, "tool_choice"))
    match choice.type:
        case kind if kind in MODES:
            return ToolChoice(MODES[kind])
        case "allowed_tools":
            allowed = [_name(tool) for tool in choice.tools or ()]
            return ToolChoice(mode_of(choice.mode or "auto", "tool_choice.mode"), allowed=allowed)
        case "function" | "custom":
            if not choice.name:
                raise InvalidArgument("tool_choice.name is empty", field="tool_choice.name")
            return ToolChoice("auto", named=_name(choice))
        case kind:
            return ToolChoice("auto", hosted=kind)


def _add(tools: ServedTools, body: FunctionTool, path: str, namespace: str) -> None:
    match body.type:
        case "function":
            tools.function(body.name, body.description, body.parameters, path, namespace=namespace)
        case "custom":
            syntax, definition = _grammar(body, path)
            tools.custom(body.name, body.description, path, syntax=syntax, definition=definition, namespace=namespace)
        case "namespace" if not namespace:
            if not body.name:
                raise InvalidArgument(f"{path}.name is empty", field=f"{path}.name")
            for index, inner in enumerate(body.tools or ()):
                _add(tools, inner, f"{path}.tools[{index}]", body.name)
        case kind:
            tools.leave_out(kind, path, body.name)


def _grammar(body: FunctionTool, path: str) -> tuple[str, str]:
    """The form and the text of a custom tool's grammar; empty texts without one."""
    if isinstance(body.format, msgspec.UnsetType) or body.format is None or body.format.type == "text":
        return "", ""
    if body.format.type != "grammar":
        field = f"{path}.format.type"
        raise InvalidArgument(f"{field} is {quoted(body.format.type)}; known: text, grammar", field=field)
    for name in ("syntax", "definition"):
        if not getattr(body.format, name):
            field = f"{path}.format.{name}"
            raise InvalidArgument(f"{field} is not set", field=field, reason="MISSING_FIELD")
    check_syntax(body.format.syntax, f"{path}.format.syntax")
    return body.format.syntax, body.format.definition


def _name(tool: AllowedToolBody) -> str:
    return flat_name(tool.name, tool.namespace)

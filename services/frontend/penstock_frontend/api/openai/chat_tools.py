"""Tools, choices of tools and calls as chat completions write them, to the domain's."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_frontend.api.tools import ServedTools, ToolChoice, input_arguments
from penstock_frontend.call_types import ToolCall
from penstock_frontend.processing.chat.histories import arguments_text

T = TypeVar("T")

MODES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}
"""What clients call the modes of a choice; ``any`` is Mistral's and Anthropic's name of ``required``."""


class FunctionCallBody(msgspec.Struct, frozen=True, kw_only=True):
    """A call as it was made. ``arguments``: a JSON object as text, or as it is."""

    name: str = ""
    arguments: Any = None


class CustomCallBody(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a custom tool as it was made."""

    name: str = ""
    input: str = ""


class ToolCallBody(msgspec.Struct, frozen=True, kw_only=True):
    """A call in a message of the assistant's. ``type``: ``function`` where it is not set."""

    id: str | None = None
    type: str | None = None
    function: FunctionCallBody | None = None
    custom: CustomCallBody | None = None


class FunctionBody(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call. Schemas of tools that must be called are enforced, whatever ``strict`` says."""

    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class GrammarBody(msgspec.Struct, frozen=True, kw_only=True):
    """What the input of a custom tool must match: ``syntax`` is ``lark`` or ``regex``."""

    syntax: str
    definition: str


class CustomFormatBody(msgspec.Struct, frozen=True, kw_only=True):
    """The form of a custom tool's input: ``text`` or ``grammar``."""

    type: str
    grammar: GrammarBody | None = None


class CustomBody(msgspec.Struct, frozen=True, kw_only=True):
    """A custom tool: its input is a text."""

    name: str = ""
    description: str | None = None
    format: CustomFormatBody | None = None


class ToolBody(msgspec.Struct, frozen=True, kw_only=True):
    """A tool: a function or a custom tool. Tools of other types are left out."""

    type: str | None = None
    function: FunctionBody | None = None
    custom: CustomBody | None = None


class NamedTool(msgspec.Struct, frozen=True):
    """The name of a tool."""

    name: str


class AllowedToolBody(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that may be called."""

    type: str = "function"
    name: str | None = None
    function: NamedTool | None = None
    custom: NamedTool | None = None


class AllowedToolsBody(msgspec.Struct, frozen=True, kw_only=True):
    """The tools that may be called, and whether one must be: ``auto`` or ``required``."""

    mode: str = "auto"
    tools: list[AllowedToolBody] = []


class ToolChoiceObject(AllowedToolBody, frozen=True, kw_only=True):
    """The tool that must be called, the tools that may be called, or a mode as an object."""

    allowed_tools: AllowedToolsBody | None = None


def tools_of(bodies: Sequence[ToolBody] | None) -> ServedTools:
    """The tools of a body. Raises InvalidArgument."""
    tools = ServedTools()
    for index, body in enumerate(bodies or ()):
        path = f"tools[{index}]"
        match body.type or ("custom" if body.custom else "function"):
            case "function":
                function = _set(body.function, f"{path}.function")
                tools.function(function.name, function.description, function.parameters, f"{path}.function")
            case "custom":
                custom = _set(body.custom, f"{path}.custom")
                grammar = _grammar(custom.format, f"{path}.custom.format")
                syntax, definition = (grammar.syntax, grammar.definition) if grammar else ("", "")
                check_syntax(syntax, f"{path}.custom.format.grammar.syntax")
                tools.custom(custom.name, custom.description, f"{path}.custom", syntax=syntax, definition=definition)
            case kind:
                tools.leave_out(kind, path)
    return tools


def choice_of(choice: str | ToolChoiceObject | None) -> ToolChoice:
    """The choice of a body. Raises InvalidArgument."""
    if choice is None:
        return ToolChoice("auto")
    if isinstance(choice, str):
        return ToolChoice(mode_of(choice, "tool_choice"))
    match choice.type:
        case kind if kind in MODES:
            return ToolChoice(MODES[kind])
        case "allowed_tools":
            allowed = _set(choice.allowed_tools, "tool_choice.allowed_tools")
            path = "tool_choice.allowed_tools"
            names = [_named(tool, f"{path}.tools[{index}]")[0] for index, tool in enumerate(allowed.tools)]
            return ToolChoice(mode_of(allowed.mode, f"{path}.mode"), allowed=names, field="tool_choice")
        case "function" | "custom" | "tool":
            name, field = _named(choice, "tool_choice")
            if not name:
                raise InvalidArgument(f"{field} is empty", field=field)
            return ToolChoice("auto", named=name)
        case kind:
            return ToolChoice("auto", hosted=kind, field="tool_choice")


def call_of(body: ToolCallBody, path: str) -> ToolCall:
    """The domain's call. Raises InvalidArgument, Unimplemented."""
    match body.type or ("custom" if body.custom else "function"):
        case "function":
            return function_call(body.id or "", _set(body.function, f"{path}.function"), f"{path}.function")
        case "custom":
            custom = _set(body.custom, f"{path}.custom")
            return ToolCall(id=body.id or "", name=custom.name, arguments=input_arguments(custom.input))
        case kind:
            raise Unimplemented(f"{path}.type is {quoted(kind)}; known: function, custom", field=f"{path}.type")


def function_call(call_id: str, body: FunctionCallBody, path: str) -> ToolCall:
    """The domain's call of a function. Raises InvalidArgument."""
    if not body.name:
        raise InvalidArgument(f"{path}.name is empty", field=f"{path}.name")
    return ToolCall(id=call_id, name=body.name, arguments=arguments_text(body.arguments, f"{path}.arguments"))


def mode_of(text: str, field: str) -> str:
    """The domain's mode of a choice. Raises InvalidArgument."""
    if text not in MODES:
        raise InvalidArgument(f"{field} is {quoted(text)}; known: auto, none, required", field=field)
    return MODES[text]


def check_syntax(syntax: str, field: str) -> None:
    """Raise InvalidArgument for a grammar of an unknown form; an empty text is none."""
    if syntax not in ("", "lark", "regex"):
        raise InvalidArgument(f"{field} is {quoted(syntax)}; known: lark, regex", field=field)


def _grammar(format_: CustomFormatBody | None, path: str) -> GrammarBody | None:
    match format_.type if format_ else "text":
        case "text":
            return None
        case "grammar":
            return _set(format_.grammar if format_ else None, f"{path}.grammar")
        case kind:
            raise InvalidArgument(f"{path}.type is {quoted(kind)}; known: text, grammar", field=f"{path}.type")


def _named(body: AllowedToolBody, path: str) -> tuple[str, str]:
    """The name of a tool, and where it stands."""
    for name in ("function", "custom"):
        if (inner := getattr(body, name)) is not None:
            return inner.name, f"{path}.{name}.name"
    return body.name or "", f"{path}.name"


def _set(value: T | None, path: str) -> T:
    if value is None:
        raise InvalidArgument(f"{path} is not set", field=path, reason="MISSING_FIELD")
    return value

"""Tools of a request: the choice and the names of the tools in the prompt, and the inputs of custom tools in answers."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock_common.errors import InvalidArgument, excerpt, quoted
from penstock_frontend.call_types import Tool
from penstock_frontend.call_warnings import WarningKind, warn
from penstock_frontend.processing.chat.answers import ChatOutput
from penstock_frontend.processing.chat.tool_choice import named_choice
from penstock_frontend.processing.parsers.base import ToolCallDelta
from penstock_frontend.processing.parsers.call_scanner import whole

INPUT = "input"
"""Name of the only argument of a function that represents a custom tool. The value of this argument is a text."""
_SEPARATOR = "__"


class ServedTool(NamedTuple):
    """A tool that the prompt describes to the model.

    Attributes:
        tool: The function that the prompt describes.
        field: Path of the object in the request that has the name of the tool, such as ``tools[1].function``.
        name: The client's name of the tool.
        namespace: The client's name of the tool's namespace. Empty if the tool is in no namespace.
        custom: Whether the tool is a custom tool. The input of a custom tool is a text instead of arguments.
        syntax: Syntax of the grammar that the input must match. Empty if any text is allowed.
        schema: The name of the client's field with the schema of the arguments.
    """

    tool: Tool
    field: str
    name: str
    namespace: str = ""
    custom: bool = False
    syntax: str = ""
    schema: str = "parameters"


class ToolChoice(NamedTuple):
    """The tool choice of a request.

    Attributes:
        mode: ``auto``, ``none`` or ``required``.
        named: Name, in the prompt, of the tool that must be called. Empty if the choice names no tool.
        allowed: Names, in the prompt, of the tools that may be called. None if all tools may be called.
        hosted: Type of the tool that must be called, if the choice has a type instead of a name. Otherwise empty.
        field: Name of the field with the choice, for errors.
    """

    mode: str
    named: str = ""
    allowed: Collection[str] | None = None
    hosted: str = ""
    field: str = "tool_choice"


class ChosenTools(NamedTuple):
    """The tools that the model may call. ``names`` is the map from Penstock's field names to the client's field names,
    for errors.
    """

    tools: Sequence[Tool]
    mode: str
    named: str
    names: Mapping[str, str]


class ServedTools:
    """Tools of one request that the prompt describes. A tool that only another server can run is left out with a
    warning.
    """

    def __init__(self) -> None:
        self._served: list[ServedTool] = []
        self._by_name: dict[str, ServedTool] = {}
        self._left_out: list[tuple[str, str, str]] = []

    def function(
        self,
        name: str,
        description: str | None,
        parameters: dict[str, Any] | None,
        field: str,
        *,
        namespace: str = "",
        schema: str = "parameters",
    ) -> None:
        """Add a function to the tools of the request. ``schema`` is the name of the client's field with the schema
        ``parameters``. Raises InvalidArgument if the schema does not describe an object.
        """
        kind = (parameters or {}).get("type")
        if kind is not None and kind != "object":
            at = f"{field}.{schema}.type"
            raise InvalidArgument(
                f"{at} is {_shown(kind)}; it must be 'object', because the arguments of a tool are an object", field=at
            )
        tool = Tool(name=flat_name(name, namespace), description=description or "", parameters=parameters)
        self._add(ServedTool(tool, field, name, namespace, schema=schema))

    def custom(
        self,
        name: str,
        description: str | None,
        field: str,
        *,
        syntax: str = "",
        definition: str = "",
        namespace: str = "",
    ) -> None:
        """Add a custom tool, as a function with one text argument. ``syntax`` is the syntax of the grammar
        ``definition``.
        """
        text = {"type": "string"}
        told = description or ""
        if syntax:
            told += f"\n\nThe {INPUT} must match this {syntax} grammar:\n{definition}"
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
        tool = Tool(name=flat_name(name, namespace), description=told.strip(), parameters=schema)
        self._add(ServedTool(tool, field, name, namespace, custom=True, syntax=syntax))

    def leave_out(self, kind: str, field: str, name: str = "") -> None:
        """Leave out a tool that this server does not run, and warn the client. ``kind`` is the type of the tool."""
        self._left_out.append((kind, field, name))
        warn(
            WarningKind.TOOL_LEFT_OUT,
            field,
            f"is of type {quoted(kind)}, which this server does not run, and is left out",
        )

    def __bool__(self) -> bool:
        return bool(self._served)

    @property
    def has_custom(self) -> bool:
        """True if at least one tool of the request is a custom tool."""
        return any(served.custom for served in self._served)

    def called(self, name: str) -> ServedTool | None:
        """Return the tool that has this name in the prompt, or None if there is none."""
        return self._by_name.get(name)

    def chosen(self, choice: ToolChoice) -> ChosenTools:
        """Return the tools that remain after the tool choice was applied. Raises InvalidArgument if the choice requires
        a tool that was left out or does not exist.
        """
        self._check(choice)
        served = [
            each
            for each in self._served
            if choice.allowed is None or (not choice.named and each.tool.name in choice.allowed)
        ]
        mode, named = choice.mode, ""
        if choice.named:
            mode, named = named_choice(choice.named, field=choice.field)
        elif mode == "auto" and not served:
            mode = "none"
        if mode != "none":
            for each in served:
                if not named or named == each.tool.name:
                    _warn_of_grammar(each, forced=bool(named) or mode == "required")
        names: dict[str, str] = {}
        for index, each in enumerate(served):
            names[f"tools[{index}].parameters"] = f"{each.field}.{'format' if each.custom else each.schema}"
            names[f"tools[{index}]"] = each.field
        return ChosenTools([each.tool for each in served], mode, named, names)

    def _add(self, served: ServedTool) -> None:
        self._served.append(served)
        self._by_name.setdefault(served.tool.name, served)

    def _check(self, choice: ToolChoice) -> None:
        for kind, field, name in self._left_out:
            if choice.hosted == kind or (choice.named and choice.named == name):
                raise InvalidArgument(
                    f"{choice.field} requires a call of {field}, whose type is {quoted(kind)}; this server does not run "
                    "such tools: choose another tool, or 'auto'",
                    field=choice.field,
                )
        if choice.hosted:
            raise InvalidArgument(
                f"{choice.field} requires a call of a tool of type {quoted(choice.hosted)}; this server does not run such "
                "tools: choose another tool, or 'auto'",
                field=choice.field,
            )
        left = [each for each in self._served if choice.allowed is None or each.tool.name in choice.allowed]
        if choice.mode == "required" and not left and self._left_out:
            kinds = excerpt(", ".join(f"{field} is of type {quoted(kind)}" for kind, field, _ in self._left_out))
            raise InvalidArgument(
                f"{choice.field} requires a tool call, but this server supports none of the tools: {kinds}",
                field=choice.field,
            )
        if choice.allowed is not None and not left and choice.mode == "required":
            known = excerpt(", ".join(each.tool.name for each in self._served) or "none")
            raise InvalidArgument(
                f"{choice.field} requires a tool call, but allows none of the request's tools, which are: {known}",
                field=choice.field,
            )


def flat_name(name: str, namespace: str | None = "") -> str:
    """Return the name that a tool has in the prompt. The namespace becomes a prefix of it, because models do not know
    namespaces.
    """
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith(_SEPARATOR) else f"{namespace}{_SEPARATOR}{name}"


def _shown(value: object) -> str:
    return quoted(value) if isinstance(value, str) else excerpt(msgspec.json.encode(value).decode())


def _warn_of_grammar(served: ServedTool, *, forced: bool) -> None:
    if served.syntax == "regex" and forced:
        return
    if served.syntax:
        why = (
            "only calls that tool_choice requires are constrained"
            if served.syntax == "regex"
            else "only 'regex' is enforced"
        )
        warn(
            WarningKind.TOOL_FORMAT_NOT_ENFORCED,
            f"{served.field}.format",
            f"is a {served.syntax} grammar, which the model sees, but {why}",
        )


# The input of a custom tool is a text. The model writes it as the argument of the function that represents the tool.

_BEGIN = re.compile(rf'\s*{{\s*"{INPUT}"\s*:\s*"')
_CHARACTER = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[^u])|[^\\]", re.DOTALL)
_HIGH = re.compile(r"\\u[dD][89abAB]")
"""First half of a surrogate pair, of which the second half may be in the next piece."""


class InputReader:
    """Incremental reader of the text ``input`` in the arguments of a call, while the model generates these arguments.

    If the arguments do not begin with this field, the whole text of the arguments becomes the input.
    """

    def __init__(self) -> None:
        self._raw = ""
        self._begun = False
        self._ended = False

    def push(self, arguments: str) -> str:
        """Add the next piece of the arguments. Return the new part of the input."""
        if self._ended:
            return ""
        self._raw += arguments
        if not self._begun:
            begin = _BEGIN.match(self._raw)
            if begin is None:
                return ""
            self._begun, self._raw = True, self._raw[begin.end() :]
        return self._text()

    def finish(self) -> str:
        """Return the rest of the input at the end of the call. Return all arguments if they do not begin with
        ``input``.
        """
        if self._begun:
            return "" if self._ended else self._text(ended=True)
        try:
            found = json.loads(self._raw, strict=False)
        except (ValueError, RecursionError):
            return self._raw
        if isinstance(found, dict) and isinstance(found.get(INPUT), str):
            return whole(found[INPUT])
        return "" if found == {} else self._raw

    def _text(self, *, ended: bool = False) -> str:
        upto = 0
        while (match := _CHARACTER.match(self._raw, upto)) is not None:
            if match[0] == '"':
                self._ended = True
                break
            if not ended and _HIGH.match(match[0]) and len(self._raw) < match.end() + 6:
                break
            upto = match.end()
        written, self._raw = self._raw[:upto], self._raw[upto:]
        try:
            return whole(json.loads(f'"{written}"', strict=False))
        except ValueError:  # not an escape sequence that JSON allows
            return whole(written)


class CustomInputs:
    """Converter of the tool calls of one sequence. This class replaces the arguments of custom tools by the inputs of
    these tools.
    """

    def __init__(self, tools: ServedTools) -> None:
        self._tools = tools
        self._has_custom = tools.has_custom
        self._readers: dict[int, InputReader] = {}
        self._last: ToolCallDelta | None = None

    def read(self, output: ChatOutput) -> ChatOutput:
        """Return the output, in which calls of custom tools have an input in the place of arguments."""
        if not self._has_custom:
            return output
        calls: list[ToolCallDelta] = []
        for call in output.tool_calls:
            if self._last is not None and self._last.index != call.index:
                self._finish(calls)
            if call.name and (tool := self._tools.called(call.name)) is not None and tool.custom:
                self._readers[call.index] = InputReader()
            reader = self._readers.get(call.index)
            arguments = call.arguments if reader is None else reader.push(call.arguments)
            if call.name or arguments:
                calls.append(msgspec.structs.replace(call, arguments=arguments))
            self._last = call
        if output.finish is not None:
            self._finish(calls)
        return msgspec.structs.replace(output, tool_calls=calls)

    def _finish(self, calls: list[ToolCallDelta]) -> None:
        """Add the rest of the last call's input to the last piece of this call, or add a new piece with the rest."""
        last, self._last = self._last, None
        if last is None or (reader := self._readers.pop(last.index, None)) is None:
            return
        if not (rest := reader.finish()):
            return
        if calls and calls[-1].index == last.index:
            calls[-1] = msgspec.structs.replace(calls[-1], arguments=calls[-1].arguments + rest)
        else:
            calls.append(ToolCallDelta(index=last.index, id=last.id, arguments=rest))


def input_arguments(text: str) -> str:
    """Return the arguments for a call of a custom tool whose input is ``text``, in the form in which models write
    arguments.
    """
    return json.dumps({INPUT: text}, ensure_ascii=False)

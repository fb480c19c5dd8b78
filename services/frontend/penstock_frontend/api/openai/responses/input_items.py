"""Conversion of input items and tools to domain types, and of outputs to the history for a later response."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_frontend.api.openai import sampling_fields
from penstock_frontend.api.openai.conversation import (
    CONVERSATION,
    MODES,
    MediaOptions,
    check_syntax,
    effort_kwargs,
    is_media,
    media_of,
    mode_of,
)
from penstock_frontend.api.openai.errors import undecodable
from penstock_frontend.api.openai.response_format import Constraint
from penstock_frontend.api.openai.responses.response import (
    AllowedToolBody,
    FormatBody,
    FunctionTool,
    InputItem,
    InputPart,
    ResponseBody,
    ToolChoiceBody,
)
from penstock_frontend.api.tools import ChosenTools, ServedTools, ToolChoice, flat_name, input_arguments
from penstock_frontend.call_types import ChatMessage, ContentPart, ToolCall
from penstock_frontend.call_warnings import WarningKind, warn
from penstock_frontend.processing.chat.answers import Block, BlockKind
from penstock_frontend.processing.chat.histories import arguments_text

# The code below converts tool calls and results in the input to domain types, or to text in the prompt.

CALLS = (
    "function_call",
    "custom_tool_call",
    "local_shell_call",
    "shell_call",
    "apply_patch_call",
    "computer_call",
    "tool_search_call",
)
"""Types of tool calls whose result the client sends as a separate item."""
OUTPUTS = (
    "function_call_output",
    "custom_tool_call_output",
    "local_shell_call_output",
    "shell_call_output",
    "apply_patch_call_output",
    "computer_call_output",
    "tool_search_output",
)
TEXTS = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
)
"""Types of tool calls that OpenAI has run. Each such item contains both the call and its result."""
SECRETS = ("compaction", "compaction_summary", "context_compaction")
"""Types of encrypted items, which only the server that created them can read."""
_SHOWN = (
    "name",
    "server_label",
    "action",
    "operation",
    "arguments",
    "queries",
    "code",
    "approval_request_id",
    "approve",
    "reason",
    "outputs",
    "results",
    "tools",
    "error",
)


def call_of(item: InputItem, path: str) -> ToolCall:
    """Return the tool call of an item as a domain type. Raises InvalidArgument if the item is not valid."""
    call_id, kind = item.call_id or item.id or "", item.type or ""
    if kind in ("function_call", "custom_tool_call"):
        if not item.name:
            raise InvalidArgument(f"{path}.name is not set", field=f"{path}.name", reason="MISSING_FIELD")
        name = flat_name(item.name, item.namespace)
        if kind == "function_call":
            return ToolCall(id=call_id, name=name, arguments=arguments_text(item.arguments, f"{path}.arguments"))
        text = item.input if isinstance(item.input, str) else _text(item.input or "")
        return ToolCall(id=call_id, name=name, arguments=input_arguments(text))
    given = next((value for value in (item.action, item.operation, item.arguments) if value is not None), None)
    return ToolCall(id=call_id, name=kind.removesuffix("_call"), arguments=arguments_text(given, f"{path}.{_of(item)}"))


def output_of(item: InputItem, path: str) -> str | list[InputPart]:
    """Return the result of a tool in an item. The result is text and media, or other JSON as text. Raises
    InvalidArgument.
    """
    raw = b"" if isinstance(item.output, msgspec.UnsetType) else bytes(item.output)
    if raw in (b"", b"null"):
        shown = {"status": item.status} if item.type == "apply_patch_call_output" else {"tools": item.tools}
        return _text({name: value for name, value in shown.items() if value is not None}) if any(shown.values()) else ""
    if item.type in ("function_call_output", "custom_tool_call_output"):
        try:
            return msgspec.json.decode(raw, type=str | list[InputPart])
        except msgspec.DecodeError as e:
            if not raw.startswith(b"["):
                return raw.decode()
            raise undecodable(e, f"{path}.output") from None
    found = msgspec.json.decode(raw)
    if isinstance(found, Mapping) and isinstance(url := found.get("image_url"), str):
        return [InputPart(type="input_image", image_url=url)]
    return found if isinstance(found, str) else raw.decode()


def text_of(item: InputItem, path: str) -> str:
    """Return an item of a tool that OpenAI runs as text. Warn the client about the conversion."""
    shown = {name: value for name in _SHOWN if (value := getattr(item, name)) is not None}
    if not isinstance(item.output, msgspec.UnsetType) and bytes(item.output) != b"null":
        shown["output"] = msgspec.json.decode(bytes(item.output))
    warn(WarningKind.HISTORY_AS_TEXT, path, f"is of type '{item.type}', which the model sees as text")
    if item.result is not None:
        warn(
            WarningKind.HISTORY_LEFT_OUT,
            f"{path}.result",
            "is an image in an assistant message, which chat templates do not support",
        )
    return f"[{item.type} {_text(shown)}]"


def warn_of_secret(item: InputItem, path: str) -> None:
    """Warn the client about an encrypted item that is not in the prompt."""
    text = f"is of type '{item.type}' and is left out, because only the server that encrypted it can read it"
    warn(WarningKind.HISTORY_LEFT_OUT, path, text)


def _of(item: InputItem) -> str:
    return next((name for name in ("action", "operation") if getattr(item, name) is not None), "arguments")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


_TEXT_TYPES = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


class Turns(NamedTuple):
    """The messages as domain types, with the path of the first item of each message."""

    messages: list[ChatMessage]
    places: list[str]


def turns_of(given: str | Sequence[InputItem], options: MediaOptions) -> Turns:
    """Convert the input of a body to messages. Consecutive items of the assistant (reasoning, text and calls) become
    one message.

    The field paths of media are relative to the items of the media. Raises InvalidArgument and Unimplemented.
    """
    if isinstance(given, str):
        return Turns([ChatMessage(role="user", content=given)], ["input"])
    turns, places = _Turns(), []
    for index, item in enumerate(given):
        before = turns.count
        _add(turns, item, f"input[{index}]", options)
        places += [f"input[{index}]"] * (turns.count - before)
    return Turns(turns.all(), places)


def answered(blocks: Iterable[Block], tools: ServedTools) -> list[ChatMessage]:
    """Return the output of the assistant as messages. ``tools`` are the tools of the request that produced the output."""
    turns = _Turns()
    for block in blocks:
        if block.kind is BlockKind.REASONING:
            turns.thought(block.text)
        elif block.kind is BlockKind.TEXT:
            turns.said(block.text)
        else:
            tool = tools.called(block.name)
            arguments = input_arguments(block.text) if tool is not None and tool.custom else block.text
            turns.called(ToolCall(id=block.call_id, name=block.name, arguments=arguments))
    return turns.all()


def template_kwargs(body: ResponseBody) -> dict[str, Any]:
    """Return the variables of the chat template that the body sets."""
    effort = body.reasoning.effort if body.reasoning else None
    return {**effort_kwargs(effort, "reasoning.effort"), **(body.chat_template_kwargs or {})}


def format_constraint(format_: FormatBody | None) -> Constraint | None:
    """Return the output constraint in ``text.format``. Return None if there is none. Raises InvalidArgument if the
    format is not valid.
    """
    head, field = "text.format", "text.format.schema"
    match format_.type if format_ else "text":
        case "text":
            return None
        case "json_object":
            return Constraint(head, head, "json_object", True)
        case "json_schema" if format_ and format_.schema is not None:
            return Constraint(field, head, "json_schema", msgspec.json.encode(format_.schema).decode())
        case "json_schema":
            raise InvalidArgument(f"{field} is not set", field=field)
        case kind:
            raise InvalidArgument(
                f"text.format.type is {quoted(kind)}; known: text, json_object, json_schema", field="text.format.type"
            )


def names(body: ResponseBody, places: Sequence[str], before: int, chosen: ChosenTools) -> Mapping[str, str]:
    """Return the map from Penstock's field names to the client's field names, for errors.

    Args:
        body: the body of the request.
        places: paths of the messages of the input.
        before: number of messages that precede the messages of the input.
        chosen: the tools that the model may call.
    """
    own = format_constraint(body.text.format if body.text is not None else None)
    return {
        **{f"messages[{before + index}]": place for index, place in enumerate(places)},
        **CONVERSATION,
        **chosen.names,
        "text": "input",
        "prompt": "input",
        "messages": "input",
        "sampling_params.max_tokens": "max_output_tokens",
        **sampling_fields.names(body, own),
    }


class _Turns:
    """Messages that are still being put together.

    New content of the assistant is added to its last message, if chat templates write the new content after the
    existing content.
    """

    def __init__(self) -> None:
        self._done: list[ChatMessage] = []
        self._open: ChatMessage | None = None
        self._noted = False  # True if the last message has only notes so far

    def all(self) -> list[ChatMessage]:
        self._close()
        return self._done

    @property
    def count(self) -> int:
        return len(self._done) + (self._open is not None)

    def add(self, message: ChatMessage) -> None:
        self._close()
        self._done.append(message)

    def thought(self, text: str) -> None:
        if self._open is None or self._open.content is not None or self._open.tool_calls:
            self._begin()
        self._change(reasoning=(self._open.reasoning if self._open else "") + text)

    def noted(self, text: str) -> None:
        """Add a note about a tool between the texts of the assistant."""
        if self._open is None or self._open.tool_calls or not isinstance(self._open.content, str | None):
            self._begin()
        said = self._open.content if self._open is not None else None
        self._change(content=f"{said}\n{text}" if said else text)
        self._noted = True

    def said(self, content: str | Sequence[ContentPart] | None) -> None:
        if self._noted and self._open is not None and isinstance(self._open.content, str):
            if not isinstance(content, str | None):
                content = [ContentPart(type="text", text=self._open.content), *content]
            elif content:
                content = f"{self._open.content}\n{content}"
            self._noted = False
            self._change(content=content)
            return
        if self._open is None or self._open.content is not None or self._open.tool_calls:
            self._begin()
        self._change(content=content)

    def called(self, call: ToolCall) -> None:
        if self._open is None:
            self._begin()
        self._change(tool_calls=[*(self._open.tool_calls if self._open else ()), call])

    def _begin(self) -> None:
        self._close()
        self._noted = False
        self._open = ChatMessage(role="assistant")

    def _change(self, **fields: Any) -> None:
        self._open = msgspec.structs.replace(self._open or ChatMessage(role="assistant"), **fields)

    def _close(self) -> None:
        if self._open is not None:
            self._done.append(self._open)
            self._open = None


def _add(turns: _Turns, item: InputItem, path: str, options: MediaOptions) -> None:
    match item.type or "message":
        case "message":
            if item.role is None:
                raise _missing(f"{path}.role")
            content = _content(item.content, path, "content", options)
            if item.role == "assistant":
                turns.said(content)
            else:
                turns.add(ChatMessage(role=item.role, content=content))
        case kind if kind in CALLS:
            turns.called(call_of(item, path))
        case kind if kind in OUTPUTS:
            call_id = item.call_id or item.id
            if not call_id:
                raise _missing(f"{path}.call_id")
            output = _content(output_of(item, path), path, "output", options)
            turns.add(ChatMessage(role="tool", content=output, tool_call_id=call_id))
        case "reasoning":
            parts = item.content or item.summary or ()
            if thoughts := parts if isinstance(parts, str) else "".join(part.text for part in parts):
                turns.thought(thoughts)
            elif item.encrypted_content:
                warn_of_secret(item, path)
        case kind if kind in TEXTS:
            turns.noted(text_of(item, path))
        case kind if kind in SECRETS:
            warn_of_secret(item, path)
        case kind:
            known = ", ".join(["message", "reasoning", *CALLS, *OUTPUTS, *TEXTS])
            raise Unimplemented(f"{path}.type is {quoted(kind)}; known: {known}", field=f"{path}.type")


def _content(
    content: str | Sequence[InputPart] | None, path: str, name: str, options: MediaOptions
) -> str | list[ContentPart]:
    """Return the content of a message as text, or as parts of text and media. Raises Unimplemented for other parts, and
    the errors of ``media_of``.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return [_part(part, path, f"{name}[{index}]", options) for index, part in enumerate(content)]


def _part(part: InputPart, path: str, place: str, options: MediaOptions) -> ContentPart:
    """Convert a part of an item to a domain type. ``place`` is the path of the part in its item."""
    if is_media(part.type):
        media = media_of(part.type, part, f"{path}.{place}", options)
        relative = msgspec.structs.replace(media, field=media.field.removeprefix(f"{path}."))
        return ContentPart(type="media", media=relative)
    if part.type not in _TEXT_TYPES:
        field = f"{path}.{place}.type"
        raise Unimplemented(f"{field} is {quoted(part.type)}; known: input_text, input_image", field=field)
    return ContentPart(type="text", text=part.text or part.refusal)


def _missing(field: str) -> InvalidArgument:
    return InvalidArgument(f"{field} is not set", field=field, reason="MISSING_FIELD")


# The code below converts tools and the tool choice.

SERVED = ("function", "custom", "namespace")
"""Types of tools that the prompt describes to the model. Tools of other types are left out."""


def tools_of(bodies: Sequence[FunctionTool] | None) -> ServedTools:
    """Return the tools of a body as domain types. Raises InvalidArgument if a tool is not valid.

    A tool in a namespace becomes a function whose name begins with the name of the namespace.
    """
    tools = ServedTools()
    for index, body in enumerate(bodies or ()):
        _add_tool(tools, body, f"tools[{index}]", "")
    return tools


def choice_of(choice: str | ToolChoiceBody | None) -> ToolChoice:
    """Return the tool choice of a body. Raises InvalidArgument if the tool choice is not valid."""
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


def _add_tool(tools: ServedTools, body: FunctionTool, path: str, namespace: str) -> None:
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
                _add_tool(tools, inner, f"{path}.tools[{index}]", body.name)
        case kind:
            tools.leave_out(kind, path, body.name)


def _grammar(body: FunctionTool, path: str) -> tuple[str, str]:
    """Return the syntax and the definition of the grammar of a custom tool. Syntax and definition are empty if the tool
    has no grammar.
    """
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

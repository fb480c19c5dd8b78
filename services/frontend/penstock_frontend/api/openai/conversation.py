"""Messages and tools as chat completions write them, to the domain's."""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_frontend.api.openai.media_fields import MEDIA_TYPES, MediaFields, MediaOptions, is_media, media_of
from penstock_frontend.call_types import ChatMessage, ContentPart, Tool, ToolCall
from penstock_frontend.processing.chat.tool_choice import named_choice

_NO_OPTIONS = MediaOptions()
CONVERSATION = {"prompt is": "the conversation with its template and tools is"}
"""What a prompt is called that a chat template has made."""


class FunctionCallBody(msgspec.Struct, frozen=True, kw_only=True):
    """A call as it was made. ``arguments``: a JSON object as text, or as it is."""

    name: str = ""
    arguments: str | dict[str, Any] = ""


class ToolCallBody(msgspec.Struct, frozen=True, kw_only=True):
    """A call in a message of the assistant's."""

    id: str | None = None
    type: str = "function"
    function: FunctionCallBody


class PartBody(MediaFields, frozen=True, kw_only=True):
    """A part of a message's content: text or a medium. The domain refuses what is neither."""

    type: str
    text: str = ""


class MessageBody(msgspec.Struct, frozen=True, kw_only=True):
    """A turn. What an assistant thought has two names."""

    role: str
    content: str | list[PartBody] | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    function_call: Any = None
    audio: Any = None


class FunctionBody(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call. Schemas of tools that must be called are enforced, whatever ``strict`` says."""

    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolBody(msgspec.Struct, frozen=True, kw_only=True):
    """A tool: a function."""

    type: str = "function"
    function: FunctionBody


class NamedFunction(msgspec.Struct, frozen=True):
    """The name of a function."""

    name: str


class NamedToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The tool that must be called."""

    type: str = "function"
    function: NamedFunction | None = None


def messages_of(bodies: Sequence[MessageBody], options: MediaOptions = _NO_OPTIONS) -> list[ChatMessage]:
    """The domain's messages. Raises InvalidArgument, Unimplemented."""
    return [_message(body, f"messages[{index}]", options) for index, body in enumerate(bodies)]


def tools_of(bodies: Sequence[ToolBody] | None) -> list[Tool]:
    """The domain's tools. Raises Unimplemented."""
    for index, body in enumerate(bodies or ()):
        _check_function(body.type, f"tools[{index}]")
    return [
        Tool(name=body.function.name, description=body.function.description or "", parameters=body.function.parameters)
        for body in bodies or ()
    ]


def choice_of(choice: str | NamedToolChoice | None, *, tools: bool) -> tuple[str, str]:
    """The domain's ``tool_choice`` and ``named_tool``. Without a choice it is ``auto``, without tools ``none``."""
    if choice is None:
        return ("auto" if tools else "none"), ""
    if isinstance(choice, str):
        return choice, ""
    _check_function(choice.type, "tool_choice")
    if choice.function is None:
        raise InvalidArgument("tool_choice.function is not set", field="tool_choice.function")
    return named_choice(choice.function.name, field="tool_choice.function.name")


def _message(body: MessageBody, path: str, options: MediaOptions) -> ChatMessage:
    for name, instead in (("function_call", "; use tool_calls"), ("audio", "")):
        if getattr(body, name) is not None:
            raise Unimplemented(f"{path}.{name} is not served{instead}", field=f"{path}.{name}")
    content = body.content
    return ChatMessage(
        role=body.role,
        content=content
        if content is None or isinstance(content, str)
        else [_part(part, f"{path}.content[{index}]", options) for index, part in enumerate(content)],
        tool_calls=[_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(body.tool_calls or ())],
        tool_call_id=body.tool_call_id or "",
        reasoning=body.reasoning_content or body.reasoning or "",
        name=body.name or "",
    )


def _part(body: PartBody, path: str, options: MediaOptions) -> ContentPart:
    if is_media(body.type):
        return ContentPart(type="media", media=media_of(body.type, body, path, options))
    if body.type != "text":
        known = ", ".join(["text", *MEDIA_TYPES])
        raise InvalidArgument(f"{path}.type is {quoted(body.type)}; known: {known}", field=f"{path}.type")
    return ContentPart(type=body.type, text=body.text)


def _call(body: ToolCallBody, path: str) -> ToolCall:
    _check_function(body.type, path)
    arguments = body.function.arguments
    return ToolCall(
        id=body.id or "",
        name=body.function.name,
        arguments=arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode(),
    )


def _check_function(kind: str, path: str) -> None:
    if kind != "function":
        raise Unimplemented(f"{path}.type is {quoted(kind)}; only 'function' is served", field=f"{path}.type")

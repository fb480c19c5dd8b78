"""Messages as chat completions write them, to the domain's."""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument, quoted
from penstock_frontend.api.openai.chat_tools import FunctionCallBody, ToolCallBody, call_of, function_call
from penstock_frontend.api.openai.media_fields import MEDIA_TYPES, MediaFields, MediaOptions, is_media, media_of
from penstock_frontend.call_types import ChatMessage, ContentPart
from penstock_frontend.processing.chat.histories import warn_of_lost_calls
from penstock_frontend.telemetry.call_warnings import WarningKind, warn

_NO_OPTIONS = MediaOptions()
CONVERSATION = {"prompt is": "the conversation with its template and tools is"}
"""What a prompt is called that a chat template has made."""


class PartBody(MediaFields, frozen=True, kw_only=True):
    """A part of a message's content: text or a medium. The domain refuses what is neither."""

    type: str
    text: str = ""
    refusal: str | None = None


class MessageBody(msgspec.Struct, frozen=True, kw_only=True):
    """A turn. What an assistant thought has two names. ``function_call`` and the role ``function`` are OpenAI's older form of
    a call and its result.
    """

    role: str
    content: str | list[PartBody] | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    function_call: FunctionCallBody | None = None
    audio: Any = None


def messages_of(bodies: Sequence[MessageBody], options: MediaOptions = _NO_OPTIONS) -> list[ChatMessage]:
    """The domain's messages. Raises InvalidArgument, Unimplemented."""
    messages = [_message(body, f"messages[{index}]", options) for index, body in enumerate(bodies)]
    warn_of_lost_calls(messages, [f"messages[{index}]" for index in range(len(messages))])
    return messages


def _message(body: MessageBody, path: str, options: MediaOptions) -> ChatMessage:
    if body.audio is not None:
        warn(WarningKind.HISTORY_LEFT_OUT, f"{path}.audio", "is an answer as sound, which this server does not keep")
    calls = [call_of(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(body.tool_calls or ())]
    if body.function_call is not None:
        calls.append(function_call("", body.function_call, f"{path}.function_call"))
    content = body.content
    return ChatMessage(
        role="tool" if body.role == "function" else body.role,
        content=content
        if content is None or isinstance(content, str)
        else [_part(part, f"{path}.content[{index}]", options) for index, part in enumerate(content)],
        tool_calls=calls,
        tool_call_id=body.tool_call_id or "",
        reasoning=body.reasoning_content or body.reasoning or "",
        name=body.name or "",
    )


def _part(body: PartBody, path: str, options: MediaOptions) -> ContentPart:
    if is_media(body.type):
        return ContentPart(type="media", media=media_of(body.type, body, path, options))
    if body.type == "refusal":
        return ContentPart(type="text", text=body.refusal or "")
    if body.type != "text":
        known = ", ".join(["text", *MEDIA_TYPES])
        raise InvalidArgument(f"{path}.type is {quoted(body.type)}; known: {known}", field=f"{path}.type")
    return ContentPart(type=body.type, text=body.text)

"""Messages as chat templates read them."""

import json
from collections.abc import Sequence
from typing import Any

from penstock_common.errors import InvalidArgument, quoted
from penstock_frontend.call_types import ChatMessage, ContentPart, ToolCall
from penstock_frontend.media_parts import MediaPart
from penstock_frontend.processing.chat.content_format import ContentFormat
from penstock_frontend.processing.chat.histories import arguments_text
from penstock_frontend.processing.chat.places import Places

ROLES = ("system", "developer", "user", "assistant", "tool")
Content = str | list[dict[str, str]]


class MessageReader:
    """Checks the messages of one conversation. ``places``: of its media; None where it has none. ``form``: how the template reads
    contents.
    """

    def __init__(self, form: ContentFormat, places: Places | None, *, by_parts: bool) -> None:
        """``by_parts``: contents are given in parts where the template reads parts."""
        self._by_parts = by_parts and form.reads_parts
        self._tells_text = form.tells_text
        self._places = places
        self._num_media = 0

    def variable(self, message: ChatMessage, path: str) -> dict[str, Any]:
        """A message as chat templates read it: a key is there only where it says something, ``content`` always."""
        if message.role not in ROLES:
            raise InvalidArgument(
                f"{path}.role is {quoted(message.role)}; known: {', '.join(ROLES)}", field=f"{path}.role"
            )
        variable: dict[str, Any] = {"role": message.role, "content": self._content(message.content, path)}
        if message.tool_calls:
            if message.role != "assistant":
                raise InvalidArgument(
                    f"{path}.tool_calls is set; a message with role {quoted(message.role)} has none",
                    field=f"{path}.tool_calls",
                )
            variable["tool_calls"] = [
                _call_variable(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
            ]
        if message.reasoning:
            # Templates have not agreed on its name.
            variable["reasoning_content"] = variable["reasoning"] = variable["thinking"] = message.reasoning
        if message.tool_call_id:
            variable["tool_call_id"] = message.tool_call_id
        if message.name:
            variable["name"] = message.name
        return variable

    def _content(self, content: str | Sequence[ContentPart] | None, path: str) -> Content:
        if content is None or isinstance(content, str):
            return self.text_content(content or "")
        for index, part in enumerate(content):
            _check_part(part, f"{path}.content[{index}]")
        if self._by_parts:
            return [_part_variable(part) for part in content]
        return "\n".join(self._text(part) for part in content)

    def text_content(self, text: str) -> Content:
        """A text as a content."""
        return text if not self._by_parts or self._tells_text else [_text_part(text)]

    def _text(self, part: ContentPart) -> str:
        if part.media is None or self._places is None:
            return part.text
        self._num_media += 1
        return self._places.named(self._num_media - 1)


def media_of(messages: Sequence[ChatMessage]) -> list[MediaPart]:
    """The media of a conversation, in order."""
    return [
        part.media
        for message in messages
        if message.content is not None and not isinstance(message.content, str)
        for part in message.content
        if part.media is not None
    ]


def add_text(content: Content, text: str) -> Content:
    """A content with ``text`` at its end."""
    if isinstance(content, str):
        return content + text
    if content and content[-1]["type"] == "text":
        return [*content[:-1], _text_part(content[-1]["text"] + text)]
    return [*content, _text_part(text)]


def size_of(content: Content) -> int:
    """Characters of its texts."""
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)


def _check_part(part: ContentPart, path: str) -> None:
    if part.type not in ("text", "media"):
        raise InvalidArgument(f"{path}.type is {quoted(part.type)}; known: text, media", field=f"{path}.type")
    if (part.type == "media") != (part.media is not None):
        raise InvalidArgument(f"{path}: a part has media where its type is 'media'", field=path)


def _part_variable(part: ContentPart) -> dict[str, str]:
    """A medium is told by its type, or by a key of that name: templates look for either. What it shows is not for them."""
    return _text_part(part.text) if part.media is None else {"type": part.media.modality, part.media.modality: ""}


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _call_variable(call: ToolCall, path: str) -> dict[str, Any]:
    if not call.name:
        raise InvalidArgument(f"{path}.name is empty", field=f"{path}.name")
    arguments = json.loads(arguments_text(call.arguments, f"{path}.arguments"))
    function = {"name": call.name, "arguments": arguments}
    # Most templates read calls in OpenAI's form.
    return {"id": call.id, "type": "function", "function": function}

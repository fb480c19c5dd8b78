"""What media of conversations are called in errors, where messages get their places after they are read."""

from collections.abc import Sequence

import msgspec

from penstock_frontend.call_types import ChatMessage, ContentPart


def placed(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages with the fields of their media, which are relative to their messages, as those of the conversation."""
    return [_placed(message, f"messages[{index}].") for index, message in enumerate(messages)]


def _placed(message: ChatMessage, prefix: str) -> ChatMessage:
    if message.content is None or isinstance(message.content, str) or not any(part.media for part in message.content):
        return message
    return msgspec.structs.replace(message, content=[_part(part, prefix) for part in message.content])


def _part(part: ContentPart, prefix: str) -> ContentPart:
    if part.media is None:
        return part
    return msgspec.structs.replace(part, media=msgspec.structs.replace(part.media, field=prefix + part.media.field))

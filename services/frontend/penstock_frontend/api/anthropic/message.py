"""A message, and the events of a streamed one."""

from collections.abc import Sequence
from typing import Any

import msgspec


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """What the model thought. ``signature`` has it where the client wants it omitted, and is empty otherwise."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. ``input_tokens`` has what was computed of the input, ``cache_read_input_tokens`` what was cached."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. ``stop_sequence``: the one that ended it."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: Sequence[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage


class TokenCount(msgspec.Struct, frozen=True):
    """Tokens of the prompt that a conversation becomes."""

    input_tokens: int


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What all events have; some have nothing else."""

    type: str


class MessageStart(StreamEvent, frozen=True, kw_only=True):
    """``message_start``: the message without content."""

    message: AssistantMessage


class BlockStart(StreamEvent, frozen=True, kw_only=True):
    """``content_block_start``: a block without text."""

    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text_delta"):
    """More of a text."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking_delta"):
    """More of what the model thinks."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="signature_delta"):
    """The signature of what the model thought."""

    signature: str


class JsonDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_json_delta"):
    """More of a call's input, as JSON text."""

    partial_json: str


class BlockDelta(StreamEvent, frozen=True, kw_only=True):
    """``content_block_delta``."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | JsonDelta


class BlockStop(StreamEvent, frozen=True, kw_only=True):
    """``content_block_stop``."""

    index: int


class EndDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Why the message ended."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(StreamEvent, frozen=True, kw_only=True):
    """``message_delta``: the end, and the counts of all of it."""

    delta: EndDelta
    usage: Usage

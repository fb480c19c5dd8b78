"""The answer to ``/v1/messages``: the message, its streaming events, and the writer that makes both."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from penstock_common.types.outputs import FinishReason
from penstock_frontend.call_types import Finish
from penstock_frontend.processing.chat.answers import Block, BlockKind, BlockPiece, Blocks, ChatOutput


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


# Thinking that a client does not want to show travels in the signature of its block, and comes back with the history.
# The text is encoded, not encrypted. Clients treat signatures as opaque and send them back unchanged.

_PREFIX = "penstock.thinking."


def sealed(thinking: str) -> str:
    """Return the signature of a block whose thinking is omitted."""
    return _PREFIX + base64.b64encode(thinking.encode()).decode()


def opened(signature: str) -> str:
    """Return the thinking in a signature; empty if another server made the signature."""
    if not signature.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_PREFIX), validate=True).decode()
    except ValueError:  # not ours, or cut off
        return ""


# The writer of a message.

_REASONS: Mapping[FinishReason, str] = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.REPETITION: "end_turn",
}
_NOTHING = Usage(input_tokens=0, cache_read_input_tokens=0, output_tokens=0)


class MessageWriter:
    """Makes events of outputs, and a message of all of them."""

    def __init__(self, message_id: str, model: str, *, parallel_calls: bool, thinking: bool = True) -> None:
        """``thinking``: whether it is shown; otherwise only its signature has it."""
        self._blocks = Blocks(parallel_calls=parallel_calls)
        self._thinking = thinking
        self._end = EndDelta(stop_reason=None, stop_sequence=None)
        self._begun = AssistantMessage(
            id=message_id, model=model, content=(), stop_reason=None, stop_sequence=None, usage=_NOTHING
        )
        self._usage = _NOTHING

    def begin(self, input_tokens: int) -> StreamEvent:
        """The first event, with the tokens of the prompt: how many of them were cached is told at the end."""
        usage = msgspec.structs.replace(_NOTHING, input_tokens=input_tokens)
        return MessageStart(type="message_start", message=msgspec.structs.replace(self._begun, usage=usage))

    def take(self, output: ChatOutput) -> Iterator[StreamEvent]:
        """The events of a piece of output, those of the message's end among them."""
        for piece in self._blocks.push(output):
            yield from self._events(piece)
        if output.finish is not None:
            self._finish(output.finish)
            yield MessageDelta(type="message_delta", delta=self._end, usage=self._usage)
            yield StreamEvent(type="message_stop")

    def whole(self) -> AssistantMessage:
        """The message, once it has ended."""
        return msgspec.structs.replace(
            self._begun,
            content=[self._content(block) for block in self._blocks.all],
            stop_reason=self._end.stop_reason,
            stop_sequence=self._end.stop_sequence,
            usage=self._usage,
        )

    def _finish(self, finish: Finish) -> None:
        sequence = finish.stop_reason if isinstance(finish.stop_reason, str) else None
        reason = "stop_sequence" if sequence is not None else _REASONS.get(finish.reason, "end_turn")
        if reason == "end_turn" and self._blocks.has(BlockKind.CALL):
            reason = "tool_use"
        self._end = EndDelta(stop_reason=reason, stop_sequence=sequence)
        usage = finish.usage
        self._usage = Usage(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
        )

    def _events(self, piece: BlockPiece) -> Iterator[StreamEvent]:
        block = piece.block
        omitted = block.kind is BlockKind.REASONING and not self._thinking
        if piece.begins:
            begun = _empty(block)
            yield BlockStart(type="content_block_start", index=block.index, content_block=begun)
        if piece.text and not omitted:
            yield _delta(block, _more(block, piece.text))
        if piece.ends:
            if block.kind is BlockKind.REASONING:
                yield _delta(block, SignatureDelta(signature=sealed(block.text) if omitted else ""))
            yield BlockStop(type="content_block_stop", index=block.index)

    def _content(self, block: Block) -> ContentBlock:
        match block.kind:
            case BlockKind.TEXT:
                return TextBlock(text=block.text)
            case BlockKind.REASONING if self._thinking:
                return ThinkingBlock(thinking=block.text)
            case BlockKind.REASONING:
                return ThinkingBlock(thinking="", signature=sealed(block.text))
            case BlockKind.CALL:
                return ToolUseBlock(id=block.call_id, name=block.name, input=_input(block.text))


def _delta(block: Block, delta: TextDelta | ThinkingDelta | SignatureDelta | JsonDelta) -> StreamEvent:
    return BlockDelta(type="content_block_delta", index=block.index, delta=delta)


def _more(block: Block, text: str) -> TextDelta | ThinkingDelta | JsonDelta:
    match block.kind:
        case BlockKind.TEXT:
            return TextDelta(text=text)
        case BlockKind.REASONING:
            return ThinkingDelta(thinking=text)
        case BlockKind.CALL:
            return JsonDelta(partial_json=text)


def _empty(block: Block) -> ContentBlock:
    """Return the block as a stream begins it."""
    match block.kind:
        case BlockKind.TEXT:
            return TextBlock(text="")
        case BlockKind.REASONING:
            return ThinkingBlock(thinking="")
        case BlockKind.CALL:
            return ToolUseBlock(id=block.call_id, name=block.name, input={})


def _input(arguments: str) -> dict[str, object]:
    """A call's arguments as an object. A model may have been cut off, or have written none: then it is empty."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}

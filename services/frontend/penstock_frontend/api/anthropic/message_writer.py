"""A message in the making: its blocks, its events, its end."""

from collections.abc import Iterator, Mapping

import msgspec

from penstock_common.types.outputs import FinishReason
from penstock_frontend.api.anthropic import message as parts
from penstock_frontend.api.anthropic.message import AssistantMessage, ContentBlock, StreamEvent, Usage
from penstock_frontend.api.anthropic.omitted_thinking import sealed
from penstock_frontend.call_types import Finish
from penstock_frontend.processing.chat.answers import ChatOutput
from penstock_frontend.processing.chat.blocks import Block, BlockKind, BlockPiece, Blocks

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
        self._end = parts.EndDelta(stop_reason=None, stop_sequence=None)
        self._begun = AssistantMessage(
            id=message_id, model=model, content=(), stop_reason=None, stop_sequence=None, usage=_NOTHING
        )
        self._usage = _NOTHING

    def begin(self, input_tokens: int) -> StreamEvent:
        """The first event, with the tokens of the prompt: how many of them were cached is told at the end."""
        usage = msgspec.structs.replace(_NOTHING, input_tokens=input_tokens)
        return parts.MessageStart(type="message_start", message=msgspec.structs.replace(self._begun, usage=usage))

    def take(self, output: ChatOutput) -> Iterator[StreamEvent]:
        """The events of a piece of output, those of the message's end among them."""
        for piece in self._blocks.push(output):
            yield from self._events(piece)
        if output.finish is not None:
            self._finish(output.finish)
            yield parts.MessageDelta(type="message_delta", delta=self._end, usage=self._usage)
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
        self._end = parts.EndDelta(stop_reason=reason, stop_sequence=sequence)
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
            yield parts.BlockStart(type="content_block_start", index=block.index, content_block=begun)
        if piece.text and not omitted:
            yield _delta(block, _more(block, piece.text))
        if piece.ends:
            if block.kind is BlockKind.REASONING:
                yield _delta(block, parts.SignatureDelta(signature=sealed(block.text) if omitted else ""))
            yield parts.BlockStop(type="content_block_stop", index=block.index)

    def _content(self, block: Block) -> ContentBlock:
        match block.kind:
            case BlockKind.TEXT:
                return parts.TextBlock(text=block.text)
            case BlockKind.REASONING if self._thinking:
                return parts.ThinkingBlock(thinking=block.text)
            case BlockKind.REASONING:
                return parts.ThinkingBlock(thinking="", signature=sealed(block.text))
            case BlockKind.CALL:
                return parts.ToolUseBlock(id=block.call_id, name=block.name, input=_input(block.text))


def _delta(
    block: Block, delta: parts.TextDelta | parts.ThinkingDelta | parts.SignatureDelta | parts.JsonDelta
) -> StreamEvent:
    return parts.BlockDelta(type="content_block_delta", index=block.index, delta=delta)


def _more(block: Block, text: str) -> parts.TextDelta | parts.ThinkingDelta | parts.JsonDelta:
    match block.kind:
        case BlockKind.TEXT:
            return parts.TextDelta(text=text)
        case BlockKind.REASONING:
            return parts.ThinkingDelta(thinking=text)
        case BlockKind.CALL:
            return parts.JsonDelta(partial_json=text)


def _empty(block: Block) -> ContentBlock:
    """Return the block as a stream begins it."""
    match block.kind:
        case BlockKind.TEXT:
            return parts.TextBlock(text="")
        case BlockKind.REASONING:
            return parts.ThinkingBlock(thinking="")
        case BlockKind.CALL:
            return parts.ToolUseBlock(id=block.call_id, name=block.name, input={})


def _input(arguments: str) -> dict[str, object]:
    """A call's arguments as an object. A model may have been cut off, or have written none: then it is empty."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}

"""Types of the request bodies, messages and streaming events of ``/v1/messages``, and the writer of messages."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_common.types.outputs import FinishReason
from penstock_frontend.api.openai import sampling_fields
from penstock_frontend.api.openai.body_fields import check_range, refuse_fields, shown
from penstock_frontend.api.openai.errors import undecodable
from penstock_frontend.api.openai.sampling_fields import SamplingFields
from penstock_frontend.call_types import Finish
from penstock_frontend.processing.chat.answers import Block, BlockKind, BlockPiece, Blocks, ChatOutput

# The types below are the answer to ``/v1/messages``: the message and its streaming events.


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Block of a message with text."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """Block of an answer with reasoning of the model. If the client has asked the server to omit reasoning,
    ``thinking`` is empty, and ``signature`` contains the encoded reasoning. Otherwise ``signature`` is empty.
    """

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """Block of a message with a tool call."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of an answer. ``input_tokens`` is the number of input tokens that were computed, and
    ``cache_read_input_tokens`` is the number of cached input tokens.
    """

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message, which is the answer. ``stop_sequence`` is the stop sequence that ended the answer, or
    null.
    """

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: Sequence[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage


class TokenCount(msgspec.Struct, frozen=True):
    """Number of tokens in the prompt that a conversation is rendered to."""

    input_tokens: int


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of all streaming events. Some events have no fields besides their type."""

    type: str


class MessageStart(StreamEvent, frozen=True, kw_only=True):
    """Event ``message_start``, which has the message without content."""

    message: AssistantMessage


class BlockStart(StreamEvent, frozen=True, kw_only=True):
    """Event ``content_block_start``, which has a block without content."""

    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text_delta"):
    """The next piece of a text block."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking_delta"):
    """The next piece of a reasoning block."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="signature_delta"):
    """The signature of a reasoning block in a stream."""

    signature: str


class JsonDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_json_delta"):
    """The next piece of the input of a tool call, as JSON text."""

    partial_json: str


class BlockDelta(StreamEvent, frozen=True, kw_only=True):
    """Event ``content_block_delta``, which has the next piece of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | JsonDelta


class BlockStop(StreamEvent, frozen=True, kw_only=True):
    """Event ``content_block_stop``, which ends a block."""

    index: int


class EndDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Reason for which the message ended."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(StreamEvent, frozen=True, kw_only=True):
    """Event ``message_delta``, which has the reason for the end of the message, and the token counts of the message."""

    delta: EndDelta
    usage: Usage


# If a client asks to omit reasoning, the signature of the block contains the reasoning. Clients return signatures
# unchanged with the conversation, so the model can read its earlier reasoning. The text in the signature is encoded,
# not encrypted.

_PREFIX = "penstock.thinking."


def sealed(thinking: str) -> str:
    """Return the signature of a block whose reasoning the client does not want to see."""
    return _PREFIX + base64.b64encode(thinking.encode()).decode()


def opened(signature: str) -> str:
    """Return the reasoning that a signature contains. Return an empty text if another server created the signature."""
    if not signature.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_PREFIX), validate=True).decode()
    except ValueError:  # the signature comes from another server, or is cut off
        return ""


# The code below writes a message.

_REASONS: Mapping[FinishReason, str] = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.REPETITION: "end_turn",
}
_NOTHING = Usage(input_tokens=0, cache_read_input_tokens=0, output_tokens=0)


class MessageWriter:
    """Converts outputs into streaming events, and into one complete message at the end."""

    def __init__(self, message_id: str, model: str, *, parallel_calls: bool, thinking: bool = True) -> None:
        """Create the writer of one message. If ``thinking`` is True, reasoning is shown. If ``thinking`` is False,
        reasoning is only in the signature of its block.
        """
        self._blocks = Blocks(parallel_calls=parallel_calls)
        self._thinking = thinking
        self._end = EndDelta(stop_reason=None, stop_sequence=None)
        self._begun = AssistantMessage(
            id=message_id, model=model, content=(), stop_reason=None, stop_sequence=None, usage=_NOTHING
        )
        self._usage = _NOTHING

    def begin(self, input_tokens: int) -> StreamEvent:
        """Return the first event, which has the number of prompt tokens. The number of cached prompt tokens is in the
        last event.
        """
        usage = msgspec.structs.replace(_NOTHING, input_tokens=input_tokens)
        return MessageStart(type="message_start", message=msgspec.structs.replace(self._begun, usage=usage))

    def take(self, output: ChatOutput) -> Iterator[StreamEvent]:
        """Return the streaming events for a piece of output. For the last piece, these include the end of the message."""
        for piece in self._blocks.push(output):
            yield from self._events(piece)
        if output.finish is not None:
            self._finish(output.finish)
            yield MessageDelta(type="message_delta", delta=self._end, usage=self._usage)
            yield StreamEvent(type="message_stop")

    def whole(self) -> AssistantMessage:
        """Return the complete message for an answer that is not streamed. All output must have arrived."""
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
    """Return a copy of the block without content, as it is at its start in a stream."""
    match block.kind:
        case BlockKind.TEXT:
            return TextBlock(text="")
        case BlockKind.REASONING:
            return ThinkingBlock(thinking="")
        case BlockKind.CALL:
            return ToolUseBlock(id=block.call_id, name=block.name, input={})


def _input(arguments: str) -> dict[str, object]:
    """Return the arguments of a tool call as an object. The object is empty if the arguments are missing or incomplete."""
    try:
        found = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


# The types below are the request bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``.

_INT32_MAX = 2**31 - 1
_THINKING = ("enabled", "adaptive", "disabled")


class SourceBody(msgspec.Struct, frozen=True, kw_only=True):
    """Source of the content of an image or document.

    The source of an image is ``base64`` (media type and data) or ``url``. The source of a document is ``text`` or
    ``content`` (blocks).
    """

    type: str
    media_type: str = ""
    data: str = ""
    url: str = ""
    content: Any = None


class BlockBody(msgspec.Struct, frozen=True, kw_only=True):
    """A block of a message's content in the request. If an earlier answer omitted its reasoning, as the client had
    asked, ``thinking`` is empty, and ``signature`` contains the encoded reasoning.
    """

    type: str
    text: str = ""
    thinking: str = ""
    signature: str = ""
    id: str = ""
    name: str = ""
    input: Any = None
    tool_use_id: str = ""
    content: Any = None
    is_error: bool | None = None
    source: SourceBody | str | None = None
    title: str | None = None
    context: str | None = None
    tool_name: str = ""


class TurnBody(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the conversation in the request body."""

    role: str
    content: str | list[BlockBody]


class ClientToolBody(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of the body that the client runs. ``type`` is null or ``custom``. Tools of other types are left out,
    because Anthropic runs or defines them.
    """

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolUseChoiceBody(msgspec.Struct, frozen=True, kw_only=True):
    """Tool choice: ``auto``, ``any``, ``none``, or ``tool`` with the name of a tool."""

    type: str
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for reasoning. ``type`` turns reasoning on or off, if the model's chat template supports this.
    ``budget_tokens`` limits the reasoning.

    If ``display`` is ``omitted``, only the signature contains the reasoning.
    """

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class AnswerFormatBody(msgspec.Struct, frozen=True, kw_only=True):
    """Required format of the answer, which can only be ``json_schema``."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfigBody(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for the answer. ``effort`` becomes a variable of the chat template."""

    effort: str | None = None
    format: AnswerFormatBody | None = None


class ConversationBody(SamplingFields, kw_only=True):
    """Fields that the bodies of both routes share.

    The sampling fields have vLLM's names. The sampling fields have no effect when only tokens are counted.
    """

    messages: list[TurnBody]
    system: str | list[BlockBody] | None = None
    tools: list[ClientToolBody] | None = None
    tool_choice: ToolUseChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfigBody | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(ConversationBody, kw_only=True):
    """Request body of ``/v1/messages``."""

    max_tokens: int


def check(body: ConversationBody) -> None:
    """Check the fields of a body that the conversion to domain types does not check. Raises InvalidArgument and
    Unimplemented.
    """
    refuse_fields(
        body,
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "return_token_ids",
        "add_special_tokens",
        "kv_transfer_params",
        "logprob_token_ids",
    )
    sampling_fields.check(body)
    if body.n not in (None, 1):
        raise Unimplemented(f"n is {shown(body.n)}; only 1 is supported", field="n")
    if body.thinking is not None:
        if body.thinking.type not in _THINKING:
            raise Unimplemented(
                f"thinking.type is {quoted(body.thinking.type)}; known: {', '.join(_THINKING)}", field="thinking.type"
            )
        budget = body.thinking.budget_tokens
        check_range("thinking.budget_tokens", budget, 1, _INT32_MAX)
        if None not in (budget, body.thinking_token_budget) and budget != body.thinking_token_budget:
            raise InvalidArgument(
                f"thinking.budget_tokens is {budget} and thinking_token_budget is {body.thinking_token_budget}; "
                "they are two names of the same setting, so set only one of them",
                field="thinking.budget_tokens",
            )
        if budget is not None and body.thinking.type == "disabled":
            raise InvalidArgument(
                f"thinking.budget_tokens is {budget}, but thinking.type is 'disabled'; leave it out, or set "
                "thinking.type to 'enabled'",
                field="thinking.budget_tokens",
            )
    if isinstance(body, MessagesBody):
        check_range("max_tokens", body.max_tokens, 1, _INT32_MAX)


def blocks_of(content: Any, path: str) -> str | list[BlockBody] | None:
    """Return the content of a tool result as blocks. The results of tools that Anthropic runs are not lists of blocks.

    Raises InvalidArgument.
    """
    try:
        return msgspec.convert(content, str | list[BlockBody] | None)
    except msgspec.ValidationError as e:
        raise undecodable(e, path) from None

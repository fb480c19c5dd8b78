"""Conversion of model outputs to chat answers: messages, content blocks, and the count of reasoning tokens."""

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from penstock_common.observability.logging import get_logger
from penstock_common.types.outputs import Logprobs
from penstock_common.types.request import ReasoningTokens
from penstock_common.types.sampling import OutputKind
from penstock_frontend.call_types import Finish, RequestOutput
from penstock_frontend.processing.parsers.base import AnswerDelta, AnswerParser, ReasoningParser, ToolCallDelta

# The code below counts the reasoning tokens in an answer.


class ReasoningTokenCount(Protocol):
    """Counter of the reasoning tokens in the output of one sequence."""

    def push(self, token_ids: Sequence[int], *, reasoning: bool, ended: bool) -> None:
        """Count the tokens of the next piece of output.

        ``reasoning`` is True if the piece contains reasoning. ``ended`` is True for the last piece of the sequence.
        """
        ...

    @property
    def total(self) -> int:
        """Number of reasoning tokens counted so far."""
        ...


class CountToEndToken:
    """Counter of reasoning tokens that counts all tokens up to and including the token that ends the reasoning.

    Args:
        tokens: Tokens that are the model's reasoning tags. Each tag is one token.
    """

    def __init__(self, tokens: ReasoningTokens) -> None:
        self._end = tokens.end_token_id
        self._ended = False
        self._before_end = 0
        self._reasons = False

    def push(self, token_ids: Sequence[int], *, reasoning: bool, ended: bool) -> None:
        """Count the tokens of the next piece of output."""
        del ended
        self._reasons = self._reasons or reasoning
        for token_id in token_ids:
            if self._ended:
                return
            self._before_end += 1
            self._ended = token_id == self._end

    @property
    def total(self) -> int:
        return self._before_end if self._reasons else 0


class CountByParser:
    """Counter of the tokens whose text is reasoning according to a parser. The tokens of the opening tag are counted
    too.

    This counter is for models whose reasoning tags have several tokens. A piece of output may contain both reasoning
    and other text, so the counter parses the text a second time, token by token.

    Args:
        parser: Reasoning parser that no other sequence uses.
        text_of_next: Takes the next token of the sequence, and returns the text that this token completes.
    """

    def __init__(self, parser: ReasoningParser, text_of_next: Callable[[int], str]) -> None:
        self._parser = parser
        self._text_of_next = text_of_next
        self._undecided = 0
        self.total = 0

    def push(self, token_ids: Sequence[int], *, reasoning: bool, ended: bool) -> None:
        """Count the tokens of the next piece of output."""
        del reasoning
        for token_id in token_ids:
            self._undecided += 1
            delta = self._parser.push(self._text_of_next(token_id))
            if delta.reasoning:
                self._count()
            elif delta.content:
                self._undecided = 0
        if ended and self._parser.finish().reasoning:
            self._count()

    def _count(self) -> None:
        self.total += self._undecided
        self._undecided = 0


class ChatOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One of the request's answers. The output kind decides whether this is a new piece of the answer or the whole
    answer so far, as in ``RequestOutput``.

    ``tool_calls`` has pieces of tool calls. Pieces with the same ``index`` belong to the same call. The first piece of
    a call has the name of the tool. If the output kind is not DELTA, each tool call is one piece.
    """

    index: int = 0
    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()
    token_ids: Sequence[int] = ()
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    finish: Finish | None = None


class ChatOutputs:
    """Parses the outputs of one request, with a separate parser for each sequence."""

    def __init__(
        self,
        kind: OutputKind,
        make_parser: Callable[[], AnswerParser],
        make_count: Callable[[], ReasoningTokenCount] | None = None,
    ) -> None:
        """Create the object that parses the outputs of one request.

        ``make_count`` creates a counter of reasoning tokens for a sequence. ``make_count`` is None if the model has no
        reasoning.
        """
        self._kind = kind
        self._make_parser = make_parser
        self._make_count = make_count
        self._answers: dict[int, _Answer] = {}

    def read(self, output: RequestOutput) -> ChatOutput:
        """Convert an output to a piece of the answer. The output may contain tokens whose text arrives only with later
        tokens.
        """
        answer = self._answers.get(output.index)
        if answer is None:
            answer = self._answers[output.index] = _Answer(
                self._make_parser(), self._make_count() if self._make_count is not None else None
            )
        cumulative = self._kind is OutputKind.CUMULATIVE
        text = output.text[answer.length :] if cumulative else output.text
        delta = answer.push(text, ended=output.finish is not None)
        if output.finish is not None and answer.broken:
            get_logger().warning(
                "tool calls of an answer could not be parsed; the client gets these calls as text or incomplete",
                calls=answer.broken,
            )
        finish = answer.counted(output, delta, cumulative=cumulative)
        if self._kind is not OutputKind.DELTA:
            delta = answer.add(delta)
        return ChatOutput(
            index=output.index,
            content=delta.content,
            reasoning=delta.reasoning,
            tool_calls=delta.tool_calls,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish=finish,
        )


class _Answer:
    """State of the answer of one sequence. ``length`` is the number of characters that were parsed so far."""

    __slots__ = ("_calls", "_content", "_count", "_parser", "_reasoning", "length", "num_counted")

    def __init__(self, parser: AnswerParser, count: ReasoningTokenCount | None) -> None:
        self._parser = parser
        self._count = count
        self.num_counted = 0
        self._content = ""
        self._reasoning = ""
        self._calls: list[ToolCallDelta] = []
        self.length = 0

    @property
    def broken(self) -> int:
        return self._parser.broken

    def push(self, text: str, *, ended: bool) -> AnswerDelta:
        self.length += len(text)
        return self._parser.push(text, ended=ended)

    def counted(self, output: RequestOutput, delta: AnswerDelta, *, cumulative: bool) -> Finish | None:
        """Count the reasoning tokens of an output.

        Return ``finish`` of the output. If the model has reasoning, the number of reasoning tokens is added to it.
        """
        if self._count is None:
            return output.finish
        new = output.token_ids[self.num_counted :] if cumulative else output.token_ids
        self.num_counted += len(new)
        self._count.push(new, reasoning=bool(delta.reasoning), ended=output.finish is not None)
        if output.finish is None:
            return None
        usage = output.finish.usage
        told = min(self._count.total, usage.completion_tokens)
        return msgspec.structs.replace(output.finish, usage=msgspec.structs.replace(usage, reasoning_tokens=told))

    def add(self, delta: AnswerDelta) -> AnswerDelta:
        """Add a new piece to the answer. Return the whole answer so far, in which each tool call is one piece."""
        self._content += delta.content
        self._reasoning += delta.reasoning
        for call in delta.tool_calls:
            if call.index < len(self._calls):
                before = self._calls[call.index]
                arguments = before.arguments + call.arguments
                self._calls[call.index] = msgspec.structs.replace(before, arguments=arguments)
            else:
                self._calls.append(call)
        return AnswerDelta(self._content, self._reasoning, tuple(self._calls))


# The code below divides an answer into consecutive blocks. A block is reasoning, text, or a tool call.


class BlockKind(enum.Enum):
    """Kind of a block of an answer."""

    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()


class Block:
    """A block of an answer that is not complete yet.

    ``text`` is the text of the block so far, or the arguments of a tool call so far.

    ``call_id`` and ``name`` are set only for tool calls.
    """

    __slots__ = ("call_id", "index", "kind", "name", "text")

    def __init__(self, index: int, kind: BlockKind, call: ToolCallDelta | None = None) -> None:
        self.index = index
        self.kind = kind
        self.call_id = call.id if call else ""
        self.name = call.name if call else ""
        self.text = ""


class BlockPiece(NamedTuple):
    """Piece of a block: the text to add, and whether the block begins or ends with this piece."""

    block: Block
    text: str = ""
    begins: bool = False
    ends: bool = False


class Blocks:
    """Converts the pieces of one sequence's answer to pieces of blocks.

    If ``parallel_calls`` is False, tool calls after the first call are dropped. If ``reasoning`` is False, reasoning is
    dropped.
    """

    def __init__(self, *, parallel_calls: bool = True, reasoning: bool = True) -> None:
        self.all: list[Block] = []
        self._reasoning = reasoning
        self._parallel_calls = parallel_calls
        self._open: Block | None = None
        self._call_index = -1

    def push(self, output: ChatOutput) -> Iterator[BlockPiece]:
        """Yield the block pieces for a new piece of the answer. The last piece of the answer ends the current block."""
        if output.reasoning and self._reasoning:
            yield from self._text(BlockKind.REASONING, output.reasoning)
        if output.content:
            yield from self._text(BlockKind.TEXT, output.content)
        for call in output.tool_calls:
            if self._parallel_calls or call.index == 0:
                yield from self._call(call)
        if output.finish is not None:
            yield from self._close()

    def has(self, kind: BlockKind) -> bool:
        """Return whether the answer so far has a block of this kind."""
        return any(block.kind is kind for block in self.all)

    def _text(self, kind: BlockKind, text: str) -> Iterator[BlockPiece]:
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(kind)
        yield from self._add(text)

    def _call(self, call: ToolCallDelta) -> Iterator[BlockPiece]:
        if self._open is None or self._open.kind is not BlockKind.CALL or call.index != self._call_index:
            self._call_index = call.index
            yield from self._begin(BlockKind.CALL, call)
        if call.arguments:
            yield from self._add(call.arguments)

    def _begin(self, kind: BlockKind, call: ToolCallDelta | None = None) -> Iterator[BlockPiece]:
        yield from self._close()
        self._open = Block(len(self.all), kind, call)
        self.all.append(self._open)
        yield BlockPiece(self._open, begins=True)

    def _add(self, text: str) -> Iterator[BlockPiece]:
        if self._open is not None:
            self._open.text += text
            yield BlockPiece(self._open, text)

    def _close(self) -> Iterator[BlockPiece]:
        if self._open is not None:
            yield BlockPiece(self._open, ends=True)
            self._open = None

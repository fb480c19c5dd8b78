"""Base classes of answer parsers, which divide streamed text into content, reasoning and tool calls."""

import abc
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

_PROMPT_END = 256
"""Number of characters at the end of the prompt in which the parser searches for a tag. Only whitespace may follow
after the tag.
"""


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New piece of one tool call.

    Attributes:
        index: Position of the call in the answer, from 0.
        id: Id of the call, which is the same in every piece.
        name: Complete name of the tool, set in the first piece of the call.
        arguments: Next part of the arguments' JSON text. The parts of all pieces, joined, are the arguments of the
            call.
    """

    index: int
    id: str
    name: str = ""
    arguments: str = ""


class ToolDelta(NamedTuple):
    """New piece of an answer: content outside of tool calls, and pieces of tool calls."""

    content: str = ""
    calls: Sequence[ToolCallDelta] = ()


class ReasoningDelta(NamedTuple):
    """New piece of an answer: reasoning, and the text after the reasoning."""

    reasoning: str = ""
    content: str = ""


class ToolForm(NamedTuple):
    """Text form of a forced tool call: ``begin``, then the arguments as JSON, then ``end``.

    In ``begin``, ``{name}`` stands for the tool's name as a JSON string, and ``{bare}`` stands for the unchanged name.
    ``separator`` is the text between two calls. ``separator`` is None if an answer can have only one call. ``opening``
    is the text before the first call, and ``closing`` is the text after the last call.
    """

    begin: str
    end: str
    separator: str | None
    opening: str = ""
    closing: str = ""


class ToolParser(abc.ABC):
    """Base class of parsers that find tool calls in a model's answer.

    ``tags`` are texts that the output must still contain when the parser receives it, even if they are special tokens.
    """

    form: ClassVar[ToolForm]
    tags: ClassVar[Sequence[str]] = ()
    schemas: Mapping[str, Mapping[str, Any]] = {}
    """JSON schemas of the arguments of each tool, by tool name. Parsers use the schemas for formats in which values
    have no type.
    """
    broken: int = 0
    """Number of tool calls in the answer that could not be parsed. The text of such a call becomes content, or the call
    ends early.
    """

    @classmethod
    @abc.abstractmethod
    def fits(cls, template: str) -> bool:
        """Return whether a model with this chat template writes tool calls in this parser's format."""

    def expect(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the argument schemas of the tools that the model may call in this answer."""
        self.schemas = schemas

    @abc.abstractmethod
    def push(self, text: str) -> ToolDelta:
        """Parse the next piece of the answer's text."""

    @abc.abstractmethod
    def finish(self) -> ToolDelta:
        """Return the text that is left at the end of the answer."""


class ReasoningParser(abc.ABC):
    """Base class of parsers that split an answer into reasoning and other text.

    ``tags`` has the same meaning as in ToolParser. The first tag begins the reasoning, and the second tag ends the
    reasoning.
    """

    tags: ClassVar[tuple[str, str]]
    before_calls: ClassVar[str | None] = "\n\n"
    """Text between the end tag of the reasoning and a forced tool call. None if the answer cannot have reasoning before
    a forced call.
    """
    always: ClassVar[bool] = False
    """Whether the answer begins with reasoning even if it does not have the opening tag. If the prompt has already
    ended the reasoning, this does not apply.
    """

    @abc.abstractmethod
    def __init__(self, prompt: str) -> None:
        """Create the parser for one answer.

        ``prompt`` is the prompt of the answer. The parser needs it, because a chat template may begin or end the
        reasoning in the prompt.
        """

    @classmethod
    @abc.abstractmethod
    def fits(cls, template: str) -> bool:
        """Return whether a model with this chat template writes reasoning in this parser's format."""

    @classmethod
    def ended_by(cls, prompt: str) -> bool | None:
        """Return True if the prompt ends with the closing tag of the reasoning, and False if it ends with the opening
        tag. Otherwise return None.
        """
        begin, end = cls.tags
        before = prompt[-_PROMPT_END:].rstrip()
        return True if before.endswith(end) else False if before.endswith(begin) else None

    @abc.abstractmethod
    def push(self, text: str) -> ReasoningDelta:
        """Parse the next piece of the answer's text."""

    @abc.abstractmethod
    def finish(self) -> ReasoningDelta:
        """Return the text that is left at the end of the answer."""


def call_id() -> str:
    """Return a new random id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def partial(text: str, tag: str) -> int:
    """Return the number of characters at the end of ``text`` that could be the beginning of ``tag``."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


# The class below combines the reasoning parser and the tool parser of an answer.


class AnswerDelta(NamedTuple):
    """New piece of an answer: content, reasoning and tool calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()


class AnswerParser:
    """Parses the answer of one sequence. The parser first finds the reasoning, and then finds tool calls in the
    remaining text.

    If the model has no parsers, all text is content. The deltas, joined, do not depend on how the text is split into
    pieces.
    """

    __slots__ = ("_reasoning", "_tool")

    def __init__(self, reasoning: ReasoningParser | None = None, tool: ToolParser | None = None) -> None:
        self._reasoning = reasoning
        self._tool = tool

    @property
    def broken(self) -> int:
        """Number of tool calls in the answer that could not be parsed."""
        return self._tool.broken if self._tool is not None else 0

    def push(self, text: str, *, ended: bool = False) -> AnswerDelta:
        """Parse the next piece of the sequence's text. ``ended`` is True for the last piece."""
        reasoning, content = self._reasoning.push(text) if self._reasoning else ReasoningDelta("", text)
        if ended and self._reasoning:
            rest = self._reasoning.finish()
            reasoning, content = reasoning + rest.reasoning, content + rest.content
        if self._tool is None:
            return AnswerDelta(content, reasoning)
        content, calls = self._tool.push(content)
        if ended:
            last = self._tool.finish()
            content, calls = content + last.content, [*calls, *last.calls]
        return AnswerDelta(content, reasoning, calls)

"""Base classes of answer parsers, which split streamed text into content, reasoning and tool calls."""

import abc
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

_PROMPT_END = 256
"""Number of characters at the end of a prompt in which the parser searches for a tag, followed only by whitespace."""


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """New piece of one tool call.

    Attributes:
        index: Position of the call in the answer, from 0.
        id: Id of the call, which is the same in every piece.
        name: Complete name of the tool, set in the first piece of the call.
        arguments: Next part of the arguments. The joined parts of all pieces are the call's arguments.
    """

    index: int
    id: str
    name: str = ""
    arguments: str = ""


class ToolDelta(NamedTuple):
    """New piece of an answer: text outside tool calls, and tool calls."""

    content: str = ""
    calls: Sequence[ToolCallDelta] = ()


class ReasoningDelta(NamedTuple):
    """New piece of an answer: reasoning, and text after the reasoning."""

    reasoning: str = ""
    content: str = ""


class ToolForm(NamedTuple):
    """Text form of a forced tool call: ``begin``, then the arguments as JSON, then ``end``.

    In ``begin``, ``{name}`` stands for the tool's name as a JSON string, and ``{bare}`` stands for the unchanged name.
    ``separator`` is the text between two calls, or None if an answer can have only one call. ``opening`` and
    ``closing`` are the texts before and after all calls.
    """

    begin: str
    end: str
    separator: str | None
    opening: str = ""
    closing: str = ""


class ToolParser(abc.ABC):
    """Base class of parsers that find tool calls in a model's answer.

    ``tags`` are texts that the parser must receive, even if they are special tokens.
    """

    form: ClassVar[ToolForm]
    tags: ClassVar[Sequence[str]] = ()
    schemas: Mapping[str, Mapping[str, Any]] = {}
    """JSON schemas of the tools' arguments, by tool name. Parsers of formats without types use the schemas."""
    broken: int = 0
    """Number of calls that could not be parsed. The text of such a call becomes content, or the call ends early."""

    @classmethod
    @abc.abstractmethod
    def fits(cls, template: str) -> bool:
        """Return whether a model with this chat template writes calls in this format."""

    def expect(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the argument schemas of the tools that the model may call."""
        self.schemas = schemas

    @abc.abstractmethod
    def push(self, text: str) -> ToolDelta:
        """Parse the next piece of the answer."""

    @abc.abstractmethod
    def finish(self) -> ToolDelta:
        """Return the remaining text at the end of the answer."""


class ReasoningParser(abc.ABC):
    """Base class of parsers that split an answer into reasoning and other text.

    ``tags`` are texts that the parser must receive, as in ToolParser. The first tag begins the reasoning, and the
    second tag ends the reasoning.
    """

    tags: ClassVar[tuple[str, str]]
    before_calls: ClassVar[str | None] = "\n\n"
    """Text between ``tags[1]`` and a forced call, or None if a forced call can have no reasoning before the call."""
    always: ClassVar[bool] = False
    """Whether the answer begins with reasoning even without the opening tag. This does not apply if the prompt has
    ended the reasoning.
    """

    @abc.abstractmethod
    def __init__(self, prompt: str) -> None:
        """Create the parser.

        ``prompt`` is the model's prompt. The parser needs the prompt, because a template may begin or end the reasoning
        in the prompt.
        """

    @classmethod
    @abc.abstractmethod
    def fits(cls, template: str) -> bool:
        """Return whether a model with this chat template writes reasoning in this format."""

    @classmethod
    def ended_by(cls, prompt: str) -> bool | None:
        """Return True if the prompt ends with the closing tag, False if it ends with the opening tag, else None."""
        begin, end = cls.tags
        before = prompt[-_PROMPT_END:].rstrip()
        return True if before.endswith(end) else False if before.endswith(begin) else None

    @abc.abstractmethod
    def push(self, text: str) -> ReasoningDelta:
        """Parse the next piece of the answer."""

    @abc.abstractmethod
    def finish(self) -> ReasoningDelta:
        """Return the remaining text at the end of the answer."""


def call_id() -> str:
    """Return a random id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def partial(text: str, tag: str) -> int:
    """Return the number of characters at the end of ``text`` that may be the beginning of an incomplete ``tag``."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


# The class below combines the parsers of an answer's reasoning and tool calls.


class AnswerDelta(NamedTuple):
    """New piece of an answer: content, reasoning and tool calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()


class AnswerParser:
    """Parses the answer of one sequence. First finds the reasoning, then finds tool calls in the remaining text.

    Without parsers, all text is content. The joined deltas do not depend on how the text is split into pieces.
    """

    __slots__ = ("_reasoning", "_tool")

    def __init__(self, reasoning: ReasoningParser | None = None, tool: ToolParser | None = None) -> None:
        self._reasoning = reasoning
        self._tool = tool

    @property
    def broken(self) -> int:
        """Number of tool calls that could not be parsed."""
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

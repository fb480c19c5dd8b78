"""Defines the parsers of a model's answers: text in pieces in, content, reasoning and tool calls out."""

import abc
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

_PROMPT_END = 256
"""Characters of a prompt that are looked at for a tag and the blanks behind it."""


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of one tool call. ``index`` counts the calls of an answer, ``id`` is that of the call, on every piece.

    ``name`` comes whole, on the first piece of a call; ``arguments`` of all pieces together are the call's.
    """

    index: int
    id: str
    name: str = ""
    arguments: str = ""


class ToolDelta(NamedTuple):
    """What is new of an answer: text beside calls, and calls."""

    content: str = ""
    calls: Sequence[ToolCallDelta] = ()


class ReasoningDelta(NamedTuple):
    """What is new of an answer: reasoning, and what comes after it."""

    reasoning: str = ""
    content: str = ""


class ToolForm(NamedTuple):
    """How a model can be made to write a call: ``begin``, then the arguments as JSON, then ``end``.

    In ``begin`` ``{name}`` is the tool's name as a JSON string, ``{bare}`` the name as it is. ``separator`` stands between two
    calls; None where the model makes one call at a time. ``opening`` and ``closing`` stand around all of them.
    """

    begin: str
    end: str
    separator: str | None
    opening: str = ""
    closing: str = ""


class ToolParser(abc.ABC):
    """Finds the calls of tools in a model's answer. ``tags`` are the texts that must reach it, special tokens or not."""

    form: ClassVar[ToolForm]
    tags: ClassVar[Sequence[str]] = ()
    schemas: Mapping[str, Mapping[str, Any]] = {}
    """The JSON schemas of the tools' arguments by name, for formats without types."""
    broken: int = 0
    """How many calls could not be read: they are content, or end early."""

    @classmethod
    @abc.abstractmethod
    def fits(cls, template: str) -> bool:
        """Whether a model with this chat template writes its calls so."""

    def expect(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the parameter schemas of the tools that the model may call."""
        self.schemas = schemas

    @abc.abstractmethod
    def push(self, text: str) -> ToolDelta:
        """Take the next piece of the answer."""

    @abc.abstractmethod
    def finish(self) -> ToolDelta:
        """What was held back, at the end of the answer."""


class ReasoningParser(abc.ABC):
    """Splits a model's answer into reasoning and the rest. ``tags`` as of ToolParser; the first begins, the second ends it."""

    tags: ClassVar[tuple[str, str]]
    before_calls: ClassVar[str | None] = "\n\n"
    """What stands between ``tags[1]`` and a call that must be made; None: no reasoning comes before such a call."""
    always: ClassVar[bool] = False
    """Whether the answer begins with reasoning even without its tag, unless the prompt has ended the reasoning."""

    @abc.abstractmethod
    def __init__(self, prompt: str) -> None:
        """``prompt``: what the model goes on with; templates may begin or end the reasoning themselves."""

    @classmethod
    @abc.abstractmethod
    def fits(cls, template: str) -> bool:
        """Whether a model with this chat template reasons so."""

    @classmethod
    def ended_by(cls, prompt: str) -> bool | None:
        """Return True if the prompt ends with the closing tag, False if it ends with the opening tag, else None."""
        begin, end = cls.tags
        before = prompt[-_PROMPT_END:].rstrip()
        return True if before.endswith(end) else False if before.endswith(begin) else None

    @abc.abstractmethod
    def push(self, text: str) -> ReasoningDelta:
        """Take the next piece of the answer."""

    @abc.abstractmethod
    def finish(self) -> ReasoningDelta:
        """What was held back, at the end of the answer."""


def call_id() -> str:
    """A random id of a call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def partial(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that ``tag`` begins with; less than all of ``tag``."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


# A model's answer as its reader wants it: content, reasoning and tool calls.


class AnswerDelta(NamedTuple):
    """What is new of an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCallDelta] = ()


class AnswerParser:
    """Reads one sequence: reasoning is split off first, calls are looked for in what is left. Without parsers all is content.

    The deltas of any cutting of a text, put together, are the same.
    """

    __slots__ = ("_reasoning", "_tool")

    def __init__(self, reasoning: ReasoningParser | None = None, tool: ToolParser | None = None) -> None:
        self._reasoning = reasoning
        self._tool = tool

    @property
    def broken(self) -> int:
        """How many calls could not be read."""
        return self._tool.broken if self._tool is not None else 0

    def push(self, text: str, *, ended: bool = False) -> AnswerDelta:
        """Take the next piece of the sequence's text. ``ended``: it is the last."""
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

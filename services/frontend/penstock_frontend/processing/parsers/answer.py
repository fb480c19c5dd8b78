"""A model's answer as its reader wants it: content, reasoning and tool calls."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock_frontend.processing.parsers.base import ReasoningDelta, ReasoningParser, ToolCallDelta, ToolParser


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

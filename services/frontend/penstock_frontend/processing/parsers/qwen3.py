"""Reasoning between ``<think>`` and ``</think>``, as Qwen3, QwQ and DeepSeek-R1 write it."""

import enum
from typing import ClassVar

from penstock_frontend.processing.parsers.base import ReasoningDelta, ReasoningParser, partial

_BEGIN, _END = "<think>", "</think>"


class _At(enum.Enum):
    START = enum.auto()
    """The answer may begin with reasoning."""
    BEGUN = enum.auto()
    """Blanks at the begin of the reasoning."""
    REASONING = enum.auto()
    ENDED = enum.auto()
    """Blanks behind the reasoning."""
    CONTENT = enum.auto()


class Qwen3ReasoningParser(ReasoningParser):
    """Reasoning stands at the begin of the answer, or not at all; blanks around it are dropped.

    Some templates open the reasoning in the prompt, or open and close it so that there is none.
    """

    tags: ClassVar = (_BEGIN, _END)

    def __init__(self, prompt: str) -> None:
        ended = self.ended_by(prompt)
        self._at = _At.START if ended is None else _At.CONTENT if ended else _At.BEGUN
        self._held = ""

    @classmethod
    def fits(cls, template: str) -> bool:
        """Whether the template knows the tag that ends the reasoning."""
        return _END in template

    def push(self, text: str) -> ReasoningDelta:
        """Take the next piece of the answer. What may be the beginning of a tag is held back, blanks beside tags are dropped."""
        reasoning = ""
        text, self._held = self._held + text, ""
        while text:
            match self._at:
                case _At.CONTENT:
                    return ReasoningDelta(reasoning, text)
                case _At.START:
                    text = self._start(text)
                case _At.BEGUN | _At.ENDED:
                    text = text.lstrip()
                    if text:
                        self._at = _At.REASONING if self._at is _At.BEGUN else _At.CONTENT
                case _At.REASONING:
                    new, text = self._reason(text)
                    reasoning += new
        return ReasoningDelta(reasoning)

    def finish(self) -> ReasoningDelta:
        """What was held back: reasoning, if its end has not come."""
        held, self._held = self._held, ""
        return ReasoningDelta(held) if self._at is _At.REASONING else ReasoningDelta("", held)

    def _start(self, text: str) -> str:
        """Does it begin with the tag? Returns what is left to read."""
        start = text.lstrip()
        if start.startswith(_BEGIN):
            self._at = _At.BEGUN
            return start[len(_BEGIN) :]
        if _BEGIN.startswith(start):
            self._held = text
            return ""
        self._at = _At.CONTENT
        return text

    def _reason(self, text: str) -> tuple[str, str]:
        """Reasoning up to its end, without the blanks there, and what is left to read."""
        index = text.find(_END)
        if index >= 0:
            self._at = _At.ENDED
            return text[:index].rstrip(), text[index + len(_END) :]
        new = text[: len(text) - partial(text, _END)].rstrip()
        self._held = text[len(new) :]
        return new, ""

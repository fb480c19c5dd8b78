"""Reasoning between two tags: parsed at the start of an answer, and told to the engines for constraints behind it."""

import enum
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from penstock_common.observability.logging import get_logger
from penstock_common.types.request import ReasoningTokens
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.processing.parsers.base import ReasoningDelta, ReasoningParser, partial
from penstock_frontend.processing.prompts.tokenizer import Tokenizer


class _At(enum.Enum):
    START = enum.auto()
    """The answer may begin with reasoning."""
    BEGUN = enum.auto()
    """Blanks at the begin of the reasoning."""
    REASONING = enum.auto()
    ENDED = enum.auto()
    """Blanks behind the reasoning, and the tag that may begin the response."""
    RESPONSE = enum.auto()
    """Behind that tag: another one ends the response."""
    CONTENT = enum.auto()


class TagReasoningParser(ReasoningParser):
    """Reasoning stands at the begin of the answer, or not at all; blanks around it are dropped.

    Some templates open the reasoning in the prompt, or open and close it so that there is none. ``begins`` and ``ends``:
    ``tags`` where models spell them differently. ``always``: the reasoning begins with the answer even without its tag.
    ``response``: tags that may stand around what follows the reasoning.
    """

    begins: ClassVar[Sequence[str]] = ()
    ends: ClassVar[Sequence[str]] = ()
    response: ClassVar[tuple[str, str] | None] = None

    def __init__(self, prompt: str) -> None:
        ended = self.ended_by(prompt)
        self._begins = self.begins or self.tags[:1]
        self._ends = self.ends or self.tags[1:]
        self._at = _At.START if ended is None else _At.CONTENT if ended else _At.BEGUN
        self._text = ""

    def push(self, text: str) -> ReasoningDelta:
        """Take the next piece of the answer. What may be the beginning of a tag is held back, blanks beside tags are dropped."""
        self._text += text
        reasoning = content = ""
        while self._text:
            match self._at:
                case _At.CONTENT:
                    content, self._text = content + self._text, ""
                case _At.START if not self._start():
                    break
                case _At.BEGUN:
                    self._text = self._text.lstrip()
                    self._at = _At.REASONING if self._text else _At.BEGUN
                case _At.REASONING:
                    new, found = self._upto(self._ends)
                    reasoning += new
                    if not found:
                        break
                    self._at = _At.ENDED
                case _At.ENDED if not self._open_response():
                    break
                case _At.RESPONSE:
                    new, found = self._upto(self.response[1:] if self.response else ())
                    content += new
                    if not found:
                        break
                    self._at = _At.CONTENT
        return ReasoningDelta(reasoning, content)

    def finish(self) -> ReasoningDelta:
        """What was held back: reasoning, if its end has not come."""
        held, self._text = self._text, ""
        return ReasoningDelta(held) if self._at is _At.REASONING else ReasoningDelta("", held)

    def _start(self) -> bool:
        """Does it begin with the tag? Returns whether that is known."""
        start = self._text.lstrip()
        for begin in self._begins:
            if start.startswith(begin):
                self._at, self._text = _At.BEGUN, start[len(begin) :]
                return True
        if any(begin.startswith(start) for begin in self._begins):
            return False
        self._at = _At.BEGUN if self.always else _At.CONTENT
        return True

    def _open_response(self) -> bool:
        """Behind the reasoning: does a tag begin the response? Returns whether that is known."""
        self._text = self._text.lstrip()
        if self.response is None or not self.response[0].startswith(self._text[: len(self.response[0])]):
            self._at = _At.CONTENT if self._text else _At.ENDED
        elif len(self._text) < len(self.response[0]):
            return False
        else:
            self._at, self._text = _At.RESPONSE, self._text[len(self.response[0]) :]
        return True

    def _upto(self, ends: Sequence[str]) -> tuple[str, bool]:
        """What comes before the first of the tags, without the blanks there, and whether one has come; it is read, too."""
        places = [(index, end) for end in ends if (index := self._text.find(end)) >= 0]
        if places:
            index, end = min(places)
            new, self._text = self._text[:index].rstrip(), self._text[index + len(end) :]
            return new, True
        held = max(partial(self._text, end) for end in ends)
        new = self._text[: len(self._text) - held].rstrip()
        self._text = self._text[len(new) :]
        return new, False


# Reasoning between ``<think>`` and ``</think>``, as Qwen3, QwQ, GLM 4.5, Kimi K2 and DeepSeek V3.1 write it.


class Qwen3ReasoningParser(TagReasoningParser):
    """Reasoning at the begin of the answer, between tags."""

    tags: ClassVar = ("<think>", "</think>")

    @classmethod
    def fits(cls, template: str) -> bool:
        """Whether the template knows the tag that ends the reasoning."""
        return cls.tags[1] in template


# What a model's reasoning stands between: told to the engines, which let a constraint hold behind it.


class Reasoning(NamedTuple):
    """How a model reasons. ``tokens``: of the parser's tags."""

    parser: type[ReasoningParser]
    tokens: ReasoningTokens

    def ended_by(self, prompt: str, params: SamplingParams) -> bool | None:
        """Return whether ``prompt`` ends the reasoning (True) or begins it (False); None if the engine must find out. An empty
        prompt is not known as text.
        """
        ended = self.parser.ended_by(prompt) if prompt else None
        # A constraint may begin with the answer, so its engine looks for the tag.
        begins = bool(prompt) and self.parser.always and params.structured_output is None
        return False if ended is None and begins else ended


def reasoning_of(parser: type[ReasoningParser] | None, tokenizer: Tokenizer) -> Reasoning | None:
    """How a model with this parser reasons; None without a parser, and where a tag is no token of its own."""
    if parser is None:
        return None
    begin, end = (tokenizer.token_id(tag) for tag in parser.tags)
    if begin is None or end is None:
        get_logger().warning("schemas hold in the reasoning, too: its tags are no tokens", tags=list(parser.tags))
        return None
    return Reasoning(parser, ReasoningTokens(begin, end))

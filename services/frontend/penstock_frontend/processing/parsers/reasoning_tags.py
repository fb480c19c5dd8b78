"""Reasoning between two tags: the parser for it, and the description of the tags for engines.

Engines need this description, because they apply output constraints only after the reasoning.
"""

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
    """State at the beginning of the answer, in which the parser does not know yet whether reasoning follows."""
    BEGUN = enum.auto()
    """State in which the parser is in the whitespace between the opening tag and the reasoning."""
    REASONING = enum.auto()
    ENDED = enum.auto()
    """State in which the parser is in the whitespace after the reasoning, or in a tag that may begin the response."""
    RESPONSE = enum.auto()
    """State in which the parser is after the tag that begins the response. Another tag ends the response."""
    CONTENT = enum.auto()


class TagReasoningParser(ReasoningParser):
    """Parser for reasoning at the start of the answer. The parser drops the whitespace around the reasoning.

    Some templates write the opening tag into the prompt. Other templates write both tags into the prompt, so that the
    answer has no reasoning. ``begins`` and ``ends`` are variants of the two ``tags`` that models also write. If
    ``always`` is True, the answer begins with reasoning even if it does not have the opening tag. ``response`` has the
    tags that may enclose the text after the reasoning.
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
        """Parse the next piece of the answer's text.

        Text that could be the beginning of a tag waits for the next piece. Whitespace around tags is dropped.
        """
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
        """Return the text that is left at the end. If the reasoning has not ended, the text is reasoning."""
        held, self._text = self._text, ""
        return ReasoningDelta(held) if self._at is _At.REASONING else ReasoningDelta("", held)

    def _start(self) -> bool:
        """Check whether the answer begins with the opening tag. Return False if more text is needed to decide this."""
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
        """Check whether a tag begins the response after the reasoning.

        Return False if more text is needed to decide this.
        """
        self._text = self._text.lstrip()
        if self.response is None or not self.response[0].startswith(self._text[: len(self.response[0])]):
            self._at = _At.CONTENT if self._text else _At.ENDED
        elif len(self._text) < len(self.response[0]):
            return False
        else:
            self._at, self._text = _At.RESPONSE, self._text[len(self.response[0]) :]
        return True

    def _upto(self, ends: Sequence[str]) -> tuple[str, bool]:
        """Consume text up to the first of the tags in ``ends``.

        Return the consumed text without whitespace at its end, and whether a tag was found.
        """
        places = [(index, end) for end in ends if (index := self._text.find(end)) >= 0]
        if places:
            index, end = min(places)
            new, self._text = self._text[:index].rstrip(), self._text[index + len(end) :]
            return new, True
        held = max(partial(self._text, end) for end in ends)
        new = self._text[: len(self._text) - held].rstrip()
        self._text = self._text[len(new) :]
        return new, False


# Qwen3, QwQ, GLM 4.5, Kimi K2 and DeepSeek V3.1 write reasoning between ``<think>`` and ``</think>``.


class Qwen3ReasoningParser(TagReasoningParser):
    """Parser for reasoning between the tags ``<think>`` and ``</think>`` at the start of the answer."""

    tags: ClassVar = ("<think>", "</think>")

    @classmethod
    def fits(cls, template: str) -> bool:
        """Return whether the template contains the tag that ends the reasoning."""
        return cls.tags[1] in template


# Engines apply output constraints only after the reasoning. The class below describes the reasoning tags for engines.


class Reasoning(NamedTuple):
    """Reasoning format of a model, for engines. ``tokens`` are the tokens of the parser's tags."""

    parser: type[ReasoningParser]
    tokens: ReasoningTokens

    def ended_by(self, prompt: str, params: SamplingParams) -> bool | None:
        """Return True if ``prompt`` ends the reasoning, and False if ``prompt`` begins the reasoning.

        Return None if the engine must find out itself whether the answer begins with reasoning.

        If ``prompt`` is empty, the text of the prompt is not known.
        """
        ended = self.parser.ended_by(prompt) if prompt else None
        # An answer with a constraint may have no reasoning, so the engine must search for the opening tag.
        begins = bool(prompt) and self.parser.always and params.structured_output is None
        return False if ended is None and begins else ended


def reasoning_of(parser: type[ReasoningParser] | None, tokenizer: Tokenizer) -> Reasoning | None:
    """Return the reasoning format of a model for engines.

    Return None if the model has no reasoning parser, or if a tag is not a single token.
    """
    if parser is None:
        return None
    begin, end = (tokenizer.token_id(tag) for tag in parser.tags)
    if begin is None or end is None:
        get_logger().warning(
            "the model's reasoning tags are not single tokens, so constraints on outputs also apply to the reasoning",
            tags=list(parser.tags),
        )
        return None
    return Reasoning(parser, ReasoningTokens(begin, end))

"""How many of an answer's tokens are reasoning."""

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock_common.types.request import ReasoningTokens
from penstock_frontend.processing.parsers.base import ReasoningParser


class ReasoningTokenCount(Protocol):
    """Counts the reasoning tokens of one sequence."""

    def push(self, token_ids: Sequence[int], *, reasoning: bool, ended: bool) -> None:
        """Take the tokens of the next piece. ``reasoning``: the piece has reasoning; ``ended``: it is the last."""
        ...

    @property
    def total(self) -> int:
        """Tokens so far."""
        ...


class CountToEndToken:
    """Counts the tokens up to the one that ends the reasoning, which is the last that counts.

    Args:
        tokens: The tokens of the model's tags.
    """

    def __init__(self, tokens: ReasoningTokens) -> None:
        self._end = tokens.end_token_id
        self._ended = False
        self._before_end = 0
        self._reasons = False

    def push(self, token_ids: Sequence[int], *, reasoning: bool, ended: bool) -> None:
        """Take the tokens of the next piece."""
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
    """Counts the tokens whose text a parser takes for reasoning, and the tokens of tags before that. For models whose tags are
    several tokens: a piece of output may end anywhere in the reasoning, so the text is parsed once more, token by token.

    Args:
        parser: A parser of its own for the sequence.
        text_of_next: Returns the text that the sequence's next token settles.
    """

    def __init__(self, parser: ReasoningParser, text_of_next: Callable[[int], str]) -> None:
        self._parser = parser
        self._text_of_next = text_of_next
        self._undecided = 0
        self.total = 0

    def push(self, token_ids: Sequence[int], *, reasoning: bool, ended: bool) -> None:
        """Take the tokens of the next piece."""
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

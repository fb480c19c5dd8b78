"""Log-probabilities in the forms of completions and chat completions, and vLLM's of prompts."""

from collections.abc import Callable, Iterator

import msgspec

from penstock_common.types.logprobs import Logprobs
from penstock_frontend.processing.detokenizer import REPLACEMENT, IncrementalDetokenizer


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token as chat completions write it. ``bytes`` is null for a token that holds a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(msgspec.Struct, frozen=True):
    """The token of one position, and the likeliest there."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The log-probabilities of a chat completion's choice."""

    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """The log-probabilities of a completion's choice. The first token of an echoed prompt has none.

    ``text_offset``: where each token's text begins in the text of the choice, in characters.
    """

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []

    def add(self, token: str, offset: int, top: dict[str, float] | None, logprob: float | None) -> None:
        """Append a position."""
        self.tokens.append(token)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(offset)


class PromptLogprob(msgspec.Struct, frozen=True):
    """An entry of a position of the prompt, as vLLM writes it."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""For every prompt token its own entry and the likeliest, by token id. The first has none."""


class TextOffsets:
    """Where the texts of consecutive tokens begin. A token in the middle of a character begins where that does."""

    def __init__(self, detokenizer: IncrementalDetokenizer, text_of: Callable[[int], str]) -> None:
        self._detokenizer = detokenizer
        self._length = 0
        self.text_of = text_of
        """The text of a token id, as log-probabilities have it."""

    def next(self, token_id: int) -> int:
        """The offset of the next token, in characters."""
        begin = self._length
        self._length += len(self._detokenizer.push(token_id))
        return begin


def entries(logprobs: Logprobs, position: int) -> Iterator[tuple[int, str, float, int]]:
    """Token id, text, log-probability and rank of each entry of a position, the chosen token first."""
    for entry in range(logprobs.offsets[position], logprobs.offsets[position + 1]):
        text = logprobs.tokens[entry] if logprobs.tokens else ""
        yield logprobs.token_ids[entry], text, logprobs.logprobs[entry], logprobs.ranks[entry]


def add_completion_logprobs(into: CompletionLogprobs, logprobs: Logprobs, offsets: TextOffsets) -> None:
    """Append all positions to those of a completion's choice."""
    for position in range(len(logprobs)):
        (token_id, text, logprob, _), *_ = found = list(entries(logprobs, position))
        top: dict[str, float] = {}
        for _, other, value, _ in found:
            top.setdefault(other, value)  # texts of partial characters are alike: the likeliest stays
        into.add(text, offsets.next(token_id), top, logprob)


def chat_logprobs(logprobs: Logprobs | None, *, top: int) -> ChatLogprobs | None:
    """Those of a chat completion's choice, with the ``top`` likeliest at each position."""
    if logprobs is None:
        return None
    content = []
    for position in range(len(logprobs)):
        chosen, *likeliest = (_token(text, logprob) for _, text, logprob, _ in entries(logprobs, position))
        content.append(
            ContentLogprob(chosen.token, chosen.logprob, chosen.bytes, likeliest if top < 0 else likeliest[:top])
        )
    return ChatLogprobs(content)


def prompt_logprobs(logprobs: Logprobs | None) -> PromptLogprobs:
    """Those of a whole prompt."""
    if logprobs is None:
        return [None]
    positions = (entries(logprobs, position) for position in range(len(logprobs)))
    return [None, *({i: PromptLogprob(value, rank, text) for i, text, value, rank in found} for found in positions)]


def _token(text: str, logprob: float) -> TokenLogprob:
    return TokenLogprob(text, logprob, None if REPLACEMENT in text else list(text.encode()))

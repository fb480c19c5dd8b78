"""Log-probabilities in completions and chat completions, and, as in vLLM, of prompts. The ranking for ``best_of`` is
also here.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import msgspec

from penstock_common.types.outputs import Logprobs
from penstock_frontend.call_types import RequestOutput
from penstock_frontend.processing.outputs.detokenizer import REPLACEMENT, IncrementalDetokenizer

BytesOf = Callable[[int], bytes]
"""Type of functions that return the bytes of a token id, such as ``Tokenizer.bytes_of``."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token in the log-probabilities of chat completions. If the token is only a part of a character, ``token`` is
    U+FFFD, and ``bytes`` has the bytes of the token.
    """

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct, frozen=True):
    """Log-probabilities at one position: of the chosen token, and of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of one choice of a chat completion."""

    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    r"""Log-probabilities of one choice of a completion. The first token of an echoed prompt has no log-probability.

    A token that is a part of a character is written as bytes, as in OpenAI's API: ``bytes:\xf0\x9f``. ``text_offset``
    is the position of each token's text in the text of the choice, in characters.
    """

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []

    def add(self, token: str, offset: int, top: dict[str, float] | None, logprob: float | None) -> None:
        """Append the log-probabilities of one position."""
        self.tokens.append(token)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(offset)


class PromptLogprob(msgspec.Struct, frozen=True):
    """Log-probability of one token at a position of the prompt, in vLLM's format."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""Log-probabilities of the prompt token and of the most likely tokens, for each position of the prompt, by token id.

The first position of the prompt has no log-probabilities.
"""


class TextOffsets:
    """Computes the positions, in characters, at which the texts of consecutive tokens begin in the output.

    A token begins at its first character, even if the token has only a part of that character. An incomplete character
    becomes U+FFFD, and the next token begins after it.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, text_of: Callable[[int], str], bytes_of: BytesOf) -> None:
        self._detokenizer = detokenizer
        self._length = 0
        self._pending: list[int] = []  # tokens whose last character is not complete yet
        self._num_told = 0  # number of these pending tokens whose offset was already returned
        self._text_of = text_of
        self._bytes_of = bytes_of

    def name_of(self, token_id: int, text: str | None = None) -> str:
        """Return the name of a token in completions. The name is the text of the token, or the token's bytes if the
        token is a part of a character.

        ``text`` is the text of the token, if the caller has it.
        """
        if text is None:
            text = self._text_of(token_id)
        if REPLACEMENT not in text or (data := self._bytes_of(token_id)) == text.encode():
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens. If the last character is not complete yet, its tokens get the offsets
        that they would have if it stayed incomplete.
        """
        offsets: list[int] = []
        for token_id in token_ids:
            self._pending.append(token_id)
            text = self._detokenizer.push(token_id)
            if text or not self._detokenizer.pending:
                offsets += self._settle(len(self._pending) - self._detokenizer.num_pending, text)
        offsets += self._begins(self._pending, self._detokenizer.decode(self._pending))[self._num_told :]
        self._num_told = len(self._pending)
        return offsets

    def _settle(self, count: int, text: str) -> list[int]:
        """Return the offsets of the first ``count`` pending tokens that were not returned yet. ``text`` is the text
        of these tokens.
        """
        settled, self._pending = self._pending[:count], self._pending[count:]
        offsets = self._begins(settled, text)[self._num_told :]
        self._num_told = max(self._num_told - count, 0)
        self._length += len(text)
        return offsets

    def _begins(self, token_ids: Sequence[int], text: str) -> list[int]:
        begins = [self._length] if token_ids else []
        for index in range(1, len(token_ids)):
            front, rest = self._detokenizer.decode(token_ids[:index]), self._detokenizer.decode(token_ids[index:])
            # The tokenizer may drop the leading space of a text that is decoded on its own.
            if text.startswith(front) and text[len(front) :].lstrip(" ") == rest.lstrip(" "):
                begin = len(front)
            else:
                begin = _num_common(front.rstrip(REPLACEMENT), text)
            begins.append(max(begins[-1], self._length + begin))
        return begins


def _num_common(one: str, other: str) -> int:
    """Return the number of characters at the beginning that two texts have in common."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def entries(logprobs: Logprobs, position: int) -> Iterator[tuple[int, str, float, int]]:
    """Yield the token id, text, log-probability and rank of each entry at one position. The chosen token comes first."""
    for entry in range(logprobs.offsets[position], logprobs.offsets[position + 1]):
        text = logprobs.tokens[entry] if logprobs.tokens else ""
        yield logprobs.token_ids[entry], text, logprobs.logprobs[entry], logprobs.ranks[entry]


def add_completion_logprobs(into: CompletionLogprobs, logprobs: Logprobs, offsets: TextOffsets) -> None:
    """Append the log-probabilities of all positions of ``logprobs`` to ``into``."""
    chosen = [logprobs.token_ids[begin] for begin in logprobs.offsets[: len(logprobs)]]
    for position, offset in enumerate(offsets.of(chosen)):
        found = [(offsets.name_of(i, text), value) for i, text, value, _ in entries(logprobs, position)]
        top: dict[str, float] = {}
        for other, value in found:
            top.setdefault(other, value)  # several tokens may have the same text; keep the most likely of them
        into.add(found[0][0], offset, top, found[0][1])


def chat_logprobs(logprobs: Logprobs | None, *, top: int, bytes_of: BytesOf) -> ChatLogprobs | None:
    """Return the log-probabilities of one choice of a chat completion. Each position has its ``top`` most likely
    tokens.
    """
    if logprobs is None:
        return None
    content = []
    for position in range(len(logprobs)):
        chosen, *likeliest = (
            TokenLogprob(text, logprob, list(bytes_of(token_id)))
            for token_id, text, logprob, _ in entries(logprobs, position)
        )
        content.append(
            ContentLogprob(chosen.token, chosen.logprob, chosen.bytes, likeliest if top < 0 else likeliest[:top])
        )
    return ChatLogprobs(content)


def prompt_logprobs(logprobs: Logprobs | None) -> PromptLogprobs:
    """Return the log-probabilities of the whole prompt, in vLLM's format."""
    if logprobs is None:
        return [None]
    positions = (entries(logprobs, position) for position in range(len(logprobs)))
    return [None, *({i: PromptLogprob(value, rank, text) for i, text, value, rank in found} for found in positions)]


# The code below ranks outputs for ``best_of``, by the mean log-probability of their tokens.


def ranked(outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
    """Return the outputs, sorted by their mean log-probability per token, highest first. All outputs must have
    log-probabilities.
    """
    return sorted(outputs, key=lambda output: mean_logprob(output.logprobs), reverse=True)


def mean_logprob(logprobs: Logprobs | None) -> float:
    """Return the mean log-probability of the chosen tokens. Return minus infinity if there are no tokens."""
    if logprobs is None or not len(logprobs):
        return -math.inf
    return sum(logprobs.logprobs[start] for start in logprobs.offsets[:-1]) / len(logprobs)

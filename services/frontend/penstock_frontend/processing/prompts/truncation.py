"""Truncation of tokenized texts. As in transformers, the special tokens around a text are kept."""

from typing import Literal, NamedTuple

import tokenizers

End = Literal["end", "start"]
"""Side at which tokens are removed."""


class Cut(NamedTuple):
    """Truncation of texts.

    Attributes:
        longest: Maximum number of tokens of a prompt, including the special tokens around its texts.
        at: Side at which tokens are removed.
    """

    longest: int
    at: End = "end"

    @property
    def direction(self) -> str:
        """Direction of truncation in the tokenizers library."""
        return "right" if self.at == "end" else "left"

    def of(self, ids: list[int]) -> list[int]:
        """Return the token ids that remain after truncation."""
        return ids[: self.longest] if self.at == "end" else ids[-self.longest :]


def encode_cut(backend: tokenizers.Tokenizer, text: str, cut: Cut) -> tokenizers.Encoding:
    """Return the tokens of a text that remain after truncation, together with the special tokens around the text."""
    encoding = backend.encode(text, add_special_tokens=False)
    encoding.truncate(cut.longest - backend.num_special_tokens_to_add(False), direction=cut.direction)
    return backend.post_process(encoding)


def first_tokens(backend: tokenizers.Tokenizer, text: str, longest: int) -> str:
    """Return the part of a text that its first ``longest`` tokens cover, without special tokens around the text."""
    encoding = backend.encode(text, add_special_tokens=False)
    return text if len(encoding) <= longest else text[: encoding.offsets[longest - 1][1]]


def encode_pair_cut(backend: tokenizers.Tokenizer, text: str, second: str, cut: Cut) -> tokenizers.Encoding:
    """Truncate two texts of one prompt. The longer text is truncated first, until both texts have equal length."""
    one, other = (backend.encode(each, add_special_tokens=False) for each in (text, second))
    of_one, of_other = _shares(len(one), len(other), cut.longest - backend.num_special_tokens_to_add(True))
    one.truncate(of_one, direction=cut.direction)
    other.truncate(of_other, direction=cut.direction)
    return backend.post_process(one, other)


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of each text remain after truncation. If the number of tokens is odd, the longer text
    keeps one token more. If both texts have equal length, the second text keeps one token more.
    """
    shorter = min(first, second, room // 2)
    return (shorter, min(second, room - shorter)) if first <= second else (min(first, room - shorter), shorter)

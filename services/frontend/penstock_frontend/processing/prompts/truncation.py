"""Texts that are tokenized and cut to so many tokens. What a tokenizer puts around a text stays, as transformers has it."""

from typing import Literal, NamedTuple

import tokenizers

End = Literal["end", "start"]
"""Where tokens are cut off."""


class Cut(NamedTuple):
    """How a text is cut.

    Attributes:
        longest: Tokens of a prompt, with the tokens that are put around its texts, which must be fewer.
        at: Where tokens are cut off.
    """

    longest: int
    at: End = "end"

    @property
    def direction(self) -> str:
        """The same for tokenizers."""
        return "right" if self.at == "end" else "left"

    def of(self, ids: list[int]) -> list[int]:
        """Return the ids that stay."""
        return ids[: self.longest] if self.at == "end" else ids[-self.longest :]


def encode_cut(backend: tokenizers.Tokenizer, text: str, cut: Cut) -> tokenizers.Encoding:
    """Return the tokens of a text that stay, with the tokens around it."""
    encoding = backend.encode(text, add_special_tokens=False)
    encoding.truncate(cut.longest - backend.num_special_tokens_to_add(False), direction=cut.direction)
    return backend.post_process(encoding)


def encode_pair_cut(backend: tokenizers.Tokenizer, text: str, second: str, cut: Cut) -> tokenizers.Encoding:
    """The same of two texts in one prompt: the longer one gives way until both are alike."""
    one, other = (backend.encode(each, add_special_tokens=False) for each in (text, second))
    of_one, of_other = _shares(len(one), len(other), cut.longest - backend.num_special_tokens_to_add(True))
    one.truncate(of_one, direction=cut.direction)
    other.truncate(of_other, direction=cut.direction)
    return backend.post_process(one, other)


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of each text stay. An odd one is the longer text's, of texts that are alike the second's."""
    shorter = min(first, second, room // 2)
    return (shorter, min(second, room - shorter)) if first <= second else (min(first, room - shorter), shorter)

"""Texts in which control tokens may be spelt out without being tokens."""

from collections.abc import Iterable


class GuardedText(str):
    """A text of a prompt. Where a client wrote the characters of a control token they are characters.

    ``named`` is the same text with each control token that the chat template wrote under the name by which
    ``Tokenizer.guard`` knows it. The tokenizer reads ``named``, everybody else the text itself. Operations of ``str`` return a
    plain text, whose control tokens are all tokens: use ``cut`` and ``joined``.
    """

    __slots__ = ("named",)
    named: str

    def __new__(cls, text: str, named: str) -> "GuardedText":
        """``text`` with its ``named``."""
        made = super().__new__(cls, text)
        made.named = named
        return made


def cut(text: str, longest: int, *, at_start: bool = False) -> str:
    """At most the first ``longest`` characters of a text, guarded if the text is. ``at_start``: the last ones."""
    kept = slice(-longest, None) if at_start else slice(longest)
    if isinstance(text, GuardedText):
        return GuardedText(text[kept], text.named[kept])
    return text[kept]


def joined(texts: Iterable[str]) -> str:
    """The texts as one, guarded if any of them is. Texts beside guarded ones must not have control tokens."""
    parts = list(texts)
    text = "".join(parts)
    if not any(isinstance(part, GuardedText) for part in parts):
        return text
    return GuardedText(text, "".join(part.named if isinstance(part, GuardedText) else part for part in parts))

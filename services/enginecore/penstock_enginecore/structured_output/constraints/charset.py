"""Sets of characters, and how they are written in a grammar."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

Range = tuple[int, int]
"""First and last code point, both included."""

_SURROGATES = (0xD800, 0xDFFF)
_LAST = 0x10FFFF
ESCAPED = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""The characters that a JSON string holds behind a backslash, with the letter that stands for each."""


class CharSet:
    """An immutable set of characters. Never holds surrogates: they are no characters."""

    __slots__ = ("ranges",)

    def __init__(self, ranges: Iterable[Range]) -> None:
        self.ranges = tuple(_merged(ranges))

    @classmethod
    def of(cls, characters: str) -> "CharSet":
        """The set of these characters."""
        return cls((ord(c), ord(c)) for c in characters)

    def __or__(self, other: "CharSet") -> "CharSet":
        return CharSet((*self.ranges, *other.ranges))

    def __invert__(self) -> "CharSet":
        edges = [(-1, -1), *sorted((*self.ranges, _SURROGATES)), (_LAST + 1, _LAST + 1)]
        return CharSet((low[1] + 1, high[0] - 1) for low, high in pairwise(edges) if low[1] + 1 <= high[0] - 1)

    def __sub__(self, other: "CharSet") -> "CharSet":
        return ~(~self | other)

    def __and__(self, other: "CharSet") -> "CharSet":
        return ~(~self | ~other)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __contains__(self, character: str) -> bool:
        return any(low <= ord(character) <= high for low, high in self.ranges)


def _merged(ranges: Iterable[Range]) -> Iterator[Range]:
    below, above = (0, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, _LAST)
    parts = [
        (max(low, part[0]), min(high, part[1]))
        for low, high in ranges
        for part in (below, above)
        if max(low, part[0]) <= min(high, part[1])
    ]
    current: Range | None = None
    for low, high in sorted(parts):
        if current is not None and low <= current[1] + 1:
            current = (current[0], max(current[1], high))
            continue
        if current is not None:
            yield current
        current = (low, high)
    if current is not None:
        yield current


ANY = CharSet([(0, _LAST)])
PLAIN_IN_JSON = CharSet([(0x20, _LAST)]) - CharSet.of('"\\')
"""The characters that stand for themselves in a JSON string."""


def as_text(characters: CharSet) -> str:
    """The expression for one of ``characters``. They must be some."""
    return (
        "["
        + "".join(_escape(low) + ("" if low == high else "-" + _escape(high)) for low, high in characters.ranges)
        + "]"
    )


def as_json(characters: CharSet) -> str:
    """The expression for one of ``characters`` inside a JSON string, spelled the one way that the grammar of JSON strings
    here allows; ``""`` when none of them can be written. Control characters without a letter of their own cannot.
    """
    parts = [as_text(plain)] if (plain := characters & PLAIN_IN_JSON) else []
    if letters := "".join(letter for c, letter in ESCAPED.items() if c in characters):
        parts.append('"\\\\" ' + as_text(CharSet.of(letters)))
    return f"({' | '.join(parts)})" if len(parts) > 1 else "".join(parts)


def literal(text: str) -> str:
    """The expression for exactly ``text``."""
    return '"' + "".join(_escape(ord(c)) for c in text) + '"'


def _escape(code: int) -> str:
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

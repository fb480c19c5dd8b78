"""Text that must come, cut into tokens."""

from collections.abc import Iterable

import numpy as np

from penstock_enginecore.structured_output.core.base import BITS, Mask

_MOST = 32
"""Tokens."""


class Cutter:
    """Cuts by the longest tokens there are, from the front. A model may cut otherwise: what is cut so is guessed. The last
    token is left off where a longer one begins with it: what follows may belong to it.
    """

    def __init__(self, tokens: Iterable[bytes]) -> None:
        """``tokens``: by id, what each stands for; empty for one that stands for nothing."""
        self._ids: dict[bytes, int] = {}
        for token_id, text in enumerate(tokens):
            if text:
                self._ids.setdefault(text, token_id)
        self._longest = max(map(len, self._ids), default=0)
        self._beginnings = {text[:end] for text in self._ids for end in range(1, len(text))}

    def cut(self, text: bytes) -> list[int]:
        """Tokens of the beginning of ``text``."""
        found: list[int] = []
        place, piece = 0, b""
        while place < len(text) and len(found) < _MOST:
            for length in range(min(self._longest, len(text) - place), 0, -1):
                piece = text[place : place + length]
                if (token_id := self._ids.get(piece)) is not None:
                    break
            else:
                return found
            found.append(token_id)
            place += length
        if found and place == len(text) and piece in self._beginnings:
            found.pop()
        return found


def only_one(mask: Mask) -> int | None:
    """The one token that ``mask`` allows; None for none, and for several."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    word = int(mask[words[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else int(words[0]) * BITS + word.bit_length() - 1

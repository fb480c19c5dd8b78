"""Outputs that are new tokens and nothing else, as columns: what a step says of most of its requests."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import TypeAlias

import msgspec

UINT32 = "I"
"""Type code of the columns' numbers, which are unsigned and have 4 bytes."""

NewTokens: TypeAlias = tuple[str, list[int]]
"""The id of a request, and its new tokens."""


def column() -> "array[int]":
    """An empty column."""
    return array(UINT32)


class TokenColumns(msgspec.Struct, kw_only=True):
    """One row per output: the number that its request has on the session, the index of its first new token in the whole output,
    and how many new tokens there are, where that is not one for every row (``counts`` is empty then). ``token_ids`` are those
    of all rows, one row behind the other. ``drafts``: the drafted tokens that were verified for each row, of which all its tokens
    but the last held; empty where there were none.
    """

    request_numbers: "array[int]" = msgspec.field(default_factory=column)
    offsets: "array[int]" = msgspec.field(default_factory=column)
    counts: "array[int]" = msgspec.field(default_factory=column)
    token_ids: "array[int]" = msgspec.field(default_factory=column)
    drafts: "array[int]" = msgspec.field(default_factory=column)

    def __len__(self) -> int:
        return len(self.request_numbers)

    def add(self, request_number: int, offset: int, token_ids: Sequence[int], num_drafts: int = 0) -> None:
        """One more row. Raises OverflowError, and adds nothing, for a token id that has no 32 bits. Hot: once per output."""
        if len(token_ids) != 1 or self.counts:
            self._add_counted(token_ids)
        else:
            self.token_ids.append(token_ids[0])
        if num_drafts or self.drafts:
            self._add_drafts(num_drafts)
        self.offsets.append(offset)
        self.request_numbers.append(request_number)

    def _add_counted(self, token_ids: Sequence[int]) -> None:
        new = array(UINT32, token_ids)
        if not self.counts:
            self.counts.extend([1] * len(self))
        self.token_ids.extend(new)
        self.counts.append(len(new))

    def _add_drafts(self, num_drafts: int) -> None:
        if not self.drafts:
            self.drafts.extend([0] * len(self))
        self.drafts.append(num_drafts)

    def rows(self) -> Iterable[tuple[int, int, list[int]]]:
        """The number of its request, the offset and the new tokens of each row. Hot: once per output."""
        if not self.counts:
            return zip(self.request_numbers, self.offsets, ([token_id] for token_id in self.token_ids), strict=True)
        return self._counted_rows()

    def _counted_rows(self) -> Iterable[tuple[int, int, list[int]]]:
        all_token_ids, start = self.token_ids.tolist(), 0
        for number, offset, count in zip(self.request_numbers, self.offsets, self.counts, strict=True):
            yield number, offset, all_token_ids[start : start + count]
            start += count

    def drafted(self) -> Iterator[tuple[int, int, int]]:
        """The number of its request, the drafted tokens and those of them that held, of each row that had some."""
        counts = self.counts or repeat(1)
        for number, num_drafts, count in zip(self.request_numbers, self.drafts, counts, strict=False):
            if num_drafts:
                yield number, num_drafts, min(count - 1, num_drafts)

    def cut(self, num_rows: int) -> "list[TokenColumns]":
        """The same in several, of up to ``num_rows`` rows each."""
        pieces = [TokenColumns()]
        for row, num_drafts in zip(self.rows(), self.drafts or repeat(0), strict=False):
            if len(pieces[-1]) == num_rows:
                pieces.append(TokenColumns())
            pieces[-1].add(*row, num_drafts)
        return pieces

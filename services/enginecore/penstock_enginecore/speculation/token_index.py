"""Where the last tokens of a sequence have come before, found by an index that grows with it."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

_MASK = 2**64 - 1
_FACTOR = 1_000_003
_FEW = 64


class TokenIndex:
    """Tokens, and for each run of ``width`` of them the place where such a run ended before: a dict has the newest, and from each
    there is a link to the one before it. A token costs a look-up and a store; runs are told apart by 64 bits, which
    ``ending_like`` leaves to be compared.
    """

    __slots__ = ("_before", "_newest", "_width", "tokens")

    def __init__(self, width: int, tokens: npt.NDArray[np.integer] | Sequence[int] = ()) -> None:
        self._width = width
        self.tokens: list[int] = []
        self._before: list[int] = []
        """By place: where a run that ends there ended before; -1: nowhere."""
        self._newest: dict[int, int] = {}
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: npt.NDArray[np.integer] | Sequence[int]) -> None:
        """Add tokens at the end."""
        if len(tokens) > _FEW:
            self._extend_many(np.asarray(tokens))
            return
        known, before, newest, width = self.tokens, self._before, self._newest, self._width
        for token in tokens.tolist() if isinstance(tokens, np.ndarray) else tokens:
            known.append(token)
            end = len(known)
            if end < width:
                before.append(-1)
                continue
            key = 0
            for each in known[end - width :]:
                key = (key * _FACTOR + each) & _MASK
            before.append(newest.get(key, -1))
            newest[key] = end

    def _extend_many(self, tokens: npt.NDArray[np.integer]) -> None:
        """As ``extend``, of thousands at a time."""
        width, first = self._width, len(self.tokens)
        overlap = self.tokens[max(0, first - width + 1) :]
        self.tokens += tokens.tolist()
        run = np.concatenate([np.array(overlap, dtype=np.uint64), tokens.astype(np.uint64)])
        ends = len(run) - width + 1
        if ends <= 0:
            self._before += [-1] * len(tokens)
            return
        keys = np.zeros(ends, dtype=np.uint64)
        for i in range(width):
            keys = keys * np.uint64(_FACTOR) + run[i : i + ends]
        order = np.argsort(keys, kind="stable")
        same = keys[order[1:]] == keys[order[:-1]]
        place = len(self.tokens) - ends + 1
        before = np.full(ends, -1, dtype=np.int64)
        before[order[1:][same]] = order[:-1][same] + place
        found, listed = before.tolist(), keys.tolist()
        newest = self._newest
        if newest:
            for i in order[np.concatenate([[True], ~same])].tolist():
                found[i] = newest.get(listed[i], -1)
        newest.update(zip(listed, range(place, place + ends), strict=True))
        self._before += [-1] * (len(tokens) - ends) + found

    def ending_like(self, tail: Sequence[int], most: int) -> Iterator[int]:
        """Places, the newest first and ``most`` of them, where a run like the last ``width`` tokens of ``tail`` ended, the end of
        these tokens not among them.
        """
        width = self._width
        if len(tail) < width:
            return
        key = 0
        last = list(tail[-width:])
        for each in last:
            key = (key * _FACTOR + each) & _MASK
        place = self._newest.get(key, -1)
        tokens, end = self.tokens, len(self.tokens)
        while place >= 0 and most:
            if place < end and tokens[place - width : place] == last:
                yield place
                most -= 1
            place = self._before[place - 1]

    def longest(self, tail: Sequence[int], most: int, limit: int) -> tuple[int, int]:
        """Of these the place where most tokens before it are like ``tail``, the newest of equals, and how many are, up to
        ``limit``; (-1, 0) for none.
        """
        best, length = -1, 0
        tokens = self.tokens
        for place in self.ending_like(tail, most):
            count = self._width
            while (
                count < limit and count < place and count < len(tail) and tokens[place - 1 - count] == tail[-1 - count]
            ):
                count += 1
            if count > length:
                best, length = place, count
                if count >= limit:
                    break
        return best, length

    def following(self, place: int, count: int) -> list[int]:
        """``count`` tokens from ``place`` on. What ends before is taken to go on as it has done since ``place``."""
        found = self.tokens[place : place + count]
        period = len(self.tokens) - place
        while len(found) < count:
            found += found[: count - len(found)] if len(found) >= period else found
            if not period:
                break
        return found[:count]

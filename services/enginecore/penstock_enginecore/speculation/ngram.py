"""Drafts by prompt lookup (Saxena, 2023). If the last tokens of a request occurred earlier in the request, the tokens
after that occurrence are drafted.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.attention.kv_cache import LayerCaches
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.scheduler.output import NewRequestData
from penstock_enginecore.speculation.base import DraftRequest, DraftStep, Stateless

# Base of drafters that only look up tokens. These drafters have no weights, keys or values.


class Weightless(Stateless):
    """Base of drafters that compute nothing on the device."""

    specs: Mapping[str, KVCacheSpec] = {}
    caches: LayerCaches = {}
    weight_bytes = 0

    def allocate(self, config: KVCacheConfig) -> None:
        """Do nothing, because this drafter has no KV cache."""

    def release(self) -> None:
        """Do nothing, because this drafter has no KV cache."""

    def to(self, device: torch.device) -> None:
        """Do nothing, because this drafter has no weights."""


# Index of earlier occurrences of the last tokens. The index grows with the sequence.

_MASK = 2**64 - 1
_FACTOR = 1_000_003
_FEW = 64


class TokenIndex:
    """A sequence of tokens, and an index of the positions at which each run of ``width`` consecutive tokens ends. A
    dict maps a run to the newest of these positions, and each position links to the previous position of the same run.
    Adding a token costs one lookup and one store. 64-bit hashes identify runs. ``ending_like`` also compares the
    tokens.
    """

    __slots__ = ("_before", "_newest", "_width", "tokens")

    def __init__(self, width: int, tokens: npt.NDArray[np.integer] | Sequence[int] = ()) -> None:
        self._width = width
        self.tokens: list[int] = []
        self._before: list[int] = []
        """Previous position at which the same run ended, by position. -1 if there is no previous position."""
        self._newest: dict[int, int] = {}
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: npt.NDArray[np.integer] | Sequence[int]) -> None:
        """Append tokens to the sequence and to the index."""
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
        """Append many tokens. Gives the same result as ``extend``, but processes thousands of tokens at a time."""
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
        """Yield up to ``most`` positions at which a run equal to the last ``width`` tokens of ``tail`` ended, newest
        first.

        A run that ends at the last token of the sequence is not included.
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
        """Return the position after the longest match for ``tail``, and the length of the match in tokens. If several
        matches have the same length, the newest position is returned. (-1, 0) means that there is no match.

        Args:
            tail: The last tokens of the sequence.
            most: Maximum number of positions to examine.
            limit: Maximum match length.
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
        """Return ``count`` tokens, starting at position ``place``. If the sequence has fewer tokens after ``place``,
        repeat these tokens.
        """
        found = self.tokens[place : place + count]
        period = len(self.tokens) - place
        while len(found) < count:
            found += found[: count - len(found)] if len(found) >= period else found
            if not period:
                break
        return found[:count]


_MOST = 8
"""Number of newest positions that a search examines. The position with the longest match is used."""


class Ngram(Weightless):
    """A ``Drafter`` that looks up tokens in the same request.

    At least ``shortest`` tokens must match. Longer matches are preferred, up to ``longest`` tokens. If several matches
    have the same length, the newest match is used, because it predicts the next tokens best.
    """

    name = "ngram"

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._indices: dict[str, TokenIndex] = {}

    def begin(self, request: NewRequestData) -> None:
        """Add a request. The drafter indexes the request's tokens when it drafts for the request."""
        self._indices[request.request_id] = TokenIndex(self._shortest)

    def end(self, request_id: str, token_ids: npt.NDArray[np.int32], *, num_prompt_tokens: int) -> None:  # noqa: ARG002
        """Delete the index of the request."""
        self._indices.pop(request_id, None)

    def propose(self, step: DraftStep) -> list[list[int]]:
        """Draft tokens for each request. Requests whose last tokens did not occur earlier get no drafts."""
        return [self._draft(request) if request.num_drafts else [] for request in step.requests]

    def _draft(self, request: DraftRequest) -> list[int]:
        index = self._indices[request.request_id]
        index.extend(request.token_ids[len(index) :])
        tail = index.tokens[-self._longest :]
        place, _ = index.longest(tail, _MOST, self._longest)
        return index.following(place, request.num_drafts) if place >= 0 else []

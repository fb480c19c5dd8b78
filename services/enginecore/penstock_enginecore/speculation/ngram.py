"""Drafts what followed the last tokens where they came before in the same request: prompt lookup (Saxena, 2023)."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from penstock_enginecore.attention.kv_cache import LayerCaches
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.scheduler.output import NewRequestData
from penstock_enginecore.speculation.base import DraftRequest, DraftStep, Stateless

# What drafters that look tokens up have not: weights, and keys and values.


class Weightless(Stateless):
    """The part of a ``Drafter`` that concerns a device."""

    specs: Mapping[str, KVCacheSpec] = {}
    caches: LayerCaches = {}
    weight_bytes = 0

    def allocate(self, config: KVCacheConfig) -> None:
        """There is no cache."""

    def release(self) -> None:
        """There is no cache."""

    def to(self, device: torch.device) -> None:
        """There is nothing to move."""


# Where the last tokens of a sequence have come before, found by an index that grows with it.

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


_MOST = 8
"""Places that are looked at: of the newest ones, the one that is alike for longest."""


class Ngram(Weightless):
    """A ``Drafter``. ``shortest`` tokens at least must have come before; those are preferred of which more are alike, up to
    ``longest``, and of equals the newest, which follows most likely what a text is at now.
    """

    name = "ngram"

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._indices: dict[str, TokenIndex] = {}

    def begin(self, request: NewRequestData) -> None:
        """Look at its tokens once it drafts."""
        self._indices[request.request_id] = TokenIndex(self._shortest)

    def end(self, request_id: str, token_ids: npt.NDArray[np.int32], *, num_prompt_tokens: int) -> None:  # noqa: ARG002
        """Forget it."""
        self._indices.pop(request_id, None)

    def propose(self, step: DraftStep) -> list[list[int]]:
        """Nothing for requests whose last tokens are new."""
        return [self._draft(request) if request.num_drafts else [] for request in step.requests]

    def _draft(self, request: DraftRequest) -> list[int]:
        index = self._indices[request.request_id]
        index.extend(request.token_ids[len(index) :])
        tail = index.tokens[-self._longest :]
        place, _ = index.longest(tail, _MOST, self._longest)
        return index.following(place, request.num_drafts) if place >= 0 else []

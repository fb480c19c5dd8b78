"""Drafts by suffix matching. Where a request's last tokens occurred before, in the request or in completed outputs, the
tokens that most often came next are drafted.

The idea is from SuffixDecoding (Oliaro et al., 2024): the longer the match, the more tokens are drafted. A token is
drafted if it came next in a sufficient fraction of the matches. Only the newest positions with the longest match are
counted. An index of short runs finds these positions. Unlike a tree of all suffixes, the index needs only one entry per
token.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from penstock_enginecore.core.scheduler.output import NewRequestData
from penstock_enginecore.speculation.base import DraftRequest, DraftStep
from penstock_enginecore.speculation.ngram import TokenIndex, Weightless

# Store of completed outputs, within a memory limit.

_BYTES_PER_TOKEN = 320
"""Memory per token in bytes, measured and rounded up. The memory includes the token in a list, the position, and the
index entry of a run with its list of positions.
"""
_PLACES = 5
"""Number of newest positions that the index keeps for each run of tokens."""
_GAP = -1


class _Generation:
    """Concatenated outputs of one scope, and for each run of ``width`` consecutive tokens the positions at which the
    run ends.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self.tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}

    def add(self, output: Sequence[int]) -> None:
        width, tokens, found = self._width, self.tokens, self._places
        first = len(tokens)
        tokens.extend(output)
        for end in range(first + width, len(tokens) + 1):
            places = found.setdefault(tuple(tokens[end - width : end]), [])
            if len(places) == _PLACES:
                del places[0]
            places.append(end)
        tokens.append(_GAP)

    def ending_like(self, tail: Sequence[int]) -> Sequence[int]:
        return self._places.get(tuple(tail[-self._width :]), ())


class PastOutputs:
    """Stores completed outputs by scope, which is the cache salt of the request. Scopes are separate, because otherwise
    the speed of a tenant's requests could reveal other tenants' outputs.

    The store has two halves of ``max_bytes``. When the current half is full, the store drops the older half and fills a
    new half.
    """

    def __init__(self, width: int, max_bytes: int) -> None:
        self._width = width
        self._max_tokens = max_bytes // _BYTES_PER_TOKEN // 2
        self._new: dict[str, _Generation] = {}
        self._old: dict[str, _Generation] = {}
        self._num_new = self._num_old = 0

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the stored outputs in bytes."""
        return (self._num_new + self._num_old) * _BYTES_PER_TOKEN

    def add(self, scope: str, output: Sequence[int]) -> None:
        """Add an output, or the remaining tokens of a partly stored output. If the output is too long, only its last
        tokens are stored.
        """
        output = output[max(0, len(output) - self._max_tokens) :]
        if len(output) <= self._width:
            return
        if self._num_new + len(output) > self._max_tokens:
            self._old, self._num_old = self._new, self._num_new
            self._new, self._num_new = {}, 0
        generation = self._new.get(scope)
        if generation is None:
            generation = self._new[scope] = _Generation(self._width)
        generation.add(output)
        self._num_new += len(output)

    def ending_like(self, scope: str, tail: Sequence[int]) -> Iterator[tuple[list[int], int]]:
        """Yield pairs of a token list and a position in the list at which the last tokens of ``tail`` end, newest
        first.
        """
        for half in (self._new, self._old):
            if (generation := half.get(scope)) is not None:
                tokens = generation.tokens
                for place in reversed(generation.ending_like(tail)):
                    yield tokens, place


_WIDTH = 3
_OWN = 4
_LENGTHS = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Lengths of matches that a search looks for, in tokens."""
_REMEMBERED = 4096
"""Number of ended requests for which the drafter remembers how many output tokens it has stored. The requests may
continue after a preemption.
"""


class Suffix(Weightless):
    """A ``Drafter`` that looks up tokens in the request and in completed outputs.

    Args:
        max_depth: Maximum match length, in tokens.
        max_factor: Maximum number of drafts per matching token.
        min_probability: Minimum probability of a draft: the fraction of matches after which the same tokens came.
        max_bytes: Maximum memory for completed outputs in bytes. With 0, no outputs are stored.
    """

    name = "suffix"

    def __init__(self, *, max_depth: int, max_factor: float, min_probability: float, max_bytes: int) -> None:
        self._lengths = [length for length in _LENGTHS if length <= max(max_depth, _WIDTH)]
        self._max_factor, self._min_probability = max_factor, min_probability
        self._past = PastOutputs(_WIDTH, max_bytes) if max_bytes else None
        self._indices: dict[str, TokenIndex] = {}
        self._scopes: dict[str, str] = {}
        self._remembered: OrderedDict[str, int] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the completed outputs in bytes."""
        return 0 if self._past is None else self._past.num_bytes

    def begin(self, request: NewRequestData) -> None:
        """Add a request. The drafter indexes the request's tokens when it drafts for the request."""
        self._indices[request.request_id] = TokenIndex(_WIDTH)
        self._scopes[request.request_id] = request.context.cache_salt

    def end(self, request_id: str, token_ids: npt.NDArray[np.int32], *, num_prompt_tokens: int) -> None:
        """Store the output of the request that is not stored yet, without the prompt."""
        self._indices.pop(request_id, None)
        scope = self._scopes.pop(request_id, None)
        if scope is None or self._past is None:
            return
        known = self._remembered.pop(request_id, 0)
        output = token_ids[num_prompt_tokens:].tolist()
        self._past.add(scope, output[max(0, known - _WIDTH) :] if known else output)
        self._remembered[request_id] = len(output)
        if len(self._remembered) > _REMEMBERED:
            self._remembered.popitem(last=False)

    def propose(self, step: DraftStep) -> list[list[int]]:
        """Draft tokens for each request. Requests whose last tokens did not occur earlier get no drafts."""
        return [self._draft(request) if request.num_drafts else [] for request in step.requests]

    def _draft(self, request: DraftRequest) -> list[int]:
        index = self._indices[request.request_id]
        index.extend(request.token_ids[len(index) :])
        tail = index.tokens[-self._lengths[-1] :]
        places = [(index.tokens, place) for place in index.ending_like(tail, _OWN)]
        if self._past is not None:
            places += self._past.ending_like(self._scopes[request.request_id], tail)
        if not places:
            return []
        length, places = self._longest(tail, places)
        if not places:
            return []
        count = min(request.num_drafts, max(1, int(self._max_factor * length)))
        return self._likeliest(places, count)

    def _longest(self, tail: list[int], places: list[tuple[list[int], int]]) -> tuple[int, list[tuple[list[int], int]]]:
        """Return the longest match length among ``_LENGTHS``, and the positions after the matches of that length."""
        lengths = self._lengths
        size, level = len(tail), 0
        best, alike = tail[-_WIDTH:], list[tuple[list[int], int]]()
        for each in places:
            tokens, place = each
            if tokens[max(place - len(best), 0) : place] != best:
                continue
            while level + 1 < len(lengths) and lengths[level + 1] <= size:
                length = lengths[level + 1]
                longer = tail[-length:]
                if place < length or tokens[place - length : place] != longer:
                    break
                level, best = level + 1, longer
                alike.clear()
            alike.append(each)
        return len(best), alike

    def _likeliest(self, places: Sequence[tuple[list[int], int]], count: int) -> list[int]:
        """Return the most likely tokens after ``places``, up to ``count``, as long as the probability of each token is
        at least the minimum.
        """
        drafts: list[int] = []
        if len(places) == 1:
            tokens, place = places[0]
            drafts = tokens[place : place + count]
            return drafts[: drafts.index(-1)] if -1 in drafts else drafts
        total, left = len(places), list(places)
        for offset in range(count):
            following = [tokens[place + offset] for tokens, place in left if place + offset < len(tokens)]
            if not following:
                break
            token, times = Counter(following).most_common(1)[0]
            if token < 0 or times < self._min_probability * total:
                break
            drafts.append(token)
            if times < len(left):
                left = [
                    (tokens, place) for tokens, place in left if tokens[place + offset : place + offset + 1] == [token]
                ]
        return drafts

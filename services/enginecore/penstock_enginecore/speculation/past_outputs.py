"""Outputs that have ended, kept to draft from, within so many bytes."""

from collections.abc import Iterator, Sequence

_BYTES_PER_TOKEN = 320
"""A token in a list, its number, and its run's entry with a list of places; measured, and rounded up."""
_PLACES = 5
"""Of each run the newest places are kept."""
_GAP = -1


class _Generation:
    """Outputs of one scope one behind the other, and by run of ``width`` tokens the places where it ends."""

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
    """By scope, so that no tenant's speed tells of another's outputs. The newest are kept: once half of ``max_bytes`` is
    filled, a new half is begun, and the half before the last is dropped.
    """

    def __init__(self, width: int, max_bytes: int) -> None:
        self._width = width
        self._max_tokens = max_bytes // _BYTES_PER_TOKEN // 2
        self._new: dict[str, _Generation] = {}
        self._old: dict[str, _Generation] = {}
        self._num_new = self._num_old = 0

    @property
    def num_bytes(self) -> int:
        """What they take, about."""
        return (self._num_new + self._num_old) * _BYTES_PER_TOKEN

    def add(self, scope: str, output: Sequence[int]) -> None:
        """Remember an output, or the rest of one. Of one that is longer than what is kept the end counts."""
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
        """Tokens, and places in them where a run like the end of ``tail`` ended; the newest first."""
        for half in (self._new, self._old):
            if (generation := half.get(scope)) is not None:
                tokens = generation.tokens
                for place in reversed(generation.ending_like(tail)):
                    yield tokens, place

"""Finding the first of several strings in a text that arrives in pieces."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """``stop`` was found; ``end`` is the index in the fed piece just behind it."""

    stop: str
    end: int


class StopMatcher:
    """An Aho-Corasick automaton over the stop strings: constant time per character, however many there are.

    The stop string that is complete first wins; of several that end at the same character, the longest. So the result
    does not depend on how the text was cut into pieces.
    """

    __slots__ = ("_depth", "_fail", "_found", "_goto", "_state")

    def __init__(self, stops: Sequence[str]) -> None:
        """``stops``: at least one, none empty."""
        self._goto: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str] = [""]
        for stop in stops:
            self._insert(stop)
        self._fail = self._link()
        self._state = 0

    @property
    def partial(self) -> int:
        """Length of the longest end of the text so far that a stop string begins with."""
        return self._depth[self._state]

    def feed(self, text: str) -> StopMatch | None:
        """The first stop string that is complete within ``text``, given everything fed before."""
        state, goto, fail, found = self._state, self._goto, self._fail, self._found
        for index, char in enumerate(text):
            while state and char not in goto[state]:
                state = fail[state]
            state = goto[state].get(char, 0)
            if found[state]:
                self._state = 0
                return StopMatch(found[state], index + 1)
        self._state = state
        return None

    def _insert(self, stop: str) -> None:
        state = 0
        for depth, char in enumerate(stop, start=1):
            following = self._goto[state].get(char)
            if following is None:
                following = len(self._goto)
                self._goto[state][char] = following
                self._goto.append({})
                self._depth.append(depth)
                self._found.append("")
            state = following
        self._found[state] = stop

    def _link(self) -> list[int]:
        """Failure links, breadth first; a state also finds what its link finds, unless it ends a longer stop string."""
        fail = [0] * len(self._goto)
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._goto[state].items():
                link = fail[state]
                while link and char not in self._goto[link]:
                    link = fail[link]
                fail[following] = self._goto[link].get(char, 0)
                self._found[following] = self._found[following] or self._found[fail[following]]
                queue.append(following)
        return fail

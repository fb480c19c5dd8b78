"""Where LoRA adapters are, and where they should be. Does no I/O."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable

LOADING = 4.0
"""What loading an adapter counts as in an engine's score: as much as a waiting request."""
MOST_HELD = 64
"""Adapters that an engine is taken to hold, those that it was sent last, while it does not say how many it does."""


class LoraPlaces:
    """By engine, which adapters it holds: those that its requests from here had last. Each engine is the home of a part of the
    adapters, by rendezvous hashing, alike for all frontends: so a few engines hold each, and one that comes or goes changes
    the homes of few.
    """

    def __init__(self) -> None:
        self._held: dict[str, OrderedDict[bytes, None]] = {}
        self._most: dict[str, int] = {}

    def sent(self, engine: str, digest: bytes) -> None:
        """A request with this adapter goes to an engine."""
        held = self._held.setdefault(engine, OrderedDict())
        held[digest] = None
        held.move_to_end(digest)
        self._cut(engine)

    def lacks(self, engine: str, digest: bytes) -> None:
        """An engine says that it has not got this adapter."""
        self._held.get(engine, OrderedDict()).pop(digest, None)

    def holds(self, engine: str, count: int) -> None:
        """An engine says how many it holds."""
        self._most[engine] = count
        self._cut(engine)

    def forget(self, engine: str) -> None:
        """An engine is gone, and holds nothing when it comes back."""
        self._held.pop(engine, None)
        self._most.pop(engine, None)

    def term(self, engine: str, digest: bytes) -> float:
        """What an engine's score has to grow by for a request with this adapter."""
        return 0.0 if digest in self._held.get(engine, ()) else LOADING

    def in_order(self, engines: Iterable[str], digest: bytes) -> list[str]:
        """The engines, the adapter's home first and then those that are next to be."""
        return sorted(engines, key=lambda engine: _weight(engine, digest))

    def _cut(self, engine: str) -> None:
        held = self._held.get(engine, OrderedDict())
        while len(held) > self._most.get(engine, MOST_HELD):
            held.popitem(last=False)


def _weight(engine: str, digest: bytes) -> bytes:
    return hashlib.blake2b(engine.encode(), key=digest, digest_size=8).digest()

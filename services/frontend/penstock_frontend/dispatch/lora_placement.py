"""Where LoRA adapters are, and on which engines they should be. Does no I/O."""

import enum
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from penstock_common.lora_registry import LoraHeld, short

# Where LoRA adapters are, and where they should be. Does no I/O.

LOADING = 4.0
"""What loading an adapter counts as in an engine's score, at least: as much as a waiting request."""
MOST_LOADING = 64.0
EVICTING = 8.0
"""What it counts as on top where it takes the place of others: somebody will want those again, and then others still."""
CACHED = 0.5
"""What an adapter counts as that is in memory and has no slot: less than a running request."""
SLOTS_FULL = 16.0
"""What an adapter counts as that waits until others leave a slot: as much as four waiting requests."""
MOST_HELD = 64
"""Adapters that an engine is taken to hold, those that it was sent last, while it does not say which it does."""
HINT_SECONDS = 1.0
"""How long an engine that says which it holds is taken to have what it was sent: by then it has said so, or has it not."""
_WAITING = 4.0
"""What a waiting request counts as."""


class Where(enum.Enum):
    """How an engine has an adapter."""

    ACTIVE = "active"
    """In a slot, or a request with it is on its way there."""
    CACHED = "cached"
    """In memory."""
    ABSENT = "absent"


class LoraPlaces:
    """By engine, which adapters it holds: as it says, and until it does, those that its requests from here had last. Each engine
    is the home of a part of the adapters, by rendezvous hashing, alike for all frontends: so a few engines hold each, and one
    that comes or goes changes the homes of few.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds."""
        self._clock = clock
        self._told: dict[str, _Told] = {}
        self._sent: dict[str, OrderedDict[bytes, float]] = {}
        """By engine, what it was sent, and when."""
        self._most: dict[str, int] = {}

    def sent(self, engine: str, digest: bytes) -> None:
        """A request with this adapter goes to an engine."""
        sent = self._sent.setdefault(engine, OrderedDict())
        sent[digest] = self._clock()
        sent.move_to_end(digest)
        self._cut(engine)

    def lacks(self, engine: str, digest: bytes) -> None:
        """An engine says that it has not got this adapter."""
        self._sent.get(engine, OrderedDict()).pop(digest, None)

    def holds(self, engine: str, count: int) -> None:
        """An engine says how many it holds."""
        self._most[engine] = count
        self._cut(engine)

    def told(self, engine: str, held: LoraHeld) -> None:
        """An engine says which it holds; what it has said of that before, and comes later, is passed over."""
        known = self._told.get(engine)
        if known is None or known.version < held.version:
            self._told[engine] = _Told(held)

    def forget(self, engine: str) -> None:
        """An engine is gone, and holds nothing when it comes back."""
        for known in (self._told, self._sent, self._most):
            known.pop(engine, None)

    def where(self, engine: str, digest: bytes) -> Where:
        """How an engine has an adapter, as far as is known here."""
        told = self._told.get(engine)
        sent_at = self._sent.get(engine, _NOTHING).get(digest)
        if sent_at is not None and (told is None or self._clock() - sent_at < HINT_SECONDS):
            return Where.ACTIVE
        if told is None:
            return Where.ABSENT
        number = short(digest)
        if number in told.active:
            return Where.ACTIVE
        return Where.CACHED if number in told.held else Where.ABSENT

    def term(self, engine: str, digest: bytes) -> float:
        """What an engine's score has to grow by for a request with this adapter."""
        where = self.where(engine, digest)
        if where is Where.ACTIVE:
            return 0.0
        told = self._told.get(engine)
        if told is None:
            return LOADING
        cost = CACHED if where is Where.CACHED else told.loading
        return cost + SLOTS_FULL if told.full else cost

    def in_order(self, engines: Iterable[str], digest: bytes) -> list[str]:
        """The engines, the adapter's home first and then those that are next to be."""
        return sorted(engines, key=lambda engine: _weight(engine, digest))

    def _cut(self, engine: str) -> None:
        sent = self._sent.get(engine, OrderedDict())
        while len(sent) > self._most.get(engine, MOST_HELD):
            sent.popitem(last=False)


class _Told:
    """What an engine said last."""

    __slots__ = ("active", "full", "held", "loading", "version")

    def __init__(self, held: LoraHeld) -> None:
        self.version = held.version
        self.active = frozenset(held.active)
        self.held = frozenset(held.held)
        self.full = 0 < held.max_loras <= len(held.active)
        self.loading = min(max(_WAITING * held.requests_per_load, LOADING), MOST_LOADING)
        if held.full:
            self.loading += EVICTING


_NOTHING: OrderedDict[bytes, float] = OrderedDict()


def _weight(engine: str, digest: bytes) -> bytes:
    return hashlib.blake2b(engine.encode(), key=digest, digest_size=8).digest()

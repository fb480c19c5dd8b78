"""A pull as the engine that pulls sees it: what was asked for, what has come, and when to give up. Events in, effects out."""

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock_common.types.kv_transfer import BlockName

MAX_HASHES = 4096
"""Of a question, as the protocol has it."""
MAX_ASKED = 16
"""Questions of a stream that are open at once."""


class PullState(enum.Enum):
    """OPENING: asked for, not answered. FAILED and CLOSED are ends: nothing comes any more."""

    OPENING = "opening"
    OPEN = "open"
    FAILED = "failed"
    CLOSED = "closed"

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        return self in (PullState.FAILED, PullState.CLOSED)


class Ask(NamedTuple):
    """Send a fetch with this number."""

    number: int
    group: int
    hashes: tuple[bytes, ...]


class Acknowledge(NamedTuple):
    """Say that so many bytes have come since the begin."""

    num_bytes: int


class Arrived(NamedTuple):
    """A block of a fetch is there. ``sequence``: for ``taken``."""

    fetch_id: int
    place: int
    sequence: int


class Ended(NamedTuple):
    """Nothing more comes of a fetch."""

    fetch_id: int


class GiveUp(NamedTuple):
    """End the stream. ``released``: say first that the lease is not needed any more."""

    released: bool


Effect = Ask | Acknowledge | Arrived | Ended | GiveUp


class Broken(Exception):  # noqa: N818 - what it is
    """The other end does not keep to the protocol."""


class _Fetch:
    """``left``: the places of blocks that have not been answered, by name. ``asked``: open questions; ``unasked``: those that
    are still to be sent.
    """

    __slots__ = ("asked", "left", "unasked")

    def __init__(self, names: Sequence[BlockName]) -> None:
        self.left = {name: index for index, name in enumerate(names)}
        self.asked: set[int] = set()
        self.unasked: deque[tuple[int, tuple[bytes, ...]]] = deque()
        by_group: dict[int, list[bytes]] = {}
        for name in self.left:
            by_group.setdefault(name.group, []).append(name.hash)
        for group, hashes in by_group.items():
            for start in range(0, len(hashes), MAX_HASHES):
                self.unasked.append((group, tuple(hashes[start : start + MAX_HASHES])))


class Pull:
    """Of one source. Fetches may be asked for while it is opening: their questions wait for the answer. Each ends once.

    ``silence``: seconds without anything from the other end, while it owes something, after which it counts as gone. It owes
    nothing while blocks that came are not taken. ``window``: bytes that may be not taken at once.
    """

    def __init__(self, now: float, *, silence: float, window: int) -> None:
        self.state = PullState.OPENING
        self.reason = ""
        self._heard = now
        self._silence = silence
        self._window = window
        self._fetches: dict[int, _Fetch] = {}
        self._of: dict[int, int | None] = {}
        """By number of an open question, its fetch; None for one that was abandoned."""
        self._next_number = 1
        self._sizes: dict[int, int] = {}
        """By sequence, bytes of blocks that came and are not yet counted."""
        self._taken: set[int] = set()
        self._next_sequence = 0
        self._first = 0
        """The first that is not taken."""
        self._num_bytes = 0
        """That were acknowledged."""
        self.num_waiting_bytes = 0
        """Of blocks that have come and are not taken."""

    @property
    def num_fetches(self) -> int:
        """Those that have not ended."""
        return len(self._fetches)

    def fetch(self, fetch_id: int, names: Sequence[BlockName], now: float) -> list[Effect]:
        """Somebody wants these blocks."""
        if self.state.ended or not names:
            return [Ended(fetch_id)]
        if not self._of and self.state is PullState.OPEN:
            self._heard = now
        self._fetches[fetch_id] = _Fetch(names)
        return self._ask()

    def abandon(self, fetch_id: int) -> list[Effect]:
        """Nobody wants the rest of a fetch; one that has ended is passed over."""
        fetch = self._fetches.pop(fetch_id, None)
        if fetch is None:
            return []
        for number in fetch.asked:
            self._of[number] = None
        return [Ended(fetch_id), *self._ask()]

    def opened(self, now: float) -> list[Effect]:
        """The other end has the lease. Raises Broken when it says so twice."""
        if self.state is not PullState.OPENING:
            raise Broken("opened was said twice")
        self.state, self._heard = PullState.OPEN, now
        return self._ask()

    def heard(self, now: float) -> None:
        """Something came."""
        self._heard = now

    def block(self, number: int, name: BlockName, size: int, now: float, *, good: bool) -> list[Effect]:
        """A block has come, ``good`` if it is what it should be. Raises Broken for one that was not asked for, and for more bytes
        than may be under way.
        """
        fetch_id, index = self._answered(number, name, now)
        if self.num_waiting_bytes and self.num_waiting_bytes + size > self._window:
            raise Broken(f"more than {self._window} bytes came unacknowledged")
        sequence = self._next_sequence
        self._next_sequence += 1
        self._sizes[sequence] = size
        self.num_waiting_bytes += size
        if fetch_id is None or not good:
            return self.taken(sequence, now)
        return [Arrived(fetch_id, index, sequence)]

    def missing(self, number: int, name: BlockName, now: float) -> None:
        """A block does not come. Raises Broken for one that was not asked for."""
        self._answered(number, name, now)

    def done(self, number: int, now: float) -> list[Effect]:
        """A question was answered. Raises Broken for one that was not asked."""
        self._heard = now
        if number not in self._of:
            raise Broken(f"done with fetch {number}, which is not open")
        fetch_id = self._of.pop(number)
        effects: list[Effect] = []
        if fetch_id is not None:
            fetch = self._fetches[fetch_id]
            fetch.asked.discard(number)
            if not fetch.asked and not fetch.unasked:
                del self._fetches[fetch_id]
                effects.append(Ended(fetch_id))
        return [*effects, *self._ask()]

    def taken(self, sequence: int, now: float) -> list[Effect]:
        """The bytes of a block that came are not needed any more."""
        self._taken.add(sequence)
        self.num_waiting_bytes -= self._sizes[sequence]
        if sequence != self._first:
            return []
        while self._first in self._taken:
            self._taken.remove(self._first)
            self._num_bytes += self._sizes.pop(self._first)
            self._first += 1
        if not self.num_waiting_bytes:
            self._heard = max(self._heard, now)
        return [] if self.state.ended else [Acknowledge(self._num_bytes)]

    def fail(self, reason: str) -> list[Effect]:
        """The other end is gone, or no good: everything ends with what has come."""
        return self._end(PullState.FAILED, reason, released=False)

    def close(self, *, released: bool) -> list[Effect]:
        """Nobody needs the source any more. ``released``: nor will anybody else."""
        return self._end(PullState.CLOSED, "", released=released)

    def is_silent(self, now: float) -> bool:
        """Whether the other end owes something and has said nothing for too long."""
        owes = self.state is PullState.OPENING or (self.state is PullState.OPEN and bool(self._of))
        return owes and not self.num_waiting_bytes and now - self._heard >= self._silence

    def _answered(self, number: int, name: BlockName, now: float) -> tuple[int | None, int]:
        self._heard = now
        if number not in self._of:
            raise Broken(f"a block for fetch {number}, which is not open")
        fetch_id = self._of[number]
        if fetch_id is None:
            return None, 0
        index = self._fetches[fetch_id].left.pop(name, None)
        if index is None:
            raise Broken(f"a block that fetch {number} did not ask for")
        return fetch_id, index

    def _ask(self) -> list[Effect]:
        effects: list[Effect] = []
        if self.state is not PullState.OPEN:
            return effects
        for fetch_id, fetch in self._fetches.items():
            while fetch.unasked and len(self._of) < MAX_ASKED:
                group, hashes = fetch.unasked.popleft()
                number, self._next_number = self._next_number, self._next_number + 1
                self._of[number] = fetch_id
                fetch.asked.add(number)
                effects.append(Ask(number, group, hashes))
        return effects

    def _end(self, state: PullState, reason: str, *, released: bool) -> list[Effect]:
        if self.state.ended:
            return []
        self.state, self.reason = state, reason
        ended: Iterable[int] = list(self._fetches)
        self._fetches.clear()
        self._of.clear()
        return [*(Ended(fetch_id) for fetch_id in ended), GiveUp(released)]

"""The client side of a pull of KV blocks from another engine (the source), as a state machine without I/O. The state
machine handles events (messages, timeouts) and returns effects, which the caller carries out.
"""

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock_common.types.kv_transfer import BlockName

MAX_HASHES = 4096
"""Maximum number of block hashes in one fetch request, according to the protocol."""
MAX_ASKED = 16
"""Maximum number of fetch requests that may be open on one stream."""


class PullState(enum.Enum):
    """State of a pull.

    Attributes:
        OPENING: The source has not answered yet.
        OPEN: The source has granted the pull.
        FAILED: The pull ended with an error.
        CLOSED: The pull was closed.
    """

    OPENING = "opening"
    OPEN = "open"
    FAILED = "failed"
    CLOSED = "closed"

    @property
    def ended(self) -> bool:
        """Whether the pull has ended. After the end, no block arrives."""
        return self in (PullState.FAILED, PullState.CLOSED)


class Ask(NamedTuple):
    """Effect: send the source a fetch request with this number for blocks of one group."""

    number: int
    group: int
    hashes: tuple[bytes, ...]


class Acknowledge(NamedTuple):
    """Effect: acknowledge to the source the total number of bytes that were processed since the start of the pull."""

    num_bytes: int


class Arrived(NamedTuple):
    """Effect: deliver a block of a fetch that has arrived. When the block is processed, ``sequence`` must be passed to
    ``Pull.taken``.
    """

    fetch_id: int
    place: int
    sequence: int


class Ended(NamedTuple):
    """Effect: report that a fetch has ended."""

    fetch_id: int


class GiveUp(NamedTuple):
    """Effect: end the stream. If ``released`` is true, first tell the source that the lease is not needed any more."""

    released: bool


Effect = Ask | Acknowledge | Arrived | Ended | GiveUp


class Broken(Exception):  # noqa: N818 - what it is
    """Raised if the source violated the protocol."""


class _Fetch:
    """A fetch in progress.

    Attributes:
        left: Indices of blocks for which the source has not answered yet, by name.
        asked: Numbers of the fetch requests that were sent and are not complete.
        unasked: Fetch requests that have not been sent yet, as group and hashes.
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
    """A pull of blocks from one source. Fetches may begin while the pull is opening. Their requests are sent once the
    pull is open. Each fetch ends exactly once.

    The source counts as lost if it must send a message but sends nothing for ``silence`` seconds. While blocks that
    arrived are unprocessed, the source need not send messages. ``window`` is the maximum number of bytes that may have
    arrived but are not processed.
    """

    def __init__(self, now: float, *, silence: float, window: int) -> None:
        self.state = PullState.OPENING
        self.reason = ""
        self._heard = now
        self._silence = silence
        self._window = window
        self._fetches: dict[int, _Fetch] = {}
        self._of: dict[int, int | None] = {}
        """Number of the fetch to which each open fetch request belongs, by number of the request. None if the fetch was
        abandoned.
        """
        self._next_number = 1
        self._sizes: dict[int, int] = {}
        """Size in bytes of each block that has arrived but is not acknowledged, by sequence number."""
        self._taken: set[int] = set()
        self._next_sequence = 0
        self._first = 0
        """Lowest sequence number of a block that is not processed."""
        self._num_bytes = 0
        """Total number of bytes that were acknowledged to the source."""
        self.num_waiting_bytes = 0
        """Number of bytes that have arrived but are not processed."""

    @property
    def num_fetches(self) -> int:
        """Number of fetches that have not ended."""
        return len(self._fetches)

    def fetch(self, fetch_id: int, names: Sequence[BlockName], now: float) -> list[Effect]:
        """Begin a fetch of the blocks ``names``."""
        if self.state.ended or not names:
            return [Ended(fetch_id)]
        if not self._of and self.state is PullState.OPEN:
            self._heard = now
        self._fetches[fetch_id] = _Fetch(names)
        return self._ask()

    def abandon(self, fetch_id: int) -> list[Effect]:
        """Stop waiting for the blocks of a fetch that have not arrived. If the fetch has ended, do nothing."""
        fetch = self._fetches.pop(fetch_id, None)
        if fetch is None:
            return []
        for number in fetch.asked:
            self._of[number] = None
        return [Ended(fetch_id), *self._ask()]

    def opened(self, now: float) -> list[Effect]:
        """Handle the source's ``opened`` message. Raises Broken if the source sends ``opened`` twice."""
        if self.state is not PullState.OPENING:
            raise Broken("the sending engine sent the message 'opened' twice")
        self.state, self._heard = PullState.OPEN, now
        return self._ask()

    def heard(self, now: float) -> None:
        """Record that a message from the source arrived."""
        self._heard = now

    def block(self, number: int, name: BlockName, size: int, now: float, *, good: bool) -> list[Effect]:
        """Handle a block that arrived. ``good`` says whether the block's checksum is correct.

        Raises Broken if the block was not requested, or if more than ``window`` bytes are unprocessed.
        """
        fetch_id, index = self._answered(number, name, now)
        if self.num_waiting_bytes and self.num_waiting_bytes + size > self._window:
            raise Broken(f"more than {self._window} unacknowledged bytes arrived")
        sequence = self._next_sequence
        self._next_sequence += 1
        self._sizes[sequence] = size
        self.num_waiting_bytes += size
        if fetch_id is None or not good:
            return self.taken(sequence, now)
        return [Arrived(fetch_id, index, sequence)]

    def missing(self, number: int, name: BlockName, now: float) -> None:
        """Handle the source's message that it does not have a requested block. Raises Broken if the block was not
        requested.
        """
        self._answered(number, name, now)

    def done(self, number: int, now: float) -> list[Effect]:
        """Handle the source's message that a fetch request is complete. Raises Broken if the request is not open."""
        self._heard = now
        if number not in self._of:
            raise Broken(f"received done for fetch {number}, which is not open")
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
        """Record that a block has been processed, so that its bytes can be acknowledged."""
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
        """End the pull because the source is lost or violated the protocol. The open fetches end. Blocks that have
        arrived stay usable.
        """
        return self._end(PullState.FAILED, reason, released=False)

    def close(self, *, released: bool) -> list[Effect]:
        """Close the pull. ``released`` must be true if no engine needs the source's lease any more."""
        return self._end(PullState.CLOSED, "", released=released)

    def is_silent(self, now: float) -> bool:
        """Return whether the source must send a message but has sent none for longer than ``silence`` seconds."""
        owes = self.state is PullState.OPENING or (self.state is PullState.OPEN and bool(self._of))
        return owes and not self.num_waiting_bytes and now - self._heard >= self._silence

    def _answered(self, number: int, name: BlockName, now: float) -> tuple[int | None, int]:
        self._heard = now
        if number not in self._of:
            raise Broken(f"received a block for fetch {number}, which is not open")
        fetch_id = self._of[number]
        if fetch_id is None:
            return None, 0
        index = self._fetches[fetch_id].left.pop(name, None)
        if index is None:
            raise Broken(f"received a block that fetch {number} did not request")
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

"""How parsing of HTTP requests is shared between connections in each turn of the event loop."""

import asyncio
from collections import deque
from typing import Protocol

SLICE = 4096
"""Bytes that a connection's parser gets at once."""
BYTES_PER_TURN = 256 * 1024
"""Bytes that all connections together parse in one turn of the event loop; they take less than 1 ms."""
EVENTS_PER_TURN = 4096
"""Parser events (a header, a piece of a body) of all connections in one turn of the event loop; they take about 1 ms."""
REQUEST_EVENTS = 64
"""Events that the head of a request counts as, because it starts a task."""
_DISCARD_INTERVAL = 0.001
"""Seconds between two reads of connections whose input is discarded; a read has at most 256 KiB."""


class Parsing(Protocol):
    """A connection with unparsed bytes."""

    def parse_slice(self) -> bool:
        """Parse up to ``SLICE`` bytes. Returns whether the connection can go on at once."""
        ...


class Discarding(Protocol):
    """A connection whose input is read and discarded."""

    def discard_more(self) -> None:
        """Read once more."""
        ...


class ParsingTurns:
    """Limits what all connections of a listener parse in one turn of the event loop, and lets them take turns.

    A client decides how many events its bytes make. Without a limit, a few connections with bodies in chunks of one byte
    would occupy the loop, and no other request would be served.
    """

    def __init__(self) -> None:
        self._bytes = 0
        self._events = 0
        self._waiting: deque[Parsing] = deque()
        self._is_scheduled = False

    @property
    def has_room(self) -> bool:
        """Whether a connection may parse now, rather than ``wait``."""
        return not self._waiting and self._is_below_limits

    def spend(self, num_bytes: int, events: int) -> None:
        """Count bytes and events as parsed in this turn."""
        self._bytes += num_bytes
        self._events += events
        self._schedule()

    def wait(self, connection: Parsing) -> None:
        """Have ``connection`` parse in later turns, slice by slice, until its ``parse_slice`` returns False."""
        self._waiting.append(connection)
        self._schedule()

    @property
    def _is_below_limits(self) -> bool:
        return self._bytes < BYTES_PER_TURN and self._events < EVENTS_PER_TURN

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        self._bytes = self._events = 0
        while self._waiting and self._is_below_limits:
            connection = self._waiting.popleft()
            if connection.parse_slice():
                self._waiting.append(connection)
        if self._waiting:
            self._schedule()


class DiscardingTurns:
    """Lets connections whose input is discarded read one after the other, so that they cost the same however many there are."""

    def __init__(self) -> None:
        self._waiting: deque[Discarding] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, connection: Discarding) -> None:
        """Have ``connection`` call ``discard_more`` when its turn comes."""
        self._waiting.append(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DISCARD_INTERVAL, self._turn)

    def _turn(self) -> None:
        self._timer = None
        connection = self._waiting.popleft()
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(_DISCARD_INTERVAL, self._turn)
        connection.discard_more()

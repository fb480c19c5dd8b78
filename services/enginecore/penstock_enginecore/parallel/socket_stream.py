"""Messages between one stage of a pipeline and another one, over one connection."""

import contextlib
import select
import socket
import struct
import threading
from collections import defaultdict, deque

from penstock_enginecore.core.collective_errors import CollectiveBroken

_HEADER = struct.Struct("!BQ")
"""The channel, and of how many bytes the message is that follows."""


class Moving:
    """A ``Pending``: a message that is sent from ``memory``, or received into it."""

    def __init__(self, memory: memoryview) -> None:
        self.left = [memory]
        self._over = threading.Event()
        self._error: str | None = None

    def end(self, error: str | None = None) -> None:
        """It has arrived, or ``error`` says why it never will."""
        self._error = error
        self._over.set()

    def wait(self) -> None:
        """See ``Pending``. Raises CollectiveBroken where the connection broke."""
        self._over.wait()
        if self._error is not None:
            raise CollectiveBroken(self._error)


class SocketStream:
    """Sends what it can at once, and leaves the rest and all that comes to the thread that calls ``go_on``. Other methods may be
    called on any thread.
    """

    def __init__(self, stage: int, connection: socket.socket) -> None:
        """``stage``: the other one. ``connection``: non-blocking."""
        self.connection = connection
        self._stage = stage
        self._error: str | None = None
        self._sending: deque[Moving] = deque()
        self._to_send = threading.Lock()
        self._posted: defaultdict[int, deque[Moving]] = defaultdict(deque)
        self._to_receive = threading.Lock()
        self._header = bytearray(_HEADER.size)
        self._missing_header = memoryview(self._header)
        self._coming: tuple[int, int] | None = None
        """Channel and size of a message whose header has come, while nothing was begun to be received into."""
        self._into: Moving | None = None

    def send(self, message: memoryview, channel: int) -> tuple[Moving, bool]:
        """Begin to send. Returns also whether the thread has to go on with it."""
        moving = Moving(message)
        moving.left.insert(0, memoryview(_HEADER.pack(channel, len(message))))
        with self._to_send:
            if self._error is not None:
                moving.end(self._error)
                return moving, False
            self._sending.append(moving)
            if len(self._sending) > 1:
                return moving, False  # the thread knows of the one before
            try:
                self._send()
            except OSError:  # the thread will see it as well
                return moving, True
            return moving, bool(self._sending)

    def receive(self, buffer: memoryview, channel: int) -> tuple[Moving, bool]:
        """Begin to receive. Returns also whether the thread has to go on with it."""
        moving = Moving(buffer)
        with self._to_receive:
            if self._error is not None:
                moving.end(self._error)
                return moving, False
            self._posted[channel].append(moving)
            return moving, self._coming is not None

    def go_on(self) -> int:
        """Send and receive what can be now. Returns for which of epoll's events there is more to do. Raises OSError and
        CollectiveBroken where nothing more will come.
        """
        awaited = 0
        with self._to_send:
            self._send()
            if self._sending:
                awaited |= select.EPOLLOUT
        with self._to_receive:
            with contextlib.suppress(BlockingIOError):
                self._receive()
            if self._coming is None:  # else it waits for memory
                awaited |= select.EPOLLIN
        return awaited

    def end(self, error: str) -> None:
        """Nothing arrives any more: whoever waits is told, now and from now on."""
        with self._to_send, self._to_receive:
            self._error = error
            waiting = [*self._sending, *(each for posted in self._posted.values() for each in posted)]
            if self._into is not None:
                waiting.append(self._into)
            self._sending.clear()
            self._posted.clear()
            self._into = None
        for each in waiting:
            each.end(error)

    def _send(self) -> None:
        while self._sending:
            moving = self._sending[0]
            try:
                sent = self.connection.sendmsg(moving.left)
            except BlockingIOError:
                return
            while moving.left and sent >= len(moving.left[0]):
                sent -= len(moving.left.pop(0))
            if moving.left:
                moving.left[0] = moving.left[0][sent:]
            else:
                self._sending.popleft().end()

    def _receive(self) -> None:
        while (moving := self._into or self._begin()) is not None:
            while moving.left[0]:
                moving.left[0] = moving.left[0][self._read(moving.left[0]) :]
            self._into = None
            moving.end()

    def _begin(self) -> Moving | None:
        """What the next message is received into; None while there is nothing for it."""
        if self._coming is None:
            while self._missing_header:
                self._missing_header = self._missing_header[self._read(self._missing_header) :]
            self._missing_header = memoryview(self._header)
            self._coming = _HEADER.unpack(self._header)
        channel, size = self._coming
        if not self._posted[channel]:
            return None
        moving = self._posted[channel].popleft()
        self._into, self._coming = moving, None
        if size > len(moving.left[0]):
            raise CollectiveBroken(
                f"stage {self._stage} sends {size} bytes, of which {len(moving.left[0])} were expected"
            )
        moving.left[0] = moving.left[0][:size]
        return moving

    def _read(self, into: memoryview) -> int:
        count = self.connection.recv_into(into)
        if not count:
            raise CollectiveBroken(f"stage {self._stage} has closed its connection")
        return count

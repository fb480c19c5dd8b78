"""``StageTransport`` for pipeline stages on several hosts, over connections on which both sides are authenticated."""

import contextlib
import os
import select
import socket
import struct
import threading
from collections import defaultdict, deque

import torch

from penstock_enginecore.core.collective_errors import CollectiveBroken
from penstock_enginecore.parallel.meeting import Meeting
from penstock_enginecore.parallel.rendezvous import Mesh

# Messages between two pipeline stages over one connection.

_HEADER = struct.Struct("!BQ")
"""Format of a message's header: the channel, and the length of the message in bytes."""


class Moving:
    """``Pending`` for a message that is being sent from ``memory``, or received into ``memory``."""

    def __init__(self, memory: memoryview) -> None:
        self.left = [memory]
        self._over = threading.Event()
        self._error: str | None = None

    def end(self, error: str | None = None) -> None:
        """Mark the transfer of the message as complete, or as failed if ``error`` is given."""
        self._error = error
        self._over.set()

    def wait(self) -> None:
        """Wait until the transfer has ended, see ``Pending``. Raises CollectiveBroken if the connection broke."""
        self._over.wait()
        if self._error is not None:
            raise CollectiveBroken(self._error)


class SocketStream:
    """Connection to one other pipeline stage, over which messages are sent and received.

    ``send`` sends as many bytes as is possible without waiting. The thread that calls ``go_on`` sends the remaining
    bytes, and receives messages. The methods other than ``go_on`` are thread-safe.
    """

    def __init__(self, stage: int, connection: socket.socket) -> None:
        """Use a non-blocking ``connection`` to ``stage``."""
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
        """Channel and size of a message whose header has arrived, but for which no receive has been started, or None."""
        self._into: Moving | None = None

    def send(self, message: memoryview, channel: int) -> tuple[Moving, bool]:
        """Start to send ``message``. Also returns whether the thread that calls ``go_on`` must be woken to send the
        rest.
        """
        moving = Moving(message)
        moving.left.insert(0, memoryview(_HEADER.pack(channel, len(message))))
        with self._to_send:
            if self._error is not None:
                moving.end(self._error)
                return moving, False
            self._sending.append(moving)
            if len(self._sending) > 1:
                return moving, False  # The thread that calls ``go_on`` already sends the previous message.
            try:
                self._send()
            except OSError:  # ``go_on`` will get the same error.
                return moving, True
            return moving, bool(self._sending)

    def receive(self, buffer: memoryview, channel: int) -> tuple[Moving, bool]:
        """Start to receive a message into ``buffer``. Also returns whether the thread that calls ``go_on`` must be
        woken to receive the message.
        """
        moving = Moving(buffer)
        with self._to_receive:
            if self._error is not None:
                moving.end(self._error)
                return moving, False
            self._posted[channel].append(moving)
            return moving, self._coming is not None

    def go_on(self) -> int:
        """Send and receive as many bytes as is possible without waiting. Returns the epoll events for which the caller
        must wait.

        Raises OSError or CollectiveBroken if no more data can arrive.
        """
        awaited = 0
        with self._to_send:
            self._send()
            if self._sending:
                awaited |= select.EPOLLOUT
        with self._to_receive:
            with contextlib.suppress(BlockingIOError):
                self._receive()
            if self._coming is None:  # Otherwise this stream reads nothing until a receive is started.
                awaited |= select.EPOLLIN
        return awaited

    def end(self, error: str) -> None:
        """Mark all pending and future transfers as failed with ``error``."""
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
        """Return the transfer into which the next message is received, or None if no receive for this message was
        started.
        """
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
                f"stage {self._stage} sends a message of {size} bytes, but the limit is {len(moving.left[0])} bytes"
            )
        moving.left[0] = moving.left[0][:size]
        return moving

    def _read(self, into: memoryview) -> int:
        count = self.connection.recv_into(into)
        if not count:
            raise CollectiveBroken(f"stage {self._stage} has closed its connection")
        return count


_FOREVER = 86_400.0
"""Timeout of the rendezvous, so long that it never ends the wait. The engine itself ends a rendezvous that takes too
long, and names the missing node.
"""


class SocketTransport:
    """``StageTransport`` over sockets.

    A message that fits into the operating system's buffers is sent immediately. A thread sends the remaining bytes, and
    receives messages. Waiting uses no CPU time.
    """

    def __init__(
        self, meeting: Meeting, stage: int, num_stages: int, name: str = "stages", timeout_s: float = _FOREVER
    ) -> None:
        """Connect to all other stages. Raises CollectiveBroken if a stage does not connect or does not know the secret."""
        self.stage, self.num_stages = stage, num_stages
        self._mesh = Mesh(name, stage, num_stages, 0.0)
        self._mesh.connect(meeting, timeout_s)
        self._streams = {peer: SocketStream(peer, connection) for peer, connection in self._mesh.connections.items()}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="stages", daemon=True)
        self._thread.start()

    def send(self, message: torch.Tensor, stage: int, channel: int) -> Moving:
        return self._begun(*self._streams[stage].send(message.numpy().data, channel))

    def receive(self, buffer: torch.Tensor, stage: int, channel: int) -> Moving:
        return self._begun(*self._streams[stage].receive(buffer.numpy().data, channel))

    def close(self) -> None:
        """Close the connections, see ``StageTransport``. Other stages detect the close immediately, and pending
        messages fail.
        """
        if not self._closed:
            self._closed = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            self._mesh.close()
            os.close(self._wake)

    def _begun(self, moving: Moving, for_the_thread: bool) -> Moving:
        if for_the_thread:
            os.eventfd_write(self._wake, 1)
        return moving

    def _run(self) -> None:
        with select.epoll() as events:
            events.register(self._wake, select.EPOLLIN)
            watched = {stream.connection.fileno(): _Watched(events, stream) for stream in self._streams.values()}
            while True:
                ready = [descriptor for descriptor, _ in events.poll()]
                if self._closed:
                    break
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    ready = list(watched)
                for descriptor in ready:
                    if descriptor in watched and not watched[descriptor].go_on():
                        del watched[descriptor]
        for stream in self._streams.values():
            stream.end("this stage has closed its connections")


class _Watched:
    """Stream to one other stage, and the epoll events for which the stream waits.

    While the stream waits for no events, the stream is not registered with epoll. Otherwise epoll would report again
    and again that the other stage has closed the connection.
    """

    def __init__(self, events: select.epoll, stream: SocketStream) -> None:
        self._events, self._stream = events, stream
        self._awaited = 0
        self._watch(select.EPOLLIN)

    def go_on(self) -> bool:
        """Send and receive as many bytes as is possible without waiting. Returns whether more data can arrive."""
        try:
            awaited = self._stream.go_on()
        except (OSError, CollectiveBroken) as e:
            self._stream.end(str(e))
            self._watch(0)
            return False
        self._watch(awaited)
        return True

    def _watch(self, awaited: int) -> None:
        if awaited == self._awaited:
            return
        if not awaited:
            self._events.unregister(self._stream.connection)
        elif self._awaited:
            self._events.modify(self._stream.connection, awaited)
        else:
            self._events.register(self._stream.connection, awaited)
        self._awaited = awaited

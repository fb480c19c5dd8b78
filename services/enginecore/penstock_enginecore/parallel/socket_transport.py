"""A ``StageTransport`` between hosts: over connections of which both sides have proven themselves."""

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

# Messages between one stage of a pipeline and another one, over one connection.

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


_FOREVER = 86_400.0
"""A meeting that takes too long is ended by the engine, which knows which node it waits for."""


class SocketTransport:
    """A message that fits into what the system buffers is sent at once; a thread sends the rest, and receives. One that waits
    for a message takes no time of a processor.
    """

    def __init__(
        self, meeting: Meeting, stage: int, num_stages: int, name: str = "stages", timeout_s: float = _FOREVER
    ) -> None:
        """Waits for all stages. Raises CollectiveBroken where they do not all come, or do not know the secret."""
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
        """See ``StageTransport``. Other stages see it at once, and whoever waits for a message is told."""
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
    """A stream, and the events of it that are waited for. Where there are none epoll does not know it: it would tell again and
    again that the other side has gone.
    """

    def __init__(self, events: select.epoll, stream: SocketStream) -> None:
        self._events, self._stream = events, stream
        self._awaited = 0
        self._watch(select.EPOLLIN)

    def go_on(self) -> bool:
        """Move what can be moved. Returns whether more can come."""
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

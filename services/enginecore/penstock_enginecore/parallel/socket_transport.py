"""A ``StageTransport`` between hosts: over connections of which both sides have proven themselves."""

import os
import select
import threading

import torch

from penstock_enginecore.core.collective_errors import CollectiveBroken
from penstock_enginecore.parallel.meeting import Meeting
from penstock_enginecore.parallel.mesh import Mesh
from penstock_enginecore.parallel.socket_stream import Moving, SocketStream

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

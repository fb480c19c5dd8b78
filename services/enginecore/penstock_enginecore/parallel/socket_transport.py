"""A ``StageTransport`` between hosts: over connections of which both sides have proven themselves."""

import os
import select
import threading

import torch

from penstock_enginecore.core.data_parallel.broken import CollectiveBroken
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
        """See ``StageTransport``."""
        return self._begun(*self._streams[stage].send(message.numpy().data, channel))

    def receive(self, buffer: torch.Tensor, stage: int, channel: int) -> Moving:
        """See ``StageTransport``."""
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
        by_descriptor = {stream.connection.fileno(): stream for stream in self._streams.values()}
        watched = dict.fromkeys(by_descriptor, select.EPOLLIN)
        with select.epoll() as events:
            events.register(self._wake, select.EPOLLIN)
            for descriptor, awaited in watched.items():
                events.register(descriptor, awaited)
            while True:
                ready = [descriptor for descriptor, _ in events.poll()]
                if self._closed:
                    break
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    ready = list(by_descriptor)
                for descriptor in ready:
                    stream = by_descriptor.get(descriptor)
                    if stream is None:
                        continue
                    try:
                        awaited = stream.go_on()
                    except (OSError, CollectiveBroken) as e:
                        stream.end(str(e))
                        events.unregister(descriptor)
                        del by_descriptor[descriptor]
                        continue
                    if awaited != watched[descriptor]:
                        events.modify(descriptor, awaited)
                        watched[descriptor] = awaited
        for stream in self._streams.values():
            stream.end("this stage has closed its connections")

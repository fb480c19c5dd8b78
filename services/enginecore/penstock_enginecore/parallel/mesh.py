"""A connection from each rank of a group to each other.

Ranks find each other in a store, under a name that no other group has. Who connects shows the secret that the other has left in
the store, so that nothing else on the network gets into a group.
"""

import errno
import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from typing import Any

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistError

from penstock_common import addresses
from penstock_enginecore.core.data_parallel.broken import CollectiveBroken
from penstock_enginecore.parallel.gloo import Meeting

_HELLO = struct.Struct("!32sI")
_LOOK_AGAIN = 0.02
"""Seconds after which the store is asked again for a rank that was not there."""
_MUTE = 1.0
"""Seconds in which a connection has to say who it is."""


class Mesh:
    """``connections``: non-blocking sockets by rank, all once ``connect`` has returned."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        """``name``: of the group and its epoch."""
        self.connections: dict[int, socket.socket] = {}
        self.wake = os.eventfd(0, os.EFD_NONBLOCK)
        """A descriptor that is readable once the mesh was given up."""
        self.given_up = False
        self._name, self._rank, self._size = name, rank, size
        self._open = True
        self._lock = threading.Lock()

    def connect(self, meeting: Meeting, timeout_s: float) -> None:
        """Waits for all ranks. Raises CollectiveBroken after ``timeout_s`` seconds, naming who is missing, where the store is not
        reached, and once the mesh is given up.
        """
        deadline = time.monotonic() + timeout_s
        try:
            _knock(meeting, timeout_s)
            store = PrefixStore(self._name, meeting.store())
            with _listener(meeting.address) as listener:
                self._meet(store, listener, deadline)
        except (DistError, OSError) as e:
            raise CollectiveBroken(f"rank {self._rank} of group {self._name} does not reach all others: {e}") from e

    def give_up(self) -> None:
        """Whoever waits for this rank, here or there, is told. Any thread may call it."""
        self.given_up = True
        with self._lock:
            if self._open:
                os.eventfd_write(self.wake, 1)
                for connection in list(self.connections.values()):
                    _shut_down(connection)

    def close(self) -> None:
        """Nobody uses the mesh any more. Peers see it at once."""
        self.given_up = True
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.wake)
                for connection in self.connections.values():
                    connection.close()

    def _meet(self, store: Any, listener: socket.socket, deadline: float) -> None:
        """Lower ranks are connected to, higher ones come."""
        secret = secrets.token_bytes(32)
        host, port = listener.getsockname()[:2]
        store.set(str(self._rank), secret + addresses.with_port(host, port).encode())
        for peer in range(self._rank):
            while not store.check([str(peer)]):
                self._wait([], min(_LOOK_AGAIN, self._left(deadline, [peer])))
            found = bytes(store.get(str(peer)))
            connection = socket.create_connection(addresses.split(found[32:].decode()), self._left(deadline, [peer]))
            connection.sendall(_HELLO.pack(found[:32], self._rank))
            self._keep(peer, connection)
        while missing := [peer for peer in range(self._rank + 1, self._size) if peer not in self.connections]:
            if self._wait([listener], self._left(deadline, missing)):
                self._accept(listener, secret, missing)
        self._left(deadline, [])

    def _accept(self, listener: socket.socket, secret: bytes, missing: list[int]) -> None:
        connection, _ = listener.accept()
        connection.settimeout(_MUTE)
        try:
            hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
        except OSError:
            hello = b""  # whoever it was, it is no rank
        shown, peer = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", -1)
        if peer in missing and hmac.compare_digest(shown, secret):
            self._keep(peer, connection)
        else:
            connection.close()

    def _keep(self, peer: int, connection: socket.socket) -> None:
        connection.settimeout(0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self.connections[peer] = connection

    def _wait(self, sockets: list[socket.socket], seconds: float) -> bool:
        descriptors = [each.fileno() for each in sockets]
        ready, _, _ = select.select([*descriptors, self.wake], [], [], seconds)
        return any(each in ready for each in descriptors)

    def _left(self, deadline: float, missing: list[int]) -> float:
        left = deadline - time.monotonic()
        if self.given_up:
            raise CollectiveBroken(f"group {self._name} was given up before its ranks had met")
        if left <= 0 and missing:
            who = ", ".join(map(str, missing))
            raise CollectiveBroken(f"rank {self._rank} of group {self._name} waited in vain for rank {who}")
        return left


def _knock(meeting: Meeting, seconds: float) -> None:
    """Raises OSError where nobody listens at the store's address, which is so once its rank has died: torch's store would be
    tried for a minute.
    """
    if isinstance(meeting.at, str):
        socket.create_connection(addresses.split(meeting.at), seconds).close()


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as e:
        if e.errno != errno.ENOTCONN:  # the other side has shut it down too
            raise


def _listener(address: str) -> socket.socket:
    host = address or "127.0.0.1"
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)

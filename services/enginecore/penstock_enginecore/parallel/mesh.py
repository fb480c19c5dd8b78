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
from collections.abc import Sequence

from penstock_common import addresses
from penstock_enginecore.core.data_parallel.broken import CollectiveBroken
from penstock_enginecore.parallel.dead_peers import give_up_after
from penstock_enginecore.parallel.gloo import Meeting
from penstock_enginecore.parallel.meeting_store import MeetingStore

_HELLO = struct.Struct("!32sI")
_MUTE = 1.0
"""Seconds in which a connection has to say who it is."""


class Mesh:
    """``connections``: non-blocking sockets by rank, all once ``connect`` has returned."""

    def __init__(self, name: str, rank: int, size: int, silence: float) -> None:
        """``name``: of the group and its epoch. ``silence``: see ``SocketCollectives``."""
        self.connections: dict[int, socket.socket] = {}
        self.wake = os.eventfd(0, os.EFD_NONBLOCK)
        """A descriptor that is readable once the mesh was given up."""
        self.given_up = False
        self._name, self._rank, self._size = name, rank, size
        self._silence = silence
        self._to_store: socket.socket | None = None
        self._open = True
        self._lock = threading.Lock()

    def connect(self, meeting: Meeting, timeout_s: float) -> None:
        """Waits for all ranks, at an address. Raises CollectiveBroken after ``timeout_s`` seconds, naming who is missing, where
        the store is not reached, and once the mesh is given up.
        """
        deadline = time.monotonic() + timeout_s
        try:
            with self._connected("the store", str(meeting.at), deadline) as to_store:
                self._use(to_store)
                with _listener(meeting.address) as listener:
                    self._meet(MeetingStore(to_store, timeout_s), listener, deadline)
        except OSError as e:
            self._left(deadline, [])  # giving up ends what is under way
            raise CollectiveBroken(f"rank {self._rank} of group {self._name} does not reach all others: {e}") from e

    def give_up(self) -> None:
        """Whoever waits for this rank, here or there, is told. Any thread may call it."""
        self.given_up = True
        with self._lock:
            if self._open:
                os.eventfd_write(self.wake, 1)
                for connection in list(self.connections.values()):
                    _shut_down(connection)
                if self._to_store is not None:
                    _shut_down(self._to_store)

    def close(self) -> None:
        """Nobody uses the mesh any more. Peers see it at once."""
        self.given_up = True
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.wake)
                for connection in self.connections.values():
                    connection.close()

    def _meet(self, store: MeetingStore, listener: socket.socket, deadline: float) -> None:
        """Lower ranks are connected to, higher ones come."""
        secret = secrets.token_bytes(32)
        host, port = listener.getsockname()[:2]
        store.set(f"{self._name}/{self._rank}", secret + addresses.with_port(host, port).encode())
        for peer in range(self._rank):
            try:
                found = store.get_within(f"{self._name}/{peer}", self._left(deadline, [peer]))
            except TimeoutError as e:
                raise self._in_vain([peer]) from e
            connection = self._to_peer(peer, found[32:].decode(), deadline)
            self._keep(peer, connection)
            connection.sendall(_HELLO.pack(found[:32], self._rank))
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

    def _to_peer(self, peer: int, address: str, deadline: float) -> socket.socket:
        return self._connected(f"rank {peer}", address, deadline)

    def _connected(self, whom: str, address: str, deadline: float) -> socket.socket:
        """A connection to host:port, non-blocking."""
        host, port = addresses.split(address)
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            connection.settimeout(0)
            if (error := connection.connect_ex((host, port))) == errno.EINPROGRESS:
                if not self._wait([], max(self._left(deadline, []), 0.0), written=[connection]):
                    raise TimeoutError(f"{whom} at {address} does not answer")
                error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, f"{whom} at {address}: {os.strerror(error)}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _use(self, to_store: socket.socket) -> None:
        """Giving up ends what waits at it."""
        if self._silence:
            give_up_after(to_store, self._silence)
        with self._lock:
            self._to_store = to_store
            if self.given_up:
                _shut_down(to_store)

    def _keep(self, peer: int, connection: socket.socket) -> None:
        connection.settimeout(0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._silence:
            give_up_after(connection, self._silence)
        with self._lock:
            self.connections[peer] = connection

    def _wait(self, read: list[socket.socket], seconds: float, written: Sequence[socket.socket] = ()) -> bool:
        """Until one of the sockets can be read, or ``written`` to. Returns whether one can; else time is over, or the mesh is."""
        descriptors = [each.fileno() for each in read]
        readable, writable, _ = select.select([*descriptors, self.wake], written, [], seconds)
        return bool(writable) or any(each in readable for each in descriptors)

    def _left(self, deadline: float, missing: list[int]) -> float:
        left = deadline - time.monotonic()
        if self.given_up:
            raise CollectiveBroken(f"group {self._name} was given up before its ranks had met")
        if left <= 0 and missing:
            raise self._in_vain(missing)
        return left

    def _in_vain(self, missing: list[int]) -> CollectiveBroken:
        who = ", ".join(map(str, missing))
        return CollectiveBroken(f"rank {self._rank} of group {self._name} waited in vain for rank {who}")


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as e:
        if e.errno not in (
            errno.ENOTCONN,
            errno.EBADF,
        ):  # the other side shut it down, too, or its thread has closed it
            raise


def _listener(address: str) -> socket.socket:
    host = address or "127.0.0.1"
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)

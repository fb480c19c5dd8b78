"""A connection from each rank of a group to each other."""

import errno
import os
import socket
import threading

from penstock_common.security.challenge import ProofError
from penstock_enginecore.core.collective_errors import CollectiveBroken
from penstock_enginecore.parallel.meeting import Meeting
from penstock_enginecore.parallel.rendezvous import Rendezvous


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
        self._open = True
        self._lock = threading.Lock()

    def connect(self, meeting: Meeting, timeout_s: float) -> None:
        """Wait for all ranks, at an address. Returns on every rank, or raises on every rank, unless one of them or the network
        dies in the last second.

        Raises CollectiveBroken after ``timeout_s`` seconds, naming who is missing; where the store or a rank is not reached, or
        does not know the secret; and once the mesh is given up, here or by another rank.
        """
        try:
            with _listener(meeting.address) as listener:
                rendezvous = Rendezvous(
                    self._name,
                    self._rank,
                    self._size,
                    meeting,
                    listener,
                    silence=self._silence,
                    wake=self.wake,
                    timeout_s=timeout_s,
                )
                found = rendezvous.meet()
        except (OSError, ProofError) as e:
            raise CollectiveBroken(f"rank {self._rank} of group {self._name} does not reach all others: {e}") from e
        with self._lock:
            self.connections = found
            if self.given_up:
                self._shut_down()

    def give_up(self) -> None:
        """Whoever waits for this rank, here or there, is told. Any thread may call it."""
        self.given_up = True
        with self._lock:
            if self._open:
                os.eventfd_write(self.wake, 1)
                self._shut_down()

    def close(self) -> None:
        """Nobody uses the mesh any more. Peers see it at once."""
        self.given_up = True
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.wake)
                for connection in self.connections.values():
                    connection.close()

    def _shut_down(self) -> None:
        for connection in self.connections.values():
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError as e:
                if e.errno not in (errno.ENOTCONN, errno.EBADF):  # the other side has shut it down, too
                    raise


def _listener(address: str) -> socket.socket:
    host = address or "127.0.0.1"
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)

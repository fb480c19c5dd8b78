"""How one rank of a group meets the others.

It finds them at a store, connects to the lower ones, lets the higher ones in, and agrees with all of them that the group has
formed.
"""

import errno
import math
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable

from penstock_common import addresses
from penstock_common.security.shared_secret import SECRET_SETTING, ProofError
from penstock_enginecore.core.collective_errors import CollectiveBroken
from penstock_enginecore.parallel.handshake import Admission, Admitted, give_up_after, introduce, send_small
from penstock_enginecore.parallel.meeting import Meeting, MeetingStore

# How ranks that have met agree that all of them have.

READY, CONFIRMED = b"r", b"c"
"""This rank is connected to all others; and it knows that all others are."""
ROUNDS = len(READY + CONFIRMED)


class Confirmation:
    """What one rank has heard from the others, and may tell them. A state machine without I/O.

    Two rounds, since one is not enough: a rank that is connected to all others does not know whether they are. Once a rank has
    heard READY from all it tells CONFIRMED, and once it has heard that from all the group has formed. A rank that gives up
    before it has told CONFIRMED keeps all others from the end of the second round.
    """

    def __init__(self, peers: Iterable[int]) -> None:
        """``peers``: the other ranks."""
        self._heard = dict.fromkeys(peers, b"")
        self._told = 0

    def missing_from(self, peer: int) -> int:
        """Return how many bytes ``peer`` still has to say."""
        return ROUNDS - len(self._heard[peer])

    def hear(self, peer: int, said: bytes) -> None:
        """Take bytes from ``peer``. Raises ValueError for any that are not expected."""
        heard = self._heard[peer] + said
        if not (READY + CONFIRMED).startswith(heard):
            raise ValueError(f"rank {peer} says {heard!r} instead of that it is ready")
        self._heard[peer] = heard

    def waits_for(self) -> list[int]:
        """Return the ranks from which this one has not heard what it needs to end its present round."""
        return [peer for peer, heard in self._heard.items() if len(heard) < self._told]

    def next_word(self) -> bytes:
        """Return what to tell all others now, empty while this rank waits for them and after the last round."""
        if self.waits_for() or self._told == ROUNDS:
            return b""
        self._told += 1
        return (READY + CONFIRMED)[self._told - 1 : self._told]

    @property
    def confirmed(self) -> bool:
        """Whether this rank has said that all are ready."""
        return self._told == ROUNDS

    @property
    def over(self) -> bool:
        """Whether the group has formed."""
        return self.confirmed and not self.waits_for()


TOKEN_BYTES = 32
"""Of what a rank says at the store these come first, then its address."""
CLAIM = struct.Struct("!I")
"""The rank of who connects."""
_AGAIN_AFTER, _AGAIN_AFTER_AT_MOST = 0.05, 1.0
"""Seconds until a port that has closed a connection early is tried again: strangers may have crowded it out."""
_LAST_ROUND = 1.0
"""Seconds at the end of the timeout, a tenth of it at most, that are left for the last round of the agreement."""
_AWAITED = "awaited"


def key_of(meeting: Meeting, rank: int, token: bytes) -> bytes:
    """Return the key of one rank's port. ``token`` is what the rank says of this port at the store, and nowhere else: who has not
    read it there is kept out also where no secret is configured.
    """
    return meeting.key(f"rank {rank} {token.hex()}")


class Rendezvous:
    """One attempt of one rank. Whatever it waits for, it goes on to serve those that connect to it meanwhile."""

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        meeting: Meeting,
        listener: socket.socket,
        *,
        silence: float,
        wake: int,
        timeout_s: float,
    ) -> None:
        """``name``: of the group, which no other has. ``silence``: see ``SocketCollectives``. ``wake``: a descriptor that is
        readable once the attempt is given up. ``timeout_s``: seconds from now until it has failed.
        """
        self._name, self._rank, self._size = name, rank, size
        self._meeting, self._silence, self._wake = meeting, silence, wake
        self._end = time.monotonic() + timeout_s
        self._last_round = min(_LAST_ROUND, timeout_s / 10)
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._address = addresses.with_port(*listener.getsockname()[:2])
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake, selectors.EVENT_READ)
        port = f"rank {rank} of group {name}"
        key = key_of(meeting, rank, self._token)
        self._admission = Admission(listener, key, self._selector, port=port, claim_bytes=CLAIM.size)
        self._connections: dict[int, socket.socket] = {}
        self._confirmation = Confirmation(peer for peer in range(size) if peer != rank)
        self._seeks = ""
        """What this rank waits for at present, empty where that is ranks that have not come."""

    def meet(self) -> dict[int, socket.socket]:
        """Return a non-blocking connection to each other rank, by rank, once all ranks have confirmed that they have theirs.
        Called once.

        Raises:
            CollectiveBroken: Not all have come within the timeout, one of them has given up, or this attempt was given up.
            ProofError: A rank or the store does not know the secret.
            OSError: A rank or the store is not reached.
        """
        meeting = self._meeting
        try:
            with self._reach("the store", str(meeting.at), meeting.store_key) as to_store:
                store = MeetingStore(to_store, self._wait_readable)
                store.set(f"{self._name}/{self._rank}", self._token + self._address.encode())
                for peer in range(self._rank):
                    self._seeks = f"rank {peer}"
                    found = store.get(f"{self._name}/{peer}")
                    token, address = found[:TOKEN_BYTES], found[TOKEN_BYTES:].decode()
                    key = key_of(meeting, peer, token)
                    self._keep(peer, self._reach(f"rank {peer}", address, key, CLAIM.pack(self._rank)))
                self._seeks = ""
                self._tell()
                while not self._confirmation.over:
                    self._take_turn()
                    self._tell()
        except BaseException:
            for connection in self._connections.values():
                connection.close()
            raise
        finally:
            self._admission.close()
            self._selector.close()
        return self._connections

    # Connections that this rank makes.

    def _reach(self, whom: str, address: str, key: bytes, claim: bytes = b"") -> socket.socket:
        """A connection on which both sides have proven themselves."""
        self._seeks = f"{whom} at {address}"
        again_after = _AGAIN_AFTER
        while True:
            connection = self._to_port(whom, address)
            try:
                introduce(connection, key, claim, self._wait_readable)
            except ConnectionError:
                connection.close()
            except ProofError as e:
                connection.close()
                raise ProofError(f"{whom} at {address}: {e}; {SECRET_SETTING} must have the same content there") from e
            except BaseException:
                connection.close()
                raise
            else:
                return connection
            self._pause(again_after)
            again_after = min(2 * again_after, _AGAIN_AFTER_AT_MOST)

    def _to_port(self, whom: str, address: str) -> socket.socket:
        """A connection to host:port, non-blocking."""
        host, port = addresses.split(address)
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._silence:
                give_up_after(connection, self._silence)
            if (error := connection.connect_ex((host, port))) == errno.EINPROGRESS:
                self._wait_for(connection, selectors.EVENT_WRITE)
                error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, f"{whom} at {address}: {os.strerror(error)}")
        except BaseException:
            connection.close()
            raise
        return connection

    # Connections that others make, and what comes over both.

    def _admit(self, admitted: Admitted) -> None:
        (peer,) = CLAIM.unpack(admitted.claim)
        if not self._rank < peer < self._size or peer in self._connections:
            admitted.connection.close()
            return
        try:
            admitted.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._silence:
                give_up_after(admitted.connection, self._silence)
        except OSError as e:
            admitted.connection.close()
            raise self._broken(f"rank {peer} has gone: {e}") from e
        self._keep(peer, admitted.connection)

    def _keep(self, peer: int, connection: socket.socket) -> None:
        self._connections[peer] = connection
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _tell(self) -> None:
        """Say to all others what is to be said now."""
        if len(self._connections) < self._size - 1:
            return
        while word := self._confirmation.next_word():
            for peer, connection in self._connections.items():
                try:
                    send_small(connection, word)
                except OSError as e:
                    raise self._broken(f"rank {peer} has given up: {e}") from e

    def _hear(self, peer: int) -> None:
        connection = self._connections[peer]
        try:
            said = connection.recv(self._confirmation.missing_from(peer))
        except BlockingIOError:
            return
        except OSError as e:
            raise self._broken(f"rank {peer} has given up: {e}") from e
        if not said:
            raise self._broken(f"rank {peer} has given up")
        try:
            self._confirmation.hear(peer, said)
        except ValueError as e:
            raise self._broken(str(e)) from e
        if not self._confirmation.missing_from(peer):  # behind it come collectives
            self._selector.unregister(connection)

    # Waiting.

    def _wait_readable(self, connection: socket.socket) -> None:
        self._wait_for(connection, selectors.EVENT_READ)

    def _wait_for(self, connection: socket.socket, events: int) -> None:
        self._selector.register(connection, events, _AWAITED)
        try:
            while not self._take_turn():
                pass
        finally:
            self._selector.unregister(connection)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._take_turn(left)

    def _take_turn(self, at_most: float = math.inf) -> bool:
        """Wait for something to do, ``at_most`` so many seconds, and do it. Returns whether the awaited connection is ready."""
        awaited = False
        for key, _ in self._selector.select(self._admission.wait_at_most(min(self._left(), at_most))):
            if key.data is self._admission:
                if admitted := self._admission.hear(key.fileobj):
                    self._admit(admitted)
            elif key.data is _AWAITED:
                awaited = True
            elif key.fd == self._wake:
                raise CollectiveBroken(f"group {self._name} was given up before its ranks had met")
            else:
                self._hear(key.data)
        self._admission.tick()
        return awaited

    def _left(self) -> float:
        """Seconds until time is over. A rank that knows that all are ready has the last round's as well: it fails in that only
        where a rank or the network dies meanwhile.
        """
        left = self._end - time.monotonic() - (0.0 if self._confirmation.confirmed else self._last_round)
        if left > 0:
            return left
        missing = [peer for peer in range(self._size) if peer != self._rank and peer not in self._connections]
        who = self._seeks or "rank " + ", ".join(map(str, missing or self._confirmation.waits_for()))
        raise CollectiveBroken(f"rank {self._rank} of group {self._name} waited in vain for {who}")

    def _broken(self, reason: str) -> CollectiveBroken:
        return CollectiveBroken(f"group {self._name} has not formed at rank {self._rank}: {reason}")


# A connection from each rank of a group to each other.


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

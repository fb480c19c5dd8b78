"""Rendezvous: connection of one rank to all other ranks of its group.

A rank finds the other ranks through the rendezvous store. The rank connects to lower ranks and accepts connections of
higher ranks. Then all ranks agree that the group has formed.
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

# Agreement among the ranks of a group that all ranks are connected.

READY, CONFIRMED = b"r", b"c"
"""Messages of the agreement. READY: this rank is connected to all other ranks. CONFIRMED: this rank has received READY
from all other ranks.
"""
ROUNDS = len(READY + CONFIRMED)


class Confirmation:
    """State machine, without I/O, of the agreement of one rank with all other ranks.

    The agreement needs two rounds, because a connected rank does not know whether the other ranks are connected to each
    other. After READY from all ranks, a rank sends CONFIRMED. After CONFIRMED from all ranks, the group has formed. If
    a rank gives up before it has sent CONFIRMED, no other rank can complete the second round.
    """

    def __init__(self, peers: Iterable[int]) -> None:
        """Start the agreement with ``peers``, all other ranks."""
        self._heard = dict.fromkeys(peers, b"")
        self._told = 0

    def missing_from(self, peer: int) -> int:
        """Return the number of bytes that ``peer`` must still send."""
        return ROUNDS - len(self._heard[peer])

    def hear(self, peer: int, said: bytes) -> None:
        """Process bytes that ``peer`` has sent. Raises ValueError for unexpected bytes."""
        heard = self._heard[peer] + said
        if not (READY + CONFIRMED).startswith(heard):
            raise ValueError(f"rank {peer} sent {heard!r}, but READY or CONFIRMED was expected")
        self._heard[peer] = heard

    def waits_for(self) -> list[int]:
        """Return the ranks whose message of the current round has not arrived."""
        return [peer for peer, heard in self._heard.items() if len(heard) < self._told]

    def next_word(self) -> bytes:
        """Return the message to send to all other ranks now. The message is empty while this rank waits for messages,
        and after the last round.
        """
        if self.waits_for() or self._told == ROUNDS:
            return b""
        self._told += 1
        return (READY + CONFIRMED)[self._told - 1 : self._told]

    @property
    def confirmed(self) -> bool:
        """Whether this rank has sent CONFIRMED."""
        return self._told == ROUNDS

    @property
    def over(self) -> bool:
        """Whether the group has formed."""
        return self.confirmed and not self.waits_for()


TOKEN_BYTES = 32
"""Length in bytes of the token with which a rank's value in the rendezvous store begins. The rank's address follows the
token.
"""
CLAIM = struct.Struct("!I")
"""Format of the claim that a connecting process sends: its rank."""
_AGAIN_AFTER, _AGAIN_AFTER_AT_MOST = 0.05, 1.0
"""First and maximum delay, in seconds, before a rank connects again to a port that closed the connection early. A
reason for such an early close is that unknown clients have filled the port's queue.
"""
_LAST_ROUND = 1.0
"""Maximum time in seconds, at the end of the timeout, that is reserved for the last round of the agreement. The time is
also at most a tenth of the timeout.
"""
_AWAITED = "awaited"


def key_of(meeting: Meeting, rank: int, token: bytes) -> bytes:
    """Return the key with which the port of ``rank`` authenticates clients.

    The rank publishes ``token`` only in the rendezvous store. Therefore the port rejects a process that cannot read the
    store, even if no secret is configured.
    """
    return meeting.key(f"rank {rank} {token.hex()}")


class Rendezvous:
    """Attempt of a rank to connect to the other ranks of a group. While this rank waits, this object handles incoming
    connections.
    """

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
        """Prepare the attempt. ``meet`` runs the attempt.

        Args:
            name: Unique name of the group.
            rank: Rank of this process in the group.
            size: Number of ranks of the group.
            meeting: Address and credentials of the rendezvous store.
            listener: Socket on which this rank listens.
            silence: See ``SocketCollectives``.
            wake: Descriptor that becomes readable when this rank aborts the attempt.
            timeout_s: Timeout of the attempt in seconds.
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
        """Name of the process to which this rank is connecting, or empty while this rank waits for other ranks to
        connect.
        """

    def meet(self) -> dict[int, socket.socket]:
        """Wait until all ranks have agreed that the group has formed. Returns a non-blocking connection to each other
        rank, by rank. Call this method only once.

        Raises:
            CollectiveBroken: Not all ranks have connected within the timeout, a rank has given up, or this attempt was
                aborted.
            ProofError: A rank or the store does not know the secret.
            OSError: A rank or the store cannot be reached.
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

    # Outgoing connections of this rank.

    def _reach(self, whom: str, address: str, key: bytes, claim: bytes = b"") -> socket.socket:
        """Connect to ``address``, and return the connection after the handshake, in which both sides authenticate each
        other.
        """
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
                raise ProofError(
                    f"{whom} at {address}: {e}; the files named by {SECRET_SETTING} must have the same content on both sides"
                ) from e
            except BaseException:
                connection.close()
                raise
            else:
                return connection
            self._pause(again_after)
            again_after = min(2 * again_after, _AGAIN_AFTER_AT_MOST)

    def _to_port(self, whom: str, address: str) -> socket.socket:
        """Return a non-blocking connection to host:port."""
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

    # Incoming connections of this rank, and messages on all its connections.

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
            raise self._broken(f"rank {peer} has closed its connection: {e}") from e
        self._keep(peer, admitted.connection)

    def _keep(self, peer: int, connection: socket.socket) -> None:
        self._connections[peer] = connection
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _tell(self) -> None:
        """Send the agreement's messages that are due now to all other ranks."""
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
        if not self._confirmation.missing_from(peer):  # Data of collective operations is next.
            self._selector.unregister(connection)

    # Waiting for events.

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
        """Wait up to ``at_most`` seconds for events, and handle these events. Returns whether the connection that the
        caller waits for is ready.
        """
        awaited = False
        for key, _ in self._selector.select(self._admission.wait_at_most(min(self._left(), at_most))):
            if key.data is self._admission:
                if admitted := self._admission.hear(key.fileobj):
                    self._admit(admitted)
            elif key.data is _AWAITED:
                awaited = True
            elif key.fd == self._wake:
                raise CollectiveBroken(f"group {self._name} was given up before all its ranks were connected")
            else:
                self._hear(key.data)
        self._admission.tick()
        return awaited

    def _left(self) -> float:
        """Return the number of seconds until the timeout. Raises CollectiveBroken if the timeout has passed.

        Only a rank that has sent CONFIRMED may use the time that is reserved for the last round. In the last round, the
        agreement fails only if a rank or the network dies.
        """
        left = self._end - time.monotonic() - (0.0 if self._confirmation.confirmed else self._last_round)
        if left > 0:
            return left
        missing = [peer for peer in range(self._size) if peer != self._rank and peer not in self._connections]
        who = self._seeks or "rank " + ", ".join(map(str, missing or self._confirmation.waits_for()))
        raise CollectiveBroken(f"rank {self._rank} of group {self._name} timed out waiting for {who}")

    def _broken(self, reason: str) -> CollectiveBroken:
        return CollectiveBroken(f"group {self._name} has not formed at rank {self._rank}: {reason}")


# Connections from one rank to all other ranks of a group.


class Mesh:
    """Connections of one rank to all other ranks of a group. ``connections`` has non-blocking sockets by rank, and is
    complete after ``connect``.
    """

    def __init__(self, name: str, rank: int, size: int, silence: float) -> None:
        """Create the object without connections. ``name`` contains the name of the group and the epoch. For
        ``silence``, see ``SocketCollectives``.
        """
        self.connections: dict[int, socket.socket] = {}
        self.wake = os.eventfd(0, os.EFD_NONBLOCK)
        """Descriptor that becomes readable when this rank calls ``give_up``."""
        self.given_up = False
        self._name, self._rank, self._size = name, rank, size
        self._silence = silence
        self._open = True
        self._lock = threading.Lock()

    def connect(self, meeting: Meeting, timeout_s: float) -> None:
        """Connect to all other ranks. The call either succeeds on every rank or fails on every rank, except if a rank
        or the network dies in the last second.

        After ``timeout_s`` seconds, raises CollectiveBroken with the names of the missing ranks. Also raises
        CollectiveBroken if the rendezvous store or a rank cannot be reached or does not know the secret, or if any rank
        gives up.
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
            raise CollectiveBroken(f"rank {self._rank} of group {self._name} cannot reach all other ranks: {e}") from e
        with self._lock:
            self.connections = found
            if self.given_up:
                self._shut_down()

    def give_up(self) -> None:
        """Give up the connections. All waits of this rank end, and other ranks stop waiting for this rank. Thread-safe."""
        self.given_up = True
        with self._lock:
            if self._open:
                os.eventfd_write(self.wake, 1)
                self._shut_down()

    def close(self) -> None:
        """Close all connections when they are no longer used. The other ranks detect the close immediately."""
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
                if e.errno not in (errno.ENOTCONN, errno.EBADF):  # The other side has already closed the connection.
                    raise


def _listener(address: str) -> socket.socket:
    host = address or "127.0.0.1"
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)

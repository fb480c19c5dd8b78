"""Handshake on the engines' internal ports, in which both sides prove that they know the port's key. Also detection of
dead hosts.
"""

import errno
import logging
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock_common import addresses
from penstock_common.observability.logging import LimitedLog
from penstock_common.security import shared_secret
from penstock_common.security.shared_secret import ProofError

# Handshake on the side of the listener, which authenticates several clients at the same time.

MAX_UNPROVEN = 64
"""Maximum number of connections that are not authenticated yet. If another client connects, the oldest of these
connections is closed.
"""
PROOF_WITHIN = 10.0
"""Number of seconds in which a client must authenticate after it has connected."""
_PAUSE = 0.2
"""Seconds to wait before connections are accepted again, after the system ran out of descriptors or memory."""
_AT_ONCE = 16
"""Maximum number of connections that are accepted at a time, before other sockets are handled."""
_DEFECTS = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP})
"""Error numbers of ``accept`` that mean a permanent failure, because the listener is not a listening socket."""

logger = logging.getLogger(__name__)


class Admitted(NamedTuple):
    """Authenticated, non-blocking connection, and the identity that the client claims."""

    connection: socket.socket
    claim: bytes


@dataclass(slots=True)
class _Unproven:
    """State of a connection that is not authenticated yet. ``nonce`` is empty until the reply to the client's first
    message was sent.
    """

    address: str
    until: float
    heard: bytearray = field(default_factory=bytearray)
    hello: bytes = b""
    nonce: bytes = b""


class Admission:
    """Accepts connections of one listener, and returns the connections whose clients have authenticated.

    The caller and this object use the same selector. If the selector returns a socket whose data is this object, the
    caller must call ``hear``. The caller must wait no longer than ``wait_at_most`` returns, and must call ``tick``
    after each wait. An unknown client uses one socket and about 1 KiB, for at most 10 seconds. Only one thread may call
    the methods.
    """

    def __init__(
        self, listener: socket.socket, key: bytes, selector: selectors.BaseSelector, *, port: str, claim_bytes: int = 0
    ) -> None:
        """Start to accept connections.

        Args:
            listener: Listening socket.
            key: Key of the port, see ``SharedSecret.key``.
            selector: Selector of the caller.
            port: Name of the port in log lines.
            claim_bytes: Length in bytes of a claim, the identity that a client sends.
        """
        listener.setblocking(False)
        self._listener, self._key, self._selector = listener, key, selector
        self._port = port
        self._proof_bytes = claim_bytes + shared_secret.PROOF_BYTES
        self._unproven: dict[socket.socket, _Unproven] = {}
        """Connections that are not authenticated yet, oldest first."""
        self._paused_until: float | None = None
        self._log = LimitedLog(logger)
        selector.register(listener, selectors.EVENT_READ, self)

    def close(self) -> None:
        """Close all connections that are not authenticated yet, and stop accepting connections. The listener stays
        open.
        """
        if self._paused_until is None:
            self._selector.unregister(self._listener)
        for connection in list(self._unproven):
            self._forget(connection).close()

    def wait_at_most(self, seconds: float | None = None) -> float | None:
        """Return the number of seconds until ``tick`` must be called, but at most ``seconds``. The result is None if
        the caller may wait without a limit.
        """
        oldest = next(iter(self._unproven.values()), None)
        times = [each for each in (self._paused_until, oldest.until if oldest else None) if each is not None]
        limits = [max(each - time.monotonic(), 0.0) for each in times] + ([] if seconds is None else [seconds])
        return min(limits, default=None)

    def tick(self) -> None:
        """Close connections whose clients have not authenticated in time, and accept connections again after a pause."""
        now = time.monotonic()
        for connection, stranger in list(self._unproven.items()):
            if stranger.until > now:
                break
            self._refuse(connection, f"the client did not authenticate within {PROOF_WITHIN:g} s")
        if self._paused_until is not None and self._paused_until <= now:
            try:
                self._selector.register(self._listener, selectors.EVENT_READ, self)
            except OSError as e:  # Registration with epoll fails if memory is exhausted.
                self._log_pause(e)
                self._paused_until = now + _PAUSE
            else:
                self._paused_until = None

    def hear(self, ready: socket.socket) -> Admitted | None:
        """Handle a ready listener or connection. If the handshake of a connection has just succeeded, return the
        connection, otherwise None.
        """
        if ready is self._listener:
            self._accept()
            return None
        if ready not in self._unproven:  # The connection was closed after the selector had reported it as ready.
            return None
        try:
            return self._go_on(ready, self._unproven[ready])
        except BlockingIOError:
            return None
        except (OSError, ProofError) as e:
            self._refuse(ready, str(e))
            return None

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:  # The client has already closed the connection.
                continue
            except OSError as e:
                if e.errno in _DEFECTS:
                    raise
                self._pause(e)  # Usually the reason is that the system has no free descriptors or memory.
                return
            try:
                connection.setblocking(False)
                self._selector.register(connection, selectors.EVENT_READ, self)
            except OSError as e:
                connection.close()
                self._pause(e)
                return
            if len(self._unproven) >= MAX_UNPROVEN:
                self._refuse(
                    next(iter(self._unproven)),
                    f"there are {MAX_UNPROVEN} newer connections that have not authenticated",
                )
            peer = addresses.with_port(*address[:2])
            self._unproven[connection] = _Unproven(peer, time.monotonic() + PROOF_WITHIN)

    def _go_on(self, connection: socket.socket, stranger: _Unproven) -> Admitted | None:
        expected = self._proof_bytes if stranger.nonce else shared_secret.HELLO_BYTES
        more = connection.recv(expected - len(stranger.heard))
        if not more:
            raise ConnectionResetError("the client closed the connection before it authenticated")
        stranger.heard += more
        if len(stranger.heard) < expected:
            return None
        heard = bytes(stranger.heard)
        stranger.heard.clear()
        if stranger.nonce:
            claim = shared_secret.checked_claim(self._key, stranger.hello, stranger.nonce, heard)
            return Admitted(self._forget(connection), claim)
        nonce = shared_secret.new_nonce()
        reply = shared_secret.reply(self._key, heard, nonce)
        if connection.send(reply) < len(reply):
            raise ConnectionResetError("the client does not read from the connection")
        stranger.hello, stranger.nonce = heard, nonce
        return None

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        self._log.warning(
            "internal port refused a connection",
            port=self._port,
            peer=self._unproven[connection].address,
            reason=reason,
        )
        self._forget(connection).close()

    def _forget(self, connection: socket.socket) -> socket.socket:
        del self._unproven[connection]
        self._selector.unregister(connection)
        return connection

    def _pause(self, error: OSError) -> None:
        self._log_pause(error)
        self._selector.unregister(self._listener)
        self._paused_until = time.monotonic() + _PAUSE

    def _log_pause(self, error: OSError) -> None:
        self._log.warning("internal port temporarily cannot accept connections", port=self._port, error=str(error))


# Handshake on the side of the client.

WaitReadable = Callable[[socket.socket], None]
"""Function that waits until a connection can be read. The function raises an error to end the wait."""


def introduce(connection: socket.socket, key: bytes, claim: bytes, wait: WaitReadable) -> None:
    """Do the client's part of the handshake on a new, non-blocking connection, so that both sides are authenticated.

    Args:
        connection: The new connection.
        key: The key of the port, see ``SharedSecret.key``.
        claim: Identity of this client, with the length that the port expects.
        wait: See ``WaitReadable``.

    Raises:
        ProofError: The listener does not know the key.
        OSError: The connection broke or was closed.
    """
    nonce = shared_secret.new_nonce()
    send_small(connection, shared_secret.hello(nonce))
    reply = read_exactly(connection, shared_secret.REPLY_BYTES, wait)
    send_small(connection, shared_secret.proof(key, nonce, reply, claim))


def read_exactly(connection: socket.socket, count: int, wait: WaitReadable) -> bytes:
    """Read and return ``count`` bytes from a non-blocking connection. Raises OSError if the connection breaks or ends
    first.
    """
    got = bytearray()
    while len(got) < count:
        wait(connection)
        try:
            more = connection.recv(count - len(got))
        except BlockingIOError:
            continue
        if not more:
            raise ConnectionResetError("the other side has closed the connection")
        got += more
    return bytes(got)


def send_small(connection: socket.socket, message: bytes) -> None:
    """Send a message that fits into an empty send buffer. Raises OSError if the free part of the send buffer is too
    small, or if the connection is broken.
    """
    if connection.send(message) < len(message):
        raise BlockingIOError("the other side does not read from the connection")


# Detection of dead hosts by the operating system, even if such a host sends no packet.

_TRIES = 3
"""Number of keepalive probes that the operating system sends on an idle connection before the connection fails. The
interval between probes is an integer number of seconds, so detection may be up to a second late.
"""


def give_up_after(connection: socket.socket, seconds: float) -> None:
    """Make a connection fail if the other host has not answered for ``seconds`` seconds.

    The timeout applies while data is in transit, while the connection is idle, and after the connection was closed with
    unsent data. A host with a stopped or busy process still answers, because the operating system answers while the
    process's receive buffer has space.
    """
    probe = max(round(seconds / _TRIES), 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(int(1000 * seconds), 1))

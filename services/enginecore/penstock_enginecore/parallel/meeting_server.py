"""Server of the rendezvous store: a small key-value store through which processes of several hosts find each other."""

import logging
import os
import selectors
import socket
import threading
from dataclasses import dataclass, field

from penstock_common import addresses
from penstock_common.observability.logging import LimitedLog
from penstock_common.security.shared_secret import NO_SECRET, SharedSecret
from penstock_enginecore.parallel.handshake import Admission, give_up_after, send_small
from penstock_enginecore.parallel.meeting import ANSWER, GET, MAX_KEY_BYTES, MAX_VALUE_BYTES, PURPOSE, REQUEST, SET

_SILENCE = 60.0
"""Number of seconds after which the server disconnects a host that does not answer."""
_AT_ONCE = 8192
MAX_ASKING = 4096
"""Maximum number of authenticated connections. The ranks of two epochs of a group may be connected at the same time,
each with one connection.
"""
MAX_KEYS = 16
"""Maximum number of keys that a client may set over one connection. A rank sets one key."""
MAX_STORE_BYTES = 4 * 1024 * 1024
"""Maximum total size of all keys and values in bytes. The 1024 ranks of the largest group store about 150 bytes each.
"""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Asking:
    """State of one connection.

    Attributes:
        coming: Bytes of the next request that have been received.
        said: Keys that the client has set over this connection.
        wants: Key for whose value the client waits, or None.
    """

    coming: bytearray = field(default_factory=bytearray)
    said: set[str] = field(default_factory=set)
    wants: str | None = None


class MeetingServer:
    """Server that serves the rendezvous store on a free port, on a separate thread, until ``close`` is called.
    ``address`` is host:port of the server.

    The server accepts only clients that know the secret. When a connection is closed, the server removes the values
    that were set over this connection. If a client violates the protocol or its limits, the server disconnects the
    client and logs the reason.
    """

    def __init__(self, host: str, secret: SharedSecret | None = None) -> None:
        """Listen on ``host``, an IP address of this host. Raises OSError if this host does not have the address.

        Clients must know ``secret``. If ``secret`` is None, any client may connect.
        """
        family = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)[0][0]
        self._listener = socket.create_server((host, 0), family=family)
        self.address = addresses.with_port(host, self._listener.getsockname()[1])
        self._said: dict[str, tuple[socket.socket, bytes]] = {}
        """Value of each key, and the connection over which the value was set."""
        self._num_bytes = 0
        self._asking: dict[socket.socket, _Asking] = {}
        self._waiting: dict[str, list[socket.socket]] = {}
        """Connections whose clients wait for a key's value, by key."""
        self._log = LimitedLog(logger)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        key = (secret or NO_SECRET).key(PURPOSE)
        self._admission = Admission(self._listener, key, self._selector, port=f"rendezvous store {self.address}")
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="meeting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server, and close all connections. Idempotent."""
        if not self._closed:
            self._closed = True
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            os.close(self._wake)

    def _serve(self) -> None:
        with self._selector, self._listener:
            while not self._closed:
                self._take_one_round()
            self._admission.close()
            for connection in list(self._asking):
                self._hang_up(connection)

    def _take_one_round(self) -> None:
        for key, _ in self._selector.select(self._admission.wait_at_most()):
            ready = key.fileobj
            if key.data is self._admission:
                if admitted := self._admission.hear(ready):
                    self._admit(admitted.connection)
            elif ready in self._asking:
                self._hear(ready)
        self._admission.tick()

    def _admit(self, connection: socket.socket) -> None:
        if len(self._asking) >= MAX_ASKING:
            self._log.warning(
                "rendezvous store refused a connection, because too many connections are open",
                limit=MAX_ASKING,
            )
            connection.close()
            return
        try:
            give_up_after(connection, _SILENCE)
            self._selector.register(connection, selectors.EVENT_READ)
        except OSError as e:  # The client has disconnected, or memory is exhausted.
            self._log.warning("rendezvous store could not accept a connection", error=str(e))
            connection.close()
            return
        self._asking[connection] = _Asking()

    def _hear(self, connection: socket.socket) -> None:
        asking = self._asking[connection]
        try:
            heard = connection.recv(_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        if not heard:
            self._hang_up(connection)
            return
        asking.coming += heard
        try:
            while (request := _next_of(asking.coming)) is not None:
                self._do(connection, asking, *request)
        except (OSError, ValueError) as e:  # The client does not read its answers, or violates the protocol.
            self._refuse(connection, str(e))

    def _do(self, connection: socket.socket, asking: _Asking, what: bytes, key: str, value: bytes) -> None:
        """Handle a request of a client. Raises ValueError if the request is invalid."""
        if asking.wants is not None:
            raise ValueError(f"the client sent a request while it was waiting for the key {asking.wants!r}")
        if what == SET:
            self._say(connection, asking, key, value)
        elif what != GET:
            raise ValueError(f"{what!r} is not a valid operation")
        elif key in self._said:
            _answer(connection, self._said[key][1])
        else:
            asking.wants = key
            self._waiting.setdefault(key, []).append(connection)

    def _say(self, connection: socket.socket, asking: _Asking, key: str, value: bytes) -> None:
        if len(asking.said | {key}) > MAX_KEYS:
            raise ValueError(f"the client sets more than {MAX_KEYS} keys")
        self._forget(key)
        if self._num_bytes + len(key.encode()) + len(value) > MAX_STORE_BYTES:
            raise ValueError(f"the keys and values would have more than {MAX_STORE_BYTES} bytes")
        self._said[key] = connection, value
        self._num_bytes += len(key.encode()) + len(value)
        asking.said.add(key)
        _answer(connection, b"")
        for waiting in self._waiting.pop(key, []):
            self._asking[waiting].wants = None
            try:
                _answer(waiting, value)
            except OSError:
                self._hang_up(waiting)

    def _forget(self, key: str) -> None:
        if (found := self._said.pop(key, None)) is not None:
            whose, value = found
            self._num_bytes -= len(key.encode()) + len(value)
            self._asking[whose].said.discard(key)

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        self._log.warning("rendezvous store closed a connection", reason=reason)
        self._hang_up(connection)

    def _hang_up(self, connection: socket.socket) -> None:
        if (asking := self._asking.get(connection)) is None:
            return
        for key in list(asking.said):
            self._forget(key)
        if asking.wants is not None:
            self._waiting[asking.wants].remove(connection)
            if not self._waiting[asking.wants]:
                del self._waiting[asking.wants]
        del self._asking[connection]
        self._selector.unregister(connection)
        connection.close()


def _next_of(coming: bytearray) -> tuple[bytes, str, bytes] | None:
    """Remove the next request from ``coming``, the received bytes, and return the request. Returns None if the request
    is incomplete.

    Raises ValueError if the key is not UTF-8, or if the request is too long.
    """
    if len(coming) < REQUEST.size:
        return None
    what, key_bytes, value_bytes = REQUEST.unpack_from(coming)
    if key_bytes > MAX_KEY_BYTES or value_bytes > MAX_VALUE_BYTES:
        raise ValueError(
            f"the request has a key of {key_bytes} bytes and a value of {value_bytes} bytes; the limits are {MAX_KEY_BYTES} and "
            f"{MAX_VALUE_BYTES} bytes"
        )
    middle, end = REQUEST.size + key_bytes, REQUEST.size + key_bytes + value_bytes
    if len(coming) < end:
        return None
    key, value = bytes(coming[REQUEST.size : middle]), bytes(coming[middle:end])
    del coming[:end]
    return what, key.decode(), value


def _answer(connection: socket.socket, value: bytes) -> None:
    """Send ``value`` as an answer. Raises OSError if the answer cannot be sent without waiting."""
    send_small(connection, ANSWER.pack(len(value)) + value)

"""A store of a few keys at which processes of several hosts find each other: who keeps it."""

import selectors
import socket
import threading

from penstock_common import addresses
from penstock_enginecore.parallel.dead_peers import give_up_after
from penstock_enginecore.parallel.meeting_store import ANSWER, GET, HAS, REQUEST, SET

_SILENCE = 60.0
"""Seconds after which a host that does not answer any more is not waited for."""
_AT_ONCE = 65_536


class MeetingServer:
    """Listens on a free port until ``close``, on a thread of its own. ``address``: its host:port.

    Anybody who reaches it may ask and say something, as with torch's. Who does not keep to the rules is hung up on.
    """

    def __init__(self, host: str) -> None:
        """``host``: an IP address of this host. Raises OSError where it is none."""
        family = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)[0][0]
        self._listener = socket.create_server((host, 0), family=family)
        self._listener.setblocking(False)
        self.address = addresses.with_port(host, self._listener.getsockname()[1])
        self._said: dict[str, bytes] = {}
        self._asking: dict[socket.socket, bytearray] = {}
        """What has come of the next request of each."""
        self._waiting: dict[str, list[socket.socket]] = {}
        """By key, who is to be answered once there is a value."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="meeting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on everybody. Idempotent."""
        if self._thread.is_alive():
            self._listener.shutdown(socket.SHUT_RDWR)  # which the thread sees
            self._thread.join()

    def _serve(self) -> None:
        with self._selector, self._listener:
            while self._take_one_round():
                pass
            for connection in list(self._asking):
                self._hang_up(connection)

    def _take_one_round(self) -> bool:
        for key, _ in self._selector.select():
            if key.fileobj is not self._listener:
                self._hear(key.fileobj)  # type: ignore[arg-type]  # what was registered
            elif not self._accept():
                return False
        return True

    def _accept(self) -> bool:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # who had come has gone
            return True
        except OSError:  # it was shut down
            return False
        connection.setblocking(False)
        give_up_after(connection, _SILENCE)
        self._asking[connection] = bytearray()
        self._selector.register(connection, selectors.EVENT_READ)
        return True

    def _hear(self, connection: socket.socket) -> None:
        try:
            heard = connection.recv(_AT_ONCE)
            if not heard:
                raise ConnectionResetError
            coming = self._asking[connection]
            coming += heard
            while (request := _next_of(coming)) is not None:
                self._do(connection, *request)
        except (OSError, ValueError):  # it has gone, does not read its answers, or is no rank
            self._hang_up(connection)

    def _do(self, connection: socket.socket, what: bytes, key: str, value: bytes) -> None:
        """Raises ValueError for what cannot be asked."""
        if what == SET:
            self._said[key] = value
            _answer(connection, b"")
            for waiting in self._waiting.pop(key, []):
                try:
                    _answer(waiting, value)
                except OSError:
                    self._hang_up(waiting)
        elif what == HAS:
            _answer(connection, b"1" if key in self._said else b"")
        elif what != GET:
            raise ValueError(f"{what!r} is no question")
        elif key in self._said:
            _answer(connection, self._said[key])
        else:
            self._waiting.setdefault(key, []).append(connection)

    def _hang_up(self, connection: socket.socket) -> None:
        if self._asking.pop(connection, None) is None:
            return
        self._selector.unregister(connection)
        connection.close()
        for key, waiting in list(self._waiting.items()):
            self._waiting[key] = left = [each for each in waiting if each is not connection]
            if not left:
                del self._waiting[key]


def _next_of(coming: bytearray) -> tuple[bytes, str, bytes] | None:
    """Take the next request away from what has come; None while it is not whole. Raises ValueError where its key is no text."""
    if len(coming) < REQUEST.size:
        return None
    what, key_bytes, value_bytes = REQUEST.unpack_from(coming)
    middle, end = REQUEST.size + key_bytes, REQUEST.size + key_bytes + value_bytes
    if len(coming) < end:
        return None
    key, value = bytes(coming[REQUEST.size : middle]), bytes(coming[middle:end])
    del coming[:end]
    return what, key.decode(), value


def _answer(connection: socket.socket, value: bytes) -> None:
    """Raises OSError where it cannot be sent at once."""
    message = ANSWER.pack(len(value)) + value
    if connection.send(message) < len(message):
        raise BlockingIOError

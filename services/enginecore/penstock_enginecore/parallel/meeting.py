"""Client of the rendezvous store: a small key-value store through which processes of a group find each other.

torch's ``TCPStore`` is not used, because ``TCPStore`` does not authenticate clients. ``TCPStore`` also resolves host
names on both sides of each connection, and serves no other client during that time (ADR 86).
"""

import socket
import struct
from dataclasses import dataclass

from penstock_common.security.shared_secret import NO_SECRET, SharedSecret
from penstock_enginecore.parallel.handshake import WaitReadable, read_exactly, send_small

# Client of the rendezvous store.

PURPOSE = "meeting store"
"""Text from which, together with the secret, the key of the store's port is derived."""
REQUEST = struct.Struct("!cHH")
"""Format of a request's header: the operation, the length of the key in bytes, and the length of the value in bytes.
The key and the value follow the header.
"""
ANSWER = struct.Struct("!H")
"""Format of an answer's header: the length of the value in bytes. The value follows the header."""
SET, GET = b"s", b"g"
"""Operations of requests. The answer to SET is an empty value. The answer to GET is the value of the key. If the key
has no value yet, the server sends the answer to GET later.
"""
MAX_KEY_BYTES = 256
MAX_VALUE_BYTES = 4096


class MeetingStore:
    """Client of a ``MeetingServer``. When the connection is closed, the server removes the values that this client has
    set. Not thread-safe.

    Methods raise OSError if the server cannot be reached, and the errors that ``wait`` raises. After an error, the
    connection is unusable.
    """

    def __init__(self, connection: socket.socket, wait: WaitReadable) -> None:
        """Use ``connection``, which is non-blocking and whose handshake is complete. The caller closes the connection.
        For ``wait``, see ``WaitReadable``.
        """
        self._connection = connection
        self._wait = wait

    def set(self, key: str, value: bytes) -> None:
        """Store ``value`` under ``key``. The new value replaces an earlier value of the key."""
        self._ask(SET, key, value)

    def get(self, key: str) -> bytes:
        """Return the value of ``key``. Waits until the key has a value."""
        return self._ask(GET, key, b"")

    def _ask(self, what: bytes, key: str, value: bytes) -> bytes:
        name = key.encode()
        send_small(self._connection, REQUEST.pack(what, len(name), len(value)) + name + value)
        (length,) = ANSWER.unpack(read_exactly(self._connection, ANSWER.size, self._wait))
        return read_exactly(self._connection, length, self._wait)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Address and credentials with which the processes of one or more groups find each other.

    Attributes:
        at: For processes of one host, a descriptor of shared memory whose initial size is 0. For processes of several
            hosts, host:port of a ``MeetingServer``.
        address: IP address at which other hosts reach this process, or empty for processes of one host.
        secret: Secret with which processes of several hosts authenticate each other.
    """

    at: int | str
    address: str = ""
    secret: SharedSecret | None = None

    def key(self, purpose: str) -> bytes:
        """Return the key that is derived from the secret and ``purpose``. Without a secret, the key depends only on
        ``purpose``, so anyone can compute the key.
        """
        return (self.secret or NO_SECRET).key(purpose)

    @property
    def store_key(self) -> bytes:
        """Key of the port of the ``MeetingServer``."""
        return self.key(PURPOSE)

"""Client of the rendezvous store: a small key-value store through which processes of a group find each other.

torch's ``TCPStore`` is not used, because it does not authenticate clients. It also resolves the names of its peers on
both sides of each connection, and serves no other client during that time (ADR 86).
"""

import socket
import struct
from dataclasses import dataclass

from penstock_common.security.shared_secret import NO_SECRET, SharedSecret
from penstock_enginecore.parallel.handshake import WaitReadable, read_exactly, send_small

# The client side.

PURPOSE = "meeting store"
"""Purpose from which the key of the store's port is derived."""
REQUEST = struct.Struct("!cHH")
"""Request header: the operation, the length of the key, and the length of the value, in bytes. Key and value are next.
"""
ANSWER = struct.Struct("!H")
"""Answer header: the length of the value, in bytes. The value is next."""
SET, GET = b"s", b"g"
"""Operations. The answer to SET is an empty value. The answer to GET is the value, sent once the key has a value."""
MAX_KEY_BYTES = 256
MAX_VALUE_BYTES = 4096


class MeetingStore:
    """A connection to a ``MeetingServer``. When the connection is closed, the server removes the values that were set
    through it. Not thread-safe.

    Methods raise OSError if the store cannot be reached, and the errors of ``wait``. After an error, the connection is
    unusable.
    """

    def __init__(self, connection: socket.socket, wait: WaitReadable) -> None:
        """Use a non-blocking ``connection`` on which this side is authenticated. The caller closes it. For ``wait``,
        see ``WaitReadable``.
        """
        self._connection = connection
        self._wait = wait

    def set(self, key: str, value: bytes) -> None:
        """Store a value. The new value replaces an earlier value of the key."""
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
        at: For processes of one host, a descriptor of shared memory that is initially empty. For processes of several
            hosts, host:port of a ``MeetingServer``.
        address: IP address at which other hosts reach this process, if there are several hosts.
        secret: Secret with which processes of several hosts authenticate each other.
    """

    at: int | str
    address: str = ""
    secret: SharedSecret | None = None

    def key(self, purpose: str) -> bytes:
        """Return the key for ``purpose``. Without a secret, the key depends only on the purpose and is not secret."""
        return (self.secret or NO_SECRET).key(purpose)

    @property
    def store_key(self) -> bytes:
        """Key of the port of the ``MeetingServer``."""
        return self.key(PURPOSE)

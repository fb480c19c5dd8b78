"""Where processes that compute together find each other: a store of a few keys.

Not torch's ``TCPStore``: that asks a name server for the names of its peers, on both sides of each connection, serves
nobody meanwhile (ADR 86), and recognizes nobody.
"""

import socket
import struct
from dataclasses import dataclass

from penstock_common.security.shared_secret import NO_SECRET, SharedSecret
from penstock_enginecore.parallel.handshake import WaitReadable, read_exactly, send_small

# The side of those who ask.

PURPOSE = "meeting store"
"""What the key of its port is for."""
REQUEST = struct.Struct("!cHH")
"""What is wanted, and of how many bytes the key and the value are that follow."""
ANSWER = struct.Struct("!H")
"""Of how many bytes the value is that follows."""
SET, GET = b"s", b"g"
"""Is answered with nothing; with the value, once there is one."""
MAX_KEY_BYTES = 256
MAX_VALUE_BYTES = 4096


class MeetingStore:
    """A connection to a ``MeetingServer``. What is said over it is forgotten when it is closed. One thread at a time.

    A method raises OSError where the store is not reached any more, and what ``wait`` raises; the store is of no use then.
    """

    def __init__(self, connection: socket.socket, wait: WaitReadable) -> None:
        """``connection``: non-blocking; this side has proven itself to the server. The caller closes it. ``wait``: see
        ``WaitReadable``.
        """
        self._connection = connection
        self._wait = wait

    def set(self, key: str, value: bytes) -> None:
        """Say something; what was said before under that key is forgotten."""
        self._ask(SET, key, value)

    def get(self, key: str) -> bytes:
        """Return what was said under ``key``, once something was."""
        return self._ask(GET, key, b"")

    def _ask(self, what: bytes, key: str, value: bytes) -> bytes:
        name = key.encode()
        send_small(self._connection, REQUEST.pack(what, len(name), len(value)) + name + value)
        (length,) = ANSWER.unpack(read_exactly(self._connection, ANSWER.size, self._wait))
        return read_exactly(self._connection, length, self._wait)


@dataclass(frozen=True, slots=True)
class Meeting:
    """A place, at which several groups may meet.

    ``at``: for processes of one host a descriptor of memory that they share, empty at first; for processes of several hosts the
    address, host:port, of a ``MeetingServer``. ``address``: the IP address at which others reach this process, where they are on
    other hosts. ``secret``: by which they recognize each other there.
    """

    at: int | str
    address: str = ""
    secret: SharedSecret | None = None

    def key(self, purpose: str) -> bytes:
        """Return the key for ``purpose``; without a secret it is one that everybody knows who knows the purpose."""
        return (self.secret or NO_SECRET).key(purpose)

    @property
    def store_key(self) -> bytes:
        """The key of the ``MeetingServer``."""
        return self.key(PURPOSE)

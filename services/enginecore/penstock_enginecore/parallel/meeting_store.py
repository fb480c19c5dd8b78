"""A store of a few keys at which processes of several hosts find each other: the side of those who ask.

Not torch's ``TCPStore``: that asks a name server for the names of its peers, on both sides of each connection, serves nobody
meanwhile (ADR 86), and recognizes nobody.
"""

import socket
import struct

from penstock_enginecore.parallel.introduction import WaitReadable, read_exactly, send_small

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

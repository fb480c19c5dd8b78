"""A store of a few keys at which processes of several hosts find each other: the side of those who ask.

Not torch's ``TCPStore``: that asks a name server for the names of its peers, on both sides of each connection, and serves nobody
meanwhile (ADR 86).
"""

import socket
import struct
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

REQUEST = struct.Struct("!cHH")
"""What is wanted, and of how many bytes the key and the value are that follow."""
ANSWER = struct.Struct("!H")
"""Of how many bytes the value is that follows."""
SET, GET, HAS = b"s", b"g", b"h"
"""Is answered with nothing; with the value, once there is one; with a byte where there is one, else with nothing."""


class MeetingStore(Store):
    """What torch's groups, and ``Mesh``, need of a store. One thread at a time. A method raises OSError where the store is not
    reached any more.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        """``connection``: to a ``MeetingServer``; this closes it. ``seconds`` in which a call that waits for nobody is over."""
        super().__init__()
        self._connection = connection
        self._seconds = seconds
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set(self, key: str, value: str | bytes) -> None:
        """Say something; what was said before under that key is forgotten."""
        self._ask(SET, key, value.encode() if isinstance(value, str) else bytes(value), self._seconds)

    def get(self, key: str) -> bytes:
        """What was said; waits for it as long as it takes."""
        return self.get_within(key, None)

    def get_within(self, key: str, seconds: float | None) -> bytes:
        """``get``; raises TimeoutError after so many seconds, and is of no use from then on."""
        return self._ask(GET, key, b"", seconds)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether something was said under all of them."""
        return all(self._ask(HAS, key, b"", self._seconds) for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until it is. Each key has ``timeout``; see ``get_within``."""
        for key in keys:
            self.get_within(key, None if timeout is None else timeout.total_seconds())

    def close(self) -> None:
        """Nothing is asked any more."""
        self._connection.close()

    def _ask(self, what: bytes, key: str, value: bytes, seconds: float | None) -> bytes:
        name = key.encode()
        self._connection.settimeout(seconds)
        try:
            self._connection.sendall(REQUEST.pack(what, len(name), len(value)) + name + value)
            (length,) = ANSWER.unpack(self._read(ANSWER.size))
            return self._read(length)
        except TimeoutError:
            self.close()  # the answer may still come, and would be taken for that to another question
            raise

    def _read(self, count: int) -> bytes:
        got = b""
        while len(got) < count:
            if not (more := self._connection.recv(count - len(got))):
                raise ConnectionResetError("the store where the ranks meet has closed the connection")
            got += more
        return got

"""What one rank exchanges with another in a collective."""

import contextlib
import socket
import struct

from penstock_enginecore.core.collective_errors import CollectiveBroken

_HEADER = struct.Struct("!BQQ")
EXCHANGE, GATHER, ALL_TO_ALL, _GOODBYE = 1, 2, 3, 4
NAMES = {EXCHANGE: "exchange", GATHER: "all-gather", ALL_TO_ALL: "all-to-all", _GOODBYE: "farewell"}


class Peer:
    """A message each way, over a non-blocking connection: of which kind the collective is, the how manieth, how many bytes, and
    these.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self._connection = connection
        self._header = bytearray(_HEADER.size)

    def begin(self, kind: int, number: int, outgoing: memoryview, incoming: memoryview) -> None:
        """``incoming``: what is to be filled."""
        self._expected = (kind, number, len(incoming))
        self._outgoing = [memoryview(_HEADER.pack(kind, number, len(outgoing))), outgoing]
        self._missing_header, self._incoming = memoryview(self._header), incoming

    def go_on(self) -> bool:
        """Send and receive what can be now; whether that was all. Raises OSError where the connection failed, CollectiveBroken
        where it was closed, or the peer is in another collective.
        """
        try:
            with contextlib.suppress(BlockingIOError):
                self._send()
        except BrokenPipeError as e:  # as reading would find; which comes first is chance
            raise self._closed() from e
        with contextlib.suppress(BlockingIOError):
            self._receive()
        return not self._outgoing and not self._missing_header and not self._incoming

    def died(self) -> bool:
        """Whether there is nobody on the other side, who took no leave either."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def take_leave(self) -> None:
        """Tell the other side, as well as may be, that the connection is closed on purpose."""
        with contextlib.suppress(OSError):
            self._connection.send(_HEADER.pack(_GOODBYE, 0, 0))

    def _send(self) -> None:
        while self._outgoing:
            sent = self._connection.sendmsg(self._outgoing)
            while self._outgoing and sent >= len(self._outgoing[0]):
                sent -= len(self._outgoing.pop(0))
            if self._outgoing:
                self._outgoing[0] = self._outgoing[0][sent:]

    def _receive(self) -> None:
        while self._missing_header:
            self._missing_header = self._missing_header[self._read(self._missing_header) :]
            if not self._missing_header:
                self._check()
        while self._incoming:
            self._incoming = self._incoming[self._read(self._incoming) :]

    def _read(self, into: memoryview) -> int:
        count = self._connection.recv_into(into)
        if not count:
            raise self._closed()
        return count

    def _closed(self) -> CollectiveBroken:
        return CollectiveBroken(f"rank {self.rank} has closed its connection")

    def _check(self) -> None:
        found = _HEADER.unpack(self._header)
        if found != self._expected:
            raise CollectiveBroken(f"rank {self.rank} is in {_say(found)}, this rank in {_say(self._expected)}")


def _say(message: tuple[int, int, int]) -> str:
    kind, number, size = message
    return f"collective {number}, {NAMES.get(kind, 'of no kind that is known')} of {size} bytes"

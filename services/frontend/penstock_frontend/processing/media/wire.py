"""Connections to media hosts, read in slices, so that no host can keep the event loop busy."""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable

from penstock_frontend.loop_yield import Pace

RunInThread = Callable[[Callable[[], bool]], Awaitable[bool]]

BYTES_PER_TURN = 64 * 1024
"""Bytes from media hosts that all connections together process in one turn of the event loop. If they are one-byte chunks,
which cost the most, parsing them takes 1 ms.
"""
_SLICE = 16 * 1024
"""Bytes that one read takes from a socket."""
_SMALLEST_CHARGE = 2 * 1024
"""Bytes that each read counts for at least. A read costs some 50 us, also where the host sends single bytes."""
_LONGEST_HANDSHAKE = 128 * 1024


class Wire:
    """One connection, with or without TLS. The caller closes it.

    TLS runs over memory buffers: asyncio's own TLS decrypts up to 256 KiB in one turn of the event loop, however small the
    records are.
    """

    def __init__(self, connection: socket.socket, pace: Pace) -> None:
        """Wrap a connected, non-blocking socket.

        Args:
            connection: the socket, which the wire owns from now on.
            pace: the bytes per turn of the event loop, shared by all wires.
        """
        self._socket = connection
        self._pace = pace
        self._tls: ssl.SSLObject | None = None
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.num_received = 0
        """Bytes that the host has sent after the TLS handshake, before decryption."""

    async def start_tls(self, context: ssl.SSLContext, name: str, run_in_thread: RunInThread) -> None:
        """Do the TLS handshake and check the certificate.

        Args:
            context: the trusted authorities.
            name: the name that the certificate must have.
            run_in_thread: runs the steps of the handshake. One can take a large part of a second if the host chooses large keys.

        Raises:
            ssl.SSLCertVerificationError: the certificate is not trusted.
            OSError: the handshake fails, or the connection is lost.
        """
        tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        while not await run_in_thread(lambda: _has_shaken_hands(tls)):
            await self._flush()
            data = await self._receive()
            if not data or self.num_received > _LONGEST_HANDSHAKE:
                raise ConnectionResetError
            self._incoming.write(data)
        self._tls = tls
        await self._flush()
        self.num_received = 0

    async def send(self, data: bytes) -> None:
        """Send all of the data. Raises OSError."""
        if self._tls is None:
            await asyncio.get_running_loop().sock_sendall(self._socket, data)
        else:
            self._tls.write(data)
            await self._flush()

    async def read(self) -> bytes:
        """Return the next bytes, at most some 32 KiB, or none at the end. Raises OSError."""
        if self._tls is None:
            return await self._receive()
        while True:
            pieces: list[bytes] = []
            is_over = False
            try:
                while not is_over:
                    pieces.append(self._tls.read(_SLICE))
                    is_over = not pieces[-1]
            except ssl.SSLWantReadError:
                pass
            await self._flush()
            if (data := b"".join(pieces)) or is_over:
                return data
            if not (received := await self._receive()):
                return b""  # many hosts close the connection without TLS's own end
            self._incoming.write(received)

    def close(self) -> None:
        """Close the connection at once, whatever was not sent."""
        self._socket.close()

    async def _flush(self) -> None:
        if data := self._outgoing.read():
            await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def _receive(self) -> bytes:
        """Return what the host has sent, once there is room in a turn of the event loop to process it."""
        data = await asyncio.get_running_loop().sock_recv(self._socket, _SLICE)
        self.num_received += len(data)
        await self._pace.take(max(len(data), _SMALLEST_CHARGE))
        return data


async def connect(address: str, port: int, pace: Pace) -> Wire:
    """Connect to an address. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (address, port))
    except BaseException:
        connection.close()
        raise
    return Wire(connection, pace)


def _has_shaken_hands(tls: ssl.SSLObject) -> bool:
    """Go on with the handshake. Return False if it needs more bytes from the host."""
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True

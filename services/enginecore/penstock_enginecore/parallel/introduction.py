"""The side that connects: how it proves itself to an internal port, and checks who listens there."""

import socket
from collections.abc import Callable

from penstock_common.security import challenge

WaitReadable = Callable[[socket.socket], None]
"""Returns when a connection may be read from. Raises whatever ends the wait."""


def introduce(connection: socket.socket, key: bytes, claim: bytes, wait: WaitReadable) -> None:
    """Prove over a new, non-blocking connection that this side knows ``key``, and check that the listener knows it.

    Args:
        connection: It is new.
        key: The key of the port, see ``SharedSecret.key``.
        claim: Says who this side is, in as many bytes as the port expects.
        wait: See ``WaitReadable``.

    Raises:
        ProofError: The listener does not know the key.
        OSError: The connection broke or was closed.
    """
    nonce = challenge.new_nonce()
    send_small(connection, challenge.hello(nonce))
    reply = read_exactly(connection, challenge.REPLY_BYTES, wait)
    send_small(connection, challenge.proof(key, nonce, reply, claim))


def read_exactly(connection: socket.socket, count: int, wait: WaitReadable) -> bytes:
    """Return ``count`` bytes of a non-blocking connection. Raises OSError if it breaks or ends before."""
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
    """Send a message that fits into an empty send buffer. Raises OSError if it does not fit, or the connection is broken."""
    if connection.send(message) < len(message):
        raise BlockingIOError("the other side does not read")

"""Connections to internal ports, from peers with the secret and from strangers."""

import select
import socket

from penstock_common import addresses
from penstock_enginecore.parallel.handshake import introduce
from penstock_enginecore.parallel.meeting import Meeting, MeetingStore
from tests.fakes.patience import PATIENCE


def connected(address: str) -> socket.socket:
    """Connect to host:port without sending anything."""
    return socket.create_connection(addresses.split(address), PATIENCE)


def wait_readable(connection: socket.socket) -> None:
    """See ``WaitReadable``."""
    assert select.select([connection], [], [], PATIENCE)[0], "nothing comes"


def introduced(address: str, key: bytes, claim: bytes = b"") -> socket.socket:
    """Return a non-blocking connection to host:port that has proved that it knows the key."""
    connection = connected(address)
    connection.setblocking(False)
    try:
        introduce(connection, key, claim, wait_readable)
    except BaseException:
        connection.close()
        raise
    return connection


def asking(meeting: Meeting) -> tuple[socket.socket, MeetingStore]:
    """Return a connection to the store of a meeting, and a client of the store that uses it."""
    connection = introduced(str(meeting.at), meeting.store_key)
    return connection, MeetingStore(connection, wait_readable)


def is_closed(connection: socket.socket) -> bool:
    """Wait until the other side closes the connection. Return whether it sent nothing before."""
    wait_readable(connection)
    try:
        return not connection.recv(1)
    except ConnectionError:
        return True

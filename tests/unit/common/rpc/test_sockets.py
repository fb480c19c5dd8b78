"""Sockets that gRPC's server does not give away."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator

import pytest

from penstock_common.rpc import server


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def port_of(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere listeners are left alone")
class TestAcceptNoMore:
    def test_connections_are_refused_from_then_on(self, listener: socket.socket) -> None:
        port = port_of(listener)
        server.accept_no_more(port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))

    def test_who_listened_waits_for_connections_as_before(self, listener: socket.socket) -> None:
        server.accept_no_more(port_of(listener))
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
        assert not os.get_inheritable(listener.fileno())

    def test_connections_that_are_there_live_on(self, listener: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", port_of(listener))) as client:
            connection, _ = listener.accept()
            with contextlib.closing(connection):
                server.accept_no_more(port_of(listener))
                client.sendall(b"word")
                assert connection.recv(4) == b"word"

    def test_other_ports_are_left_alone(self, listener: socket.socket) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            server.accept_no_more(port_of(other))
            socket.create_connection(("127.0.0.1", port_of(listener))).close()


def test_the_other_side_reads_to_the_end_when_output_ends(listener: socket.socket) -> None:
    with socket.create_connection(("127.0.0.1", port_of(listener))) as client:
        connection, _ = listener.accept()
        with contextlib.closing(connection):
            connection.sendall(b"last words")
            server.end_output(port_of(listener))
            client.settimeout(10)
            assert client.recv(100) == b"last words"
            assert client.recv(100) == b""

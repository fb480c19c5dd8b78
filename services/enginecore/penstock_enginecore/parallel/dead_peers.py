"""How the kernel finds out that nobody is on the other side of a connection, where no packet says so."""

import socket

_TRIES = 3
"""Probes of an idle connection. They are whole seconds apart: where that is too coarse, it is found out a second late."""


def give_up_after(connection: socket.socket, seconds: float) -> None:
    """Have a connection fail once the other host has been silent for so many seconds: while something is on its way to it, while
    there is nothing to say, and after the connection was closed with something left to send. A process that is stopped or busy is
    not silent: its host answers for it, as long as there is room for what it was sent.
    """
    probe = max(round(seconds / _TRIES), 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(int(1000 * seconds), 1))

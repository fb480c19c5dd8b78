"""The sockets of this process, which gRPC's server does not give away."""

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path


def accept_no_more(port: int) -> None:
    """Refuse connections to ``port`` from now on, without a word to who listens there, which gRPC would take for an error: in
    the place of each listener comes one that nobody can find. On Linux; elsewhere it does nothing.

    A packet filter would do it too, and is not allowed to a process without capabilities.
    """
    if sys.platform != "linux":
        return
    for number in [number for number, _ in _sockets(port, listening=True)]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
            silent.setblocking(False)
            silent.bind("")  # the system gives it a name of its own, on no file system
            silent.listen(0)
            os.dup2(silent.fileno(), number, inheritable=False)


def end_output(port: int) -> None:
    """Send nothing more on connections that were accepted on ``port``: their peers read to the end of what was sent."""
    for _, connection in _sockets(port, listening=False):
        with contextlib.suppress(OSError):  # its peer has gone already
            connection.shutdown(socket.SHUT_WR)


def _sockets(port: int, *, listening: bool) -> Iterator[tuple[int, socket.socket]]:
    """Those of TCP with this port of their own, each with its number here: a duplicate, closed when the next one is asked for."""
    for entry in Path("/dev/fd").iterdir():
        try:
            number = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            duplicate = os.dup(number)
        except OSError:  # closed meanwhile
            continue
        with socket.socket(fileno=duplicate) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                listens = bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                if listens == listening and found.getsockname()[1] == port:
                    yield number, found

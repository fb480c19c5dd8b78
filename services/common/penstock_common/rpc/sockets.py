"""The sockets of this process, which gRPC's server does not give away."""

import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

_ATTACH_FILTER = 26
"""SO_ATTACH_FILTER of Linux: a program of the classic packet filter that says how much of a packet gets to a socket."""
_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)
"""Such a program: returns 0."""


def accept_no_more(port: int) -> None:
    """Let connections to ``port`` get through no more, without a word to its listeners, which gRPC would take for an error. On
    Linux; elsewhere it does nothing.
    """
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(_NOTHING)
    for listener in _sockets(port, listening=True):
        listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def end_output(port: int) -> None:
    """Send nothing more on connections that were accepted on ``port``: their peers read to the end of what was sent."""
    for connection in _sockets(port, listening=False):
        with contextlib.suppress(OSError):  # its peer has gone already
            connection.shutdown(socket.SHUT_WR)


def _sockets(port: int, *, listening: bool) -> Iterator[socket.socket]:
    """Those of TCP with this port of their own; closed when the next one is asked for, which leaves the process' own open."""
    for entry in Path("/dev/fd").iterdir():
        try:
            if not stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                continue
            number = os.dup(int(entry.name))
        except OSError:  # closed meanwhile
            continue
        with socket.socket(fileno=number) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                listens = bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                if listens == listening and found.getsockname()[1] == port:
                    yield found

"""Connections from programs that are not Penstock services.

``python -m tests.fuzz.internal_ports.foreign HOST PORT KIND COUNT SECONDS`` opens COUNT connections, sends the data of
the kind on each, keeps them open for SECONDS, and prints the results as JSON.
"""

import asyncio
import contextlib
import json
import resource
import socket
import struct
import sys
import time
from collections.abc import Sequence
from random import Random

from penstock_enginecore.parallel.meeting import REQUEST, SET
from tests.fuzz.http2 import DATA, END_HEADERS, HEADERS, PREFACE, SETTINGS, call_headers, raw_frame

KINDS = ("silent", "random bytes", "huge lengths")
_HUGE: Sequence[bytes] = (
    struct.pack(">I", 2**32 - 1),
    struct.pack("<I", 2**31 - 1),
    struct.pack(">Q", 2**62),
    struct.pack("<Q", 2**62) * 4,
    REQUEST.pack(SET, 2**16 - 1, 2**16 - 1) + b"key",
    PREFACE + b"\xff\xff\xff\0\0\0\0\0\1",
    PREFACE
    + raw_frame(SETTINGS, 0, 0)
    + raw_frame(HEADERS, END_HEADERS, 1, call_headers(b"/grpc.health.v1.Health/Check"))
    + raw_frame(DATA, 0, 1, struct.pack(">BI", 0, 2**32 - 1) + bytes(1000)),
    b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999999999999\r\n\r\nx",
    b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n7fffffffffffffff\r\nx",
)
_AT_ONCE = 100
_SPARE_FILES = 100


def said(kind: str, number: int) -> bytes:
    """Return the data that the connection with this number sends."""
    match kind:
        case "silent":
            return b""
        case "huge lengths":
            return _HUGE[number % len(_HUGE)]
        case _:
            rng = Random(f"foreign {number}")
            return rng.randbytes(rng.choice((1, 4, 36, 500, 20_000)))


def allow_files(count: int) -> None:
    """Raise this process's limit of open files. Raises ValueError if the system's limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _SPARE_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ValueError(f"{count} connections need {wanted} open files; the hard limit (ulimit -Hn) is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


class Foreign:
    """Connections to one port. ``refused`` is the number of connections that could not be opened in time."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._sockets: list[socket.socket] = []
        self.refused = 0

    def open_now(self, kinds: Sequence[str], count: int) -> None:
        """Open connections without waiting for the server.

        Send data on connections that are established immediately.
        """
        for number in range(count):
            connection = socket.socket()
            connection.setblocking(False)
            self._sockets.append(connection)
            with contextlib.suppress(OSError):
                connection.connect_ex(self._address)
                connection.send(said(kinds[number % len(kinds)], number))

    async def open(self, kind: str, count: int, seconds: float) -> None:
        """Open connections, and send data on each, within ``seconds``."""
        room = asyncio.Semaphore(_AT_ONCE)
        await asyncio.gather(*(self._open(kind, number, room, seconds) for number in range(count)))

    async def _open(self, kind: str, number: int, room: asyncio.Semaphore, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        connection = socket.socket()
        connection.setblocking(False)
        self._sockets.append(connection)
        async with room:
            try:
                async with asyncio.timeout(seconds):
                    await loop.sock_connect(connection, self._address)
                    await loop.sock_sendall(connection, said(kind, number))
            except (OSError, TimeoutError):
                self.refused += 1

    def num_ended(self) -> int:
        """Return the number of connections that the server has closed."""
        return sum(_has_ended(each) for each in self._sockets)

    def close(self) -> None:
        """Close all connections."""
        for each in self._sockets:
            each.close()
        self._sockets.clear()


def _has_ended(connection: socket.socket) -> bool:
    try:
        while data := connection.recv(2**16):
            del data
    except BlockingIOError:
        return False
    except OSError:  # a reset, or it was never open
        return True
    return True


async def _main(host: str, port: int, kind: str, count: int, seconds: float) -> dict[str, float]:
    allow_files(count)
    foreign = Foreign(host, port)
    began = time.monotonic()
    await foreign.open(kind, count, seconds)
    opened = time.monotonic() - began
    await asyncio.sleep(max(0.0, seconds - opened))
    ended = foreign.num_ended()
    foreign.close()
    return {"opened": count - foreign.refused, "refused": foreign.refused, "ended": ended, "seconds": opened}


if __name__ == "__main__":
    _host, _port, _kind, _count, _seconds = sys.argv[1:]
    print(json.dumps(asyncio.run(_main(_host, int(_port), _kind, int(_count), float(_seconds)))))

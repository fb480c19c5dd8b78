"""TCP sockets of other processes of this machine, according to the operating system."""

import contextlib
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_LISTEN = 0x0A


class Tcp(NamedTuple):
    """A socket. ``host`` and ``port`` are its local address, ``peer`` is the remote host:port. ``listens`` is true if
    it accepts connections.
    """

    host: str
    port: int
    peer: str
    listens: bool
    inode: int


def sockets_of(pids: Iterable[int]) -> list[Tcp]:
    """Return the open TCP sockets of these processes. Processes that have ended have none."""
    inodes = {inode for pid in pids for inode in _inodes(pid)}
    return [found for found in _all() if found.inode in inodes]


def listening(pids: Iterable[int]) -> list[tuple[str, int]]:
    """Return host and port of all listening sockets of these processes, in order of the ports."""
    return sorted({(each.host, each.port) for each in sockets_of(pids) if each.listens}, key=lambda found: found[::-1])


def connections(pid: int) -> set[str]:
    """Return the open connections of a process in both directions, with both addresses."""
    return {f"{each.host}:{each.port} - {each.peer}" for each in sockets_of([pid]) if not each.listens}


def descendants(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for each in found:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for thread in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    return found


def _inodes(pid: int) -> Iterator[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if (name := link.readlink().name).startswith("socket:["):
                    yield int(name[8:-1])


def _all() -> Iterator[Tcp]:
    for file, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", file).read_text().splitlines()[1:]:
            fields = line.split()
            (host, port), peer = (_end(field, family) for field in fields[1:3])
            yield Tcp(host, port, f"{peer[0]}:{peer[1]}", int(fields[3], 16) == _LISTEN, int(fields[9]))


def _end(field: str, family: socket.AddressFamily) -> tuple[str, int]:
    """Parse an address. The system writes each 32 bits of an address as a number in this machine's byte order."""
    address, _, port = field.partition(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    found = socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
    return found.removeprefix("::ffff:"), int(port, 16)

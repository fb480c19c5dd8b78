"""Programs that can reach only one server on this machine.

``run_alone`` starts a program in a network namespace that has only a loopback interface. A Unix socket, which
namespaces share, carries its connections to the server. Run as a module, this file is the first process in that
namespace. It forwards the connections, starts the program and ends with its exit status; the kernel then ends all
remaining processes.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

PORT = 8000
"""The server's port inside the namespace."""
UNSHARE = ("unshare", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Ended(NamedTuple):
    """A program that has ended. ``output``: its standard output and standard error."""

    code: int
    output: str


def can_run_alone() -> bool:
    """Return whether this machine allows network namespaces."""
    if shutil.which(UNSHARE[0]) is None:
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0


async def run_alone(
    command: Sequence[str], port: int, *, folder: Path, environment: Mapping[str, str], limit: float
) -> Ended:
    """Run a program in ``folder`` until it ends; it reaches 127.0.0.1:``port`` of this machine at localhost:PORT.

    Raises:
        TimeoutError: the program has not ended after ``limit`` seconds, and is killed.
    """
    path = str(folder.parent / "server.sock")
    passing = await asyncio.start_unix_server(_to(lambda: asyncio.open_connection("127.0.0.1", port)), path)
    async with passing:
        process = await asyncio.create_subprocess_exec(
            *UNSHARE,
            *(sys.executable, __file__, path, *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env=environment,
        )
        try:
            async with asyncio.timeout(limit):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode is not None
    return Ended(process.returncode, output.decode(errors="replace"))


def _to(connect: Callable[[], Awaitable[Streams]]) -> Callable[..., Awaitable[None]]:
    """Return the handler of a listener that passes each connection to a new one made by ``connect``."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await connect()
        async with asyncio.TaskGroup() as both:
            both.create_task(_pass(reader, to_writer))
            both.create_task(_pass(to_reader, writer))

    return handle


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):  # the program may close connections at any time
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        _, flags = struct.unpack("16sh14x", fcntl.ioctl(control, SIOCGIFFLAGS, request))
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


async def _main(path: str, command: Sequence[str]) -> int:
    _bring_loopback_up()
    async with await asyncio.start_server(_to(lambda: asyncio.open_unix_connection(path)), "localhost", PORT):
        process = await asyncio.create_subprocess_exec(*command)
        return await process.wait()


if __name__ == "__main__":
    os._exit(asyncio.run(_main(sys.argv[1], sys.argv[2:])))

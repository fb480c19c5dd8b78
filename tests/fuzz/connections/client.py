"""Client that plays a script on a raw connection and records the server's output."""

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

from tests.fuzz.connections.script import EndOutput, Flood, Reset, Script, Send, Step, UntilClosed, UntilHeard, Wait

_KEPT = 4 * 2**20
"""Bytes of the answers of one connection that are kept."""
_AT_ONCE = 2**16
_SMALL_BUFFER = 4096
"""Bytes that the system keeps for a client that does not read."""


class Heard(NamedTuple):
    """Result of a connection. ``closed``: the server ended it. ``late``: the server did not act within the timeout."""

    received: bytes
    closed: bool
    late: bool
    refused: str = ""
    """Why there was no connection at all, or empty."""


class Connection:
    """One connection. ``patience`` is the timeout for expected data in seconds."""

    def __init__(self, script: Script, patience: float) -> None:
        self._script = script
        self._patience = patience
        self._received = bytearray()
        self._closed = asyncio.Event()
        self._more = asyncio.Event()
        self._socket = socket.socket()
        self._socket.setblocking(False)
        if not script.reads:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)

    async def play(self, address: tuple[str, int]) -> Heard:
        """Connect, do every step, and close. Errors of the server raise nothing."""
        loop = asyncio.get_running_loop()
        reading: asyncio.Task[None] | None = None
        late = False
        try:
            async with asyncio.timeout(self._patience):
                await loop.sock_connect(self._socket, address)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._script.reads:
                reading = asyncio.create_task(self._read())
            late = not await self._do_all(self._script.steps)
        except TimeoutError:
            return Heard(b"", closed=False, late=True, refused="no connection in time")
        except OSError as e:
            return Heard(b"", closed=True, late=False, refused=f"no connection: {e}")
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            self._socket.close()
        return Heard(bytes(self._received), self._closed.is_set(), late)

    async def _do_all(self, steps: Sequence[Step]) -> bool:
        """Execute the steps.

        Returns whether all expected data arrived. The server may end the connection at any step.
        """
        for step in steps:
            if not await self._do(step):
                return False
            if self._closed.is_set():
                break
        return True

    async def _do(self, step: Step) -> bool:
        match step:
            case Send():
                with contextlib.suppress(OSError):  # the server has ended the connection
                    await self._send(step)
            case Flood():
                with contextlib.suppress(OSError):
                    await self._flood(step)
            case Wait(seconds):
                await self._until_closed(seconds)
            case UntilHeard():
                return await self._until_heard(step)
            case UntilClosed():
                return await self._until_closed(self._patience)
            case EndOutput():
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)
            case Reset():
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return True

    async def _send(self, step: Send) -> None:
        """Send data. Gives up if the server reads nothing within the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience):
                for start in range(0, len(step.data), step.piece):
                    await self._send_all(step.data[start : start + step.piece])
                    if step.pause and await self._until_closed(step.pause):
                        return

    async def _flood(self, step: Flood) -> None:
        until, left = time.monotonic() + step.seconds, step.most
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(step.seconds):
                while left > 0 and time.monotonic() < until and not self._closed.is_set():
                    await self._send_all(step.data[:left])
                    left -= len(step.data)

    async def _send_all(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def _until_heard(self, step: UntilHeard) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience):
                while len(step.pattern.findall(self._received)) < step.count and not self._closed.is_set():
                    self._more.clear()
                    await self._more.wait()
                return True
        return False

    async def _until_closed(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()
                return True
        return False

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while data := await loop.sock_recv(self._socket, _AT_ONCE):
                self._received += data[: max(0, _KEPT - len(self._received))]
                self._more.set()
        except OSError:  # the server has reset the connection
            pass
        self._closed.set()
        self._more.set()

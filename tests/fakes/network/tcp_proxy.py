"""Proxy that simulates a cable between a client and a server: it can be cut, unplugged and slow."""

import asyncio
import contextlib
from collections.abc import Callable

from tests.fakes.network.ports import free_port


class TcpProxy:
    """Forwards bytes between clients of ``port`` and 127.0.0.1:``target``, or the port that ``target()`` returns for
    each connection.

    ``cut`` resets every connection. ``unplug`` keeps connections open and accepts new ones, but holds all data until
    ``plug_in``. ``delay`` is the additional time of each piece of data in seconds. ``num_bytes`` counts the bytes in
    both directions.
    """

    def __init__(self, target: int | Callable[[], int]) -> None:
        self.port = free_port()
        self.delay = 0.0
        self.num_bytes = 0
        self._target = target
        self._plugged = asyncio.Event()
        self._plugged.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start to listen. May be called again after ``refuse``."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    def cut(self) -> None:
        """Reset every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    def unplug(self) -> None:
        """Hold all data."""
        self._plugged.clear()

    def plug_in(self) -> None:
        """Forward all held and new data again."""
        self._plugged.set()

    def refuse(self) -> None:
        """Accept no more connections. Open connections continue."""
        self._server.close()

    async def close(self) -> None:
        """End all connections and stop listening."""
        self._server.close()
        self.cut()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            await self._plugged.wait()
            with contextlib.suppress(OSError):  # without a listener, reset the connection as the caller would see it
                to_reader, to_writer = await asyncio.open_connection("127.0.0.1", await self._where(reader))
                self._writers.add(to_writer)
                try:
                    await self._both_ways(reader, writer, to_reader, to_writer)
                finally:
                    self._writers.discard(to_writer)
                    to_writer.transport.abort()
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _where(self, reader: asyncio.StreamReader) -> int:
        """Return the target port of a connection."""
        return self._target() if callable(self._target) else self._target

    async def _both_ways(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        to_reader: asyncio.StreamReader,
        to_writer: asyncio.StreamWriter,
    ) -> None:
        """Forward data until both sides have ended. Data sent before one side closed still arrives, even if the other
        direction is broken.
        """
        ways = [asyncio.create_task(self._pass(reader, to_writer)), asyncio.create_task(self._pass(to_reader, writer))]
        try:
            await asyncio.wait(ways)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                data = await reader.read(65_536)
            except OSError:  # a reset, which the proxy passes on
                writer.transport.abort()
                return
            await self._plugged.wait()
            if self.delay:
                await asyncio.sleep(self.delay)
            try:
                if not data:
                    writer.write_eof()
                    return
                self.num_bytes += len(data)
                writer.write(data)
                await writer.drain()
            except OSError:  # the peer has disconnected, but data from it may still be in flight
                return

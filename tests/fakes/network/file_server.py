"""An HTTP server for tests of fetchers. Its answers are given byte by byte by the test."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from types import TracebackType

Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    """Return a complete answer. In ``headers``, underscores become hyphens. A missing Content-Length is added."""
    fields = {"Content-Length": str(len(body)), **{name.replace("_", "-"): value for name, value in headers.items()}}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


class FileServer:
    """HTTP server with ``answers`` by path. Other paths get 404. ``requests`` has the heads of received requests."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests: list[str] = []
        self.num_open = 0
        self.port = 0
        self._tls = tls

    async def __aenter__(self) -> "FileServer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            given = self.answers.get(head.split(" ", 2)[1], answer(status="404 Not Found"))
            if isinstance(given, bytes):
                writer.write(given)
                await writer.drain()
            else:
                await given(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_open -= 1
            writer.close()

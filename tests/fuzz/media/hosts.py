"""A hostile media host, and a private host that no request may reach."""

import asyncio
import contextlib
import socket
import zlib
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType

from tests.fakes.hostile_media import IMAGES, SOUNDS
from tests.fakes.media_files import png_bomb
from tests.fakes.network.file_server import answer
from tests.fakes.network.ports import free_port
from tests.fuzz.media.names import PRIVATE, PUBLIC

Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]
GOOD, GOOD_SOUND = "good", "good-sound"
"""Paths with a valid file."""
REDIRECTS = (
    "http://127.0.0.1:{port}/",
    "http://2130706433:{port}/",
    "http://0x7f000001:{port}/",
    "http://0177.0.0.1:{port}/",
    "http://127.1:{port}/",
    "http://[::1]:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/",
    "http://0.0.0.0:{port}/",
    "http://169.254.169.254/latest/meta-data",
    "http://private.images.test:{port}/",
    "http://mixed.images.test:{port}/",
    "http://mapped.images.test:{port}/",
    "http://unknown.test:{port}/",
    "//private.images.test:{port}/",
    "http://images.test@private.images.test:{port}/",
    "http://private.images.test:{port}\\@images.test/",
    "file:///etc/passwd",
    "data:image/png;base64,AAAA",
    "gopher://127.0.0.1:{port}/",
    "http://images.test:{port}/loop",
    "http://[",
    "",
)
_BLOCK = bytes(65_536)


async def _until_gone(reader: asyncio.StreamReader, answering: "asyncio.Future[None]") -> None:
    """Run ``answering`` until it is done or the client has disconnected."""
    gone = asyncio.ensure_future(reader.read())
    try:
        await asyncio.wait((gone, answering), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in (gone, answering):
            each.cancel()
        await asyncio.gather(gone, answering, return_exceptions=True)


async def _endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n" + IMAGES[1])
    while True:
        writer.write(_BLOCK)
        await writer.drain()


async def _endless_chunks(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"1000\r\n" + _BLOCK[:4096] + b"\r\n")
        await writer.drain()


async def _headers(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X-More: " + b"m" * 1000 + b"\r\n")
        await writer.drain()


async def _informational(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.01)


def _repeated(first: bytes, piece: bytes) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    """Answer with endless pieces as fast as the client reads. Parsing them is much work for few bytes of content."""

    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        pieces = piece * (len(_BLOCK) // len(piece))
        while True:
            writer.write(pieces)
            await writer.drain()

    return send


async def _single_bytes(writer: asyncio.StreamWriter) -> None:
    """Send an endless header, with each byte in a separate packet."""
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    writer.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0)


async def _drip(writer: asyncio.StreamWriter) -> None:
    writer.write(answer(IMAGES[1])[: -len(IMAGES[1])])
    for byte in IMAGES[1]:
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.2)


async def _slow_head(writer: asyncio.StreamWriter) -> None:
    for byte in answer(IMAGES[1]):
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.2)


async def _silence(_writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def _reset(writer: asyncio.StreamWriter) -> None:
    writer.write(answer(IMAGES[1])[:40])
    await writer.drain()
    writer.transport.abort()


_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

ANSWERS: Mapping[str, Answer] = {
    "endless": _endless,
    "endless-chunks": _endless_chunks,
    "endless-headers": _headers,
    "endless-informational": _informational,
    "one-byte-chunks": _repeated(_CHUNKED, b"1\r\nx\r\n"),
    "chunk-extensions": _repeated(_CHUNKED, b"1;name=value\r\nx\r\n"),
    "long-extension": _repeated(_CHUNKED + b"1;", b"name=value;"),
    "endless-trailers": _repeated(_CHUNKED + b"1\r\nx\r\n0\r\n", b"a:b\r\n"),
    "short-headers": _repeated(b"HTTP/1.1 200 OK\r\n", b"a:b\r\n"),
    "long-reason": _repeated(b"HTTP/1.1 200 ", b"reason "),
    "continue-row": _repeated(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "single-bytes": _single_bytes,
    "drip": _drip,
    "slow-head": _slow_head,
    "silence": _silence,
    "reset": _reset,
    "bomb": answer(png_bomb(3000, 3000)),
    "announced": b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n" + IMAGES[1],
    "cut": b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + IMAGES[1],
    "negative": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "no-number": b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n",
    "huge-number": b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    "two-lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nabc",
    "both-lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad-chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc",
    "huge-chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\nabc",
    "gzip": answer(zlib.compress(bytes(100_000)), Content_Encoding="gzip"),
    "latin": "HTTP/1.1 200 OK\r\nContent-Type: \xff\xfe\r\nContent-Length: 1\r\n\r\na".encode("latin-1"),
    "upgrade": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
    "version": b"HTTP/9.9 200 OK\r\n\r\n",
    "zero-status": b"HTTP/1.1 000 Nothing\r\n\r\n",
    "binary": bytes(range(256)) * 8,
    "nothing": b"",
    "empty": answer(),
    "partial": answer(IMAGES[1][:30], "206 Partial Content", Content_Range="bytes 0-29/1000"),
    "page": answer(b"<html><img src='http://127.0.0.1/'></html>", Content_Type="image/png"),
    "missing": answer(b"no", "404 Not Found"),
    "unauthorized": answer(b"", "401 Unauthorized", WWW_Authenticate="Basic"),
    "busy": answer(b"", "503 Service Unavailable", Retry_After="99999999999999999999"),
    "nowhere": answer(b"", "302 Found"),
    "loop": answer(b"", "302 Found", Location="loop"),
    "long-loop": answer(b"", "302 Found", Location="loop?" + "../" * 20_000),
    "to-chunks": answer(b"", "302 Found", Location="/one-byte-chunks/1"),
}
"""Answers by the name in the path: ``/NAME`` or ``/NAME/NUMBER``."""


class Hosts:
    """The hostile host and the private host, on the same port: ``async with Hosts()``.

    ``led`` lists the requests to the private host.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self.led: list[str] = []
        self.num_open = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Hosts":
        self._servers = [
            await asyncio.start_server(self._serve, PUBLIC, self.port),
            await asyncio.start_server(self._lead, PRIVATE, self.port),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _lead(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(1.0):
                head = await reader.read(500)
        self.led.append(repr(head))
        writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_open += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            given = self._answer(head.split(b" ", 2)[1].decode("ascii", "replace"))
            if isinstance(given, bytes):
                writer.write(given)
                await writer.drain()
            else:
                await _until_gone(reader, asyncio.ensure_future(given(writer)))
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # the client has disconnected, or the host ends
        finally:
            self.num_open -= 1
            self._tasks.discard(task)
            writer.close()

    def _answer(self, path: str) -> Answer:
        name, _, number = path.strip("/").partition("/")
        if name == GOOD:
            return answer(IMAGES[int(number) % len(IMAGES)])
        if name == GOOD_SOUND:
            return answer(SOUNDS[int(number) % len(SOUNDS)])
        if name == "redirect":
            target = REDIRECTS[int(number) % len(REDIRECTS)].format(port=self.port)
            return f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode()
        return ANSWERS.get(name, answer(status="404 Not Found"))

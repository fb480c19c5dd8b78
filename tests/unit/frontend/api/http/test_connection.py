"""Parsing of a connection of the HTTP listener, without a network."""

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from penstock_frontend.api.http.connection import HttpConnection, connection_class
from penstock_frontend.api.http.request_parsing import BYTES_PER_TURN, EVENTS_PER_TURN
from penstock_frontend.config import HttpConfig

CHUNKED = b"POST /x HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
GET = b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n"


class Transport(asyncio.Transport):
    """Keeps the written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reads = True
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return False


Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


async def read_all(_: Scope, receive: Receive, send: Send) -> None:
    """Read the body, and answer with its length."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    await answer(send, str(size).encode())


async def answer(send: Send, body: bytes, status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


class Listener:
    """Makes connections of one listener. ``events`` counts the parser's events in this turn of the loop."""

    def __init__(self, app: Handler, **settings: Any) -> None:
        self._class = connection_class(HttpConfig(**settings))
        self._config = uvicorn.Config(app, lifespan="off", http=self._class, ws="none", log_config=None)
        self._state = ServerState()

    @property
    def turns(self) -> Any:
        return self._class.turns

    def connect(self) -> tuple[HttpConnection, Transport]:
        connection, transport = self._class(self._config, self._state, {}), Transport()
        connection.connection_made(transport)
        return connection, transport


def _ends_with(transport: Transport, end: bytes) -> bool:
    return transport.written.endswith(end)


async def until(condition: Callable[[], object]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come")


async def test_many_small_chunks_of_many_connections_are_spread_over_turns() -> None:
    listener = Listener(read_all)
    connections = [listener.connect() for _ in range(8)]
    for connection, _ in connections:
        connection.data_received(CHUNKED + b"1\r\n \r\n" * 40_000)
    most = 0
    while any(not transport.written for _, transport in connections):
        most = max(most, listener.turns._events)
        assert listener.turns._bytes <= BYTES_PER_TURN + 4096
        await asyncio.sleep(0)
    assert 0 < most <= EVENTS_PER_TURN + 4096
    assert all(b'"code":"chunks_too_small"' in transport.written for _, transport in connections)


async def test_nothing_is_read_while_bytes_wait_to_be_parsed() -> None:
    connection, transport = Listener(read_all).connect()
    connection.data_received(b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 600000\r\n\r\n" + b"x" * 500_000)
    assert not transport.reads
    await until(lambda: transport.reads)
    connection.data_received(b"x" * 100_000)
    await until(lambda: transport.written.endswith(b"600000"))


async def test_nothing_is_parsed_while_a_pipelined_request_waits() -> None:
    go_on = asyncio.Event()
    served: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        served.append(scope["path"])
        await receive()
        gone: asyncio.Task[Message] = asyncio.create_task(receive())  # type: ignore[arg-type]  # as handlers do, to hear of clients that leave
        await go_on.wait()
        gone.cancel()
        await answer(send, b"ok")

    connection, transport = Listener(app).connect()
    connection.data_received(GET * 20_000)
    await until(lambda: served)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(connection.pipeline) <= 4096 // len(GET) + 1
    assert not transport.reads
    go_on.set()
    await until(lambda: len(served) > 1000)
    transport.close()


async def test_trailers_do_not_become_headers() -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        seen.append(list(scope["headers"]))
        await answer(send, b"ok")

    connection, transport = Listener(app).connect()
    connection.data_received(CHUNKED)
    await asyncio.sleep(0)
    connection.data_received(b"2\r\nab\r\n0\r\nauthorization: Bearer stolen\r\n\r\n")
    await until(lambda: transport.written)
    assert dict(seen[0]) == {b"host": b"x", b"transfer-encoding": b"chunked"}


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (b"GET /x HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 200, 431, "too_many_headers"),
        (b"GET /x HTTP/1.1\r\nhost: x\r\na: " + b"b" * 70_000, 431, "headers_too_large"),
        (b"GET /" + b"x" * 70_000, 431, "headers_too_large"),
        (b"GET /x HTTP/1.1\r\na: b\r\n\r\n", 400, "host_header"),
        (b"GET /x HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", 400, "host_header"),
        (b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400, "bad_request"),
        (b"GET /x HTTP/1.1\nhost: x\n\n", 400, "bad_request"),
        (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", 400, "bad_request"),
        (b"GET \xff HTTP/1.1\r\nhost: x\r\n\r\n", 400, "bad_request"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "bad_request"),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, "bad_request"),
    ],
)
async def test_bytes_that_are_no_request_are_refused(request_bytes: bytes, status: int, code: str) -> None:
    connection, transport = Listener(read_all).connect()
    connection.data_received(request_bytes)
    await until(lambda: transport.written)
    assert transport.written.startswith(b"HTTP/1.1 %d " % status)
    assert b'"code":"%b"' % code.encode() in transport.written
    assert b"connection: close" in transport.written


async def test_headers_are_limited_however_slowly_they_come() -> None:
    connection, transport = Listener(read_all, max_header_bytes=1024).connect()
    connection.data_received(b"GET /x HTTP/1.1\r\nhost: x\r\na: ")
    for _ in range(1024):
        if transport.written:
            break
        connection.data_received(b"b")
    assert b"http.max_header_bytes is 1024" in transport.written


async def test_a_malformed_request_behind_another_one_is_refused_after_its_answer() -> None:
    connection, transport = Listener(read_all).connect()
    connection.data_received(GET + b"nonsense\r\n\r\n")
    await until(lambda: b"400" in transport.written)
    assert re.findall(rb"HTTP/1\.1 (\d+)", transport.written) == [b"200", b"400"]


async def test_the_rest_of_a_refused_body_is_not_parsed() -> None:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        await answer(send, b"no", 404)

    for head in (CHUNKED, b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\n"):
        listener = Listener(app)
        connection, transport = listener.connect()
        connection.data_received(head)
        await until(functools.partial(_ends_with, transport, b"no"))
        assert b"connection: close" in transport.written
        assert not transport.closed, "the client could not read the answer"
        connection.data_received(b"1\r\n \r\n" * 40_000)
        assert listener.turns._bytes == 0
        transport.close()


async def test_the_rest_of_a_small_body_is_read_and_the_connection_kept() -> None:
    async def app(scope: Scope, _: Receive, send: Send) -> None:
        await answer(send, scope["path"].encode(), 404)

    connection, transport = Listener(app).connect()
    connection.data_received(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n12")
    await until(lambda: transport.written.endswith(b"/a"))
    connection.data_received(b"345" + GET)
    await until(lambda: transport.written.endswith(b"/x"))
    assert b"close" not in transport.written


async def test_a_body_that_was_not_asked_for_may_never_come() -> None:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        await answer(send, b"no", 401)

    connection, transport = Listener(app).connect()
    connection.data_received(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\nexpect: 100-continue\r\n\r\n")
    await until(lambda: transport.written.endswith(b"no"))
    assert b"connection: close" in transport.written


async def test_a_request_that_asks_for_http_2_is_served_and_so_is_the_next() -> None:
    upgrade = b"upgrade: h2c\r\nconnection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    connection, transport = Listener(read_all).connect()
    for framing, body in (
        (b"content-length: 3", b"abc"),
        (b"transfer-encoding: chunked", b"3\r\nabc\r\n0\r\n\r\n"),
        (b"a: b", b""),
    ):
        transport.written = b""
        connection.data_received(
            b"POST /x HTTP/1.1\r\nhost: x\r\n" + framing + b"\r\n" + upgrade + b"\r\n" + body + GET
        )
        await until(lambda: transport.written.count(b"HTTP/1.1 200") == 2)
        sizes = re.findall(rb"\r\n\r\n(\d)", transport.written)
        assert sizes == [b"3" if body else b"0", b"0"]


async def test_an_answer_without_a_length_ends_with_the_connection_for_http_1_0() -> None:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"a", b"b"):
            message: Message = {"type": "http.response.body", "body": piece, "more_body": True}
            await send(message)
        await send({"type": "http.response.body", "body": b""})

    connection, transport = Listener(app).connect()
    connection.data_received(b"GET /x HTTP/1.0\r\n\r\n")
    await until(lambda: transport.closed)
    head, body = transport.written.split(b"\r\n\r\n", 1)
    assert b"transfer-encoding" not in head
    assert body == b"ab"


async def test_the_handler_of_a_refused_body_is_told_that_its_client_has_gone() -> None:
    told: list[Message] = []

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        while not told or told[-1]["type"] != "http.disconnect":
            told.append(await receive())
        await answer(send, b"never")

    connection, transport = Listener(app).connect()
    connection.data_received(CHUNKED + b"1\r\n \r\n" * 40_000)
    await until(lambda: told and told[-1]["type"] == "http.disconnect")
    await until(lambda: b"chunks_too_small" in transport.written)
    assert b"never" not in transport.written


async def test_every_handler_of_a_connection_is_told_when_it_is_gone() -> None:
    told: list[str] = []

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        while message["type"] != "http.disconnect":
            message = await receive()
        told.append("gone")
        await answer(send, b"never")

    connection, transport = Listener(app).connect()
    connection.data_received(GET + GET + GET[:10])
    await until(lambda: connection._answering)
    await asyncio.sleep(0)
    transport.closed = True
    connection.connection_lost(None)
    await until(lambda: told)
    assert transport.written == b"", "a transport that is closed takes nothing"

"""Lifetime of HTTP connections, and how the listener closes them."""

import asyncio
import contextlib
import http.client
from collections.abc import AsyncIterator
from pathlib import Path

from penstock_frontend.config import HttpConfig
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.frontend_server import FrontendServer, eventually
from tests.fakes.patience import PATIENCE


@contextlib.asynccontextmanager
async def serving(model: Path, engine: FakeEngine, *, age: float) -> AsyncIterator[FrontendServer]:
    listener = HttpConfig(host="127.0.0.1", port=0, max_connection_age=age)
    async with FrontendServer(model, engines=[engine.address], http=listener, drain_timeout=PATIENCE) as frontend:
        await frontend.until_health(serving=True)
        yield frontend


class Connection:
    """A client with one connection, which is never reopened."""

    def __init__(self, port: int) -> None:
        self._client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        self._client.connect()
        self._client.auto_open = 0

    async def get(self, path: str = "/v1/models") -> tuple[int, str | None]:
        """Return the status and the ``Connection`` header of the answer."""

        def ask() -> tuple[int, str | None]:
            self._client.request("GET", path)
            response = self._client.getresponse()
            response.read()
            return response.status, response.headers["connection"]

        return await asyncio.to_thread(ask)

    def close(self) -> None:
        self._client.close()


async def test_an_old_connection_ends_with_its_next_answer(model: Path, engine: FakeEngine) -> None:
    async with serving(model, engine, age=0.1) as frontend:
        connection = Connection(frontend.frontend.http_port)
        await asyncio.sleep(0.2)  # longer than the maximum age of the connection
        assert await connection.get() == (200, "close")
        await eventually(lambda: not frontend.frontend._servers.http.num_left)
        connection.close()


async def test_a_young_connection_is_kept(model: Path, engine: FakeEngine) -> None:
    for age in (3600.0, 0.0):
        async with serving(model, engine, age=age) as frontend:
            connection = Connection(frontend.frontend.http_port)
            for _ in range(3):
                assert await connection.get() == (200, None)
            connection.close()


async def test_an_idle_connection_of_a_frontend_that_drains_gets_one_more_answer(
    model: Path, engine: FakeEngine
) -> None:
    async with serving(model, engine, age=3600.0) as frontend:
        connections = [Connection(frontend.frontend.http_port) for _ in range(2)]
        for connection in connections:
            assert await connection.get() == (200, None)
        frontend.frontend.stop()
        await eventually(lambda: not frontend.frontend._readiness.ready)
        assert await connections[0].get() == (200, "close")
        late = Connection(frontend.frontend.http_port)
        assert await late.get() == (200, "close")
        assert not frontend.running.done()
        assert await connections[1].get("/health") == (503, "close")
        await frontend.running
        for connection in (*connections, late):
            connection.close()


async def test_an_answer_that_has_begun_is_read_to_its_end(model: Path, manual: FakeEngine) -> None:
    async with serving(model, manual, age=3600.0) as frontend:
        reader, writer = await asyncio.open_connection("127.0.0.1", frontend.frontend.http_port)
        body = b'{"model": "model", "prompt": "hi", "max_tokens": 2, "seed": 10, "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        await manual.until(lambda e: e.running)
        manual.step()
        assert b"connection: close" not in await reader.readuntil(b"\r\n\r\n")
        frontend.frontend.stop()
        await eventually(lambda: not frontend.frontend._readiness.ready)
        manual.step()
        assert b"data: [DONE]" in await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"connection: close" in await reader.read()
        writer.close()
        await frontend.running


async def test_connections_that_may_last_do_not_hold_up_the_end(model: Path, engine: FakeEngine) -> None:
    async with serving(model, engine, age=0.0) as frontend:
        connection = Connection(frontend.frontend.http_port)
        assert await connection.get() == (200, None)
        frontend.frontend.stop()
        await frontend.running
        connection.close()

"""Clients that stall during their headers or bodies, and bodies whose total size is too large.

Other clients are unaffected.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from penstock_frontend.api.http import server as http
from tests.fakes.engines.fake_engine import FakeEngine
from tests.fakes.frontends.openai_server import OpenAIServer, openai_server
from tests.fakes.patience import PATIENCE

POST = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    error: dict[str, Any]


class Client:
    """A connection that sends given bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, text: str) -> None:
        self.writer.write(text.encode())
        await self.writer.drain()

    async def announce(self, size: int) -> None:
        """Send the headers of a request with a body of ``size`` bytes. Returns when the server waits for the body."""
        await self.send(f"{POST}content-length: {size}\r\nexpect: 100-continue\r\n\r\n")
        async with asyncio.timeout(PATIENCE):
            assert b"100 Continue" in await self.reader.readuntil(b"\r\n\r\n")

    async def answer(self) -> Answer:
        """Read the next answer."""
        async with asyncio.timeout(PATIENCE):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
            body = await self.reader.readexactly(int(headers["content-length"]))
        return Answer(int(head[0].split()[1]), headers, msgspec.json.decode(body).get("error", {}))

    async def closed(self) -> None:
        """Wait until the server has closed the connection."""
        async with asyncio.timeout(PATIENCE):
            await self.reader.read()


@asynccontextmanager
async def clients(api: OpenAIServer, count: int) -> AsyncIterator[list[Client]]:
    """Yield ``count`` connections to the server."""
    opened = [Client(*await asyncio.open_connection("127.0.0.1", api.port)) for _ in range(count)]
    try:
        yield opened
    finally:
        for client in opened:
            client.writer.close()


async def complete(api: OpenAIServer) -> int:
    """Return the status of a valid call."""
    response = await api.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
    return response.status_code


async def test_stalled_headers_and_bodies_block_no_other_client(engine: FakeEngine, model: Path) -> None:
    limits = {"max_requests": 20, "header_timeout": 600.0, "body_timeout": 600.0}
    async with openai_server(model, engines=[engine.address], http=limits) as api, clients(api, 40) as stalled:
        for client in stalled[:20]:
            await client.announce(1000)
            await client.send('{"prompt"')
        for client in stalled[20:]:
            await client.send(f"{POST}content-le")
        assert await complete(api) == 200


async def test_where_too_many_bodies_are_read_the_oldest_gives_way(engine: FakeEngine, model: Path) -> None:
    async with (
        openai_server(model, engines=[engine.address], http={"max_requests": 2}) as api,
        clients(api, 3) as stalled,
    ):
        for client in stalled:
            await client.announce(1000)
        answer = await stalled[0].answer()
    assert answer.status == 429
    assert answer.error["message"] == "2 HTTP bodies are being read; http.max_requests is 2"
    assert int(answer.headers["retry-after"]) >= 1


async def test_where_bodies_are_too_large_together_the_largest_gives_way(engine: FakeEngine, model: Path) -> None:
    limits = {"max_body_bytes": 1000, "max_body_bytes_in_flight": 2000}
    async with openai_server(model, engines=[engine.address], http=limits) as api, clients(api, 3) as stalled:
        for client, size in zip(stalled, (700, 900, 600), strict=True):
            await client.announce(1000)
            await client.send("x" * size)
        answer = await stalled[1].answer()
        assert await complete(api) == 200
    assert answer.status == 429
    assert answer.error["message"].endswith("bytes would be in memory; http.max_body_bytes_in_flight is 2000")
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_body_counts_no_more_when_its_call_is_admitted(manual: FakeEngine, model: Path) -> None:
    limits = {"max_body_bytes": 1000, "max_body_bytes_in_flight": 1000}
    body = {"prompt": "hello", "max_tokens": 1, "user": "x" * 800}
    async with openai_server(model, engines=[manual.address], http=limits) as api:
        calls = []
        for count in (1, 2, 3):
            calls.append(asyncio.create_task(api.http.post("/v1/completions", json=body)))
            await manual.until(lambda engine, count=count: len(engine.requests) == count)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_a_body_that_is_too_slow_is_told_so(engine: FakeEngine, model: Path) -> None:
    async with (
        openai_server(model, engines=[engine.address], http={"body_timeout": 0.2}) as api,
        clients(api, 1) as [client],
    ):
        await client.announce(1000)
        await client.send("12345")
        answer = await client.answer()
    assert (answer.status, answer.error["type"], answer.error["code"]) == (408, "timeout_error", "body_timeout")
    message = "the body was not complete after 0.2 s: only 5 bytes had arrived; http.body_timeout is 0.2"
    assert answer.error["message"] == message


@pytest.mark.parametrize("served_before", [False, True])
async def test_headers_that_are_too_slow_end_the_connection(
    engine: FakeEngine, model: Path, served_before: bool
) -> None:
    async with (
        openai_server(model, engines=[engine.address], http={"header_timeout": 0.2}) as api,
        clients(api, 1) as [client],
    ):
        if served_before:
            await client.send("GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await client.answer()).status == 200
        await client.send(POST)
        answer = await client.answer()
        await client.closed()
    assert (answer.status, answer.error["code"]) == (408, "header_timeout")
    assert answer.error["message"] == "the headers were not complete after 0.2 s; http.header_timeout is 0.2"


async def test_a_request_may_take_longer_than_its_headers(manual: FakeEngine, model: Path) -> None:
    async with (
        openai_server(model, engines=[manual.address], http={"header_timeout": 0.05, "body_timeout": 0.05}) as api,
        clients(api, 2) as [slow, late],
    ):
        body = '{"prompt": "hello", "max_tokens": 1}'
        await slow.send(f"{POST}content-length: {len(body)}\r\n\r\n{body}")
        await manual.until(lambda engine: engine.requests)
        await late.send(POST)
        assert (await late.answer()).status == 408, "the time has passed"
        manual.step()
        assert (await slow.answer()).status == 200


async def test_an_abandoned_body_ends_the_connection(engine: FakeEngine, model: Path) -> None:
    async with (
        openai_server(model, engines=[engine.address], http={"header_timeout": 0.2}) as api,
        clients(api, 1) as [client],
    ):
        await client.send("POST /v1/nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n")
        assert (await client.answer()).status == 404
        await client.send("x")
        await client.closed()


async def test_a_connection_that_never_says_anything_is_closed(
    engine: FakeEngine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_KEEP_ALIVE", 0.2)
    async with openai_server(model, engines=[engine.address]) as api, clients(api, 1) as [client]:
        await client.closed()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": list(range(200))}, "the body has more than 50 JSON values; http.max_body_values is 50"),
        (
            {"prompt": "x", "chat_template_kwargs": [{}] * 21},
            "the body has more than 20 JSON objects; http.max_body_objects is 20",
        ),
    ],
)
async def test_a_body_with_too_much_to_decode_is_refused(
    engine: FakeEngine, model: Path, body: dict[str, Any], message: str
) -> None:
    limits = {"max_body_values": 50, "max_body_objects": 20}
    async with openai_server(model, engines=[engine.address], http=limits) as api:
        response = await api.http.post("/v1/completions", json=body)
        assert (response.status_code, response.json()["error"]["message"]) == (400, message)
        response = await api.http.post("/v1/completions", json={"prompt": '{,"[' * 25, "max_tokens": 1})
        assert response.status_code == 200

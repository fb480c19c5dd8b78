"""Streamed answers whose pieces are written directly to the connection: the bytes on the wire are valid HTTP."""

import asyncio
import json
from typing import Any

from penstock_frontend.api.http.streaming import Pieces
from tests.fakes.frontends.openai_server import OpenAIServer

BODY = json.dumps({"prompt": "x", "stream": True, "max_tokens": 3}).encode()


async def exchange(api: OpenAIServer, *requests: str) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
    """Send requests with these heads and the same body.

    Returns the head of the first answer, and the open connection.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    for head in requests:
        writer.write(f"{head}\r\nhost: localhost\r\ncontent-length: {len(BODY)}\r\n\r\n".encode() + BODY)
    async with asyncio.timeout(20):
        return await reader.readuntil(b"\r\n\r\n"), reader, writer


async def chunks(reader: asyncio.StreamReader) -> list[bytes]:
    """Read the chunks of one body. The result leaves out the empty last chunk."""
    found = []
    async with asyncio.timeout(20):
        while size := int(await reader.readline(), 16):
            found.append(await reader.readexactly(size))
            assert await reader.readline() == b"\r\n"
        assert await reader.readline() == b"\r\n"
    return found


async def test_every_event_is_a_chunk_of_its_own(api: OpenAIServer) -> None:
    head, reader, writer = await exchange(api, "POST /v1/completions HTTP/1.1")
    assert b"transfer-encoding: chunked" in head.lower()
    *events, done = await chunks(reader)
    assert done == b"data: [DONE]\n\n"
    assert [len(json.loads(event.removeprefix(b"data: "))["choices"]) for event in events] == [1] * len(events)
    writer.close()


async def test_the_next_request_of_the_connection_is_served(api: OpenAIServer) -> None:
    request = "POST /v1/completions HTTP/1.1"
    _, reader, writer = await exchange(api, request, request)
    first = await chunks(reader)
    async with asyncio.timeout(20):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert (first[-1], (await chunks(reader))[-1]) == (b"data: [DONE]\n\n", b"data: [DONE]\n\n")
    writer.close()


async def test_a_client_of_http_1_0_gets_no_chunks(api: OpenAIServer) -> None:
    head, reader, writer = await exchange(api, "POST /v1/completions HTTP/1.0")
    assert b"transfer-encoding" not in head.lower()
    async with asyncio.timeout(20):
        body = await reader.read()
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")
    writer.close()


class _Cycle:
    """A fake of uvicorn's request cycle, to which pieces are written."""

    class Flow:
        def __init__(self) -> None:
            self.write_paused = True
            self.room = asyncio.Event()

        async def drain(self) -> None:
            await self.room.wait()

    def __init__(self) -> None:
        self.flow = self.Flow()
        self.disconnected = False
        self.written: list[bytes] = []
        self.transport = self

    def write(self, data: bytes) -> None:
        self.written.append(data)


async def test_a_piece_waits_until_the_connection_takes_it() -> None:
    cycle: Any = _Cycle()
    writing = asyncio.create_task(Pieces(cycle).write(b"0123456789"))
    await asyncio.sleep(0)
    assert cycle.written == []
    cycle.flow.room.set()
    await writing
    assert cycle.written == [b"a\r\n0123456789\r\n"]


async def test_a_piece_for_a_client_that_has_gone_is_dropped() -> None:
    cycle: Any = _Cycle()
    cycle.flow.write_paused, cycle.disconnected = False, True
    await Pieces(cycle).write(b"x")
    assert cycle.written == []

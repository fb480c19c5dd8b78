"""Server-sent events: how an answer is streamed."""

import functools
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

import msgspec
from starlette.types import Scope, Send

from penstock_frontend.api.http.pieces import PIECES, Pieces
from penstock_frontend.api.openai import errors
from penstock_frontend.api.openai.http_send import send_head

DONE = b"data: [DONE]\n\n"
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_ENCODER = msgspec.json.Encoder()


class EventStream:
    """An answer that is streamed, chunk by chunk. Its first chunk is there: what fails before it becomes a status.

    An event is written when the client's connection takes it. Until then no chunk is asked for, and what the engine
    produces meanwhile gathers in the request's collector: a slow client gets fewer, larger chunks.
    """

    def __init__(self, first: bytes, rest: AsyncGenerator[msgspec.Struct, None]) -> None:
        """``first``: the event of the first chunk."""
        self._first = first
        self._rest = rest

    @classmethod
    async def started(cls, chunks: AsyncGenerator[msgspec.Struct, None]) -> "EventStream":
        """Wait for the first of ``chunks``. Raises what it fails with."""
        try:
            return cls(_event(await anext(chunks)), chunks)
        except BaseException:
            await chunks.aclose()  # the work behind it has ended, or ends now
            raise

    async def write(self, scope: Scope, send: Send, headers: Mapping[str, str]) -> None:
        """Send everything, ``[DONE]`` last, also behind an error. However this ends, the work behind the chunks ends."""
        pieces: Pieces | None = scope.get("extensions", {}).get(PIECES)
        write = pieces.write if pieces is not None else functools.partial(_send, send)
        async with aclosing(self._rest) as rest:
            await send_head(send, 200, {**_HEADERS, **headers})
            await write(self._first)
            try:
                async for chunk in rest:
                    await write(_event(chunk))
            except Exception as e:  # the status is sent: all that is left is an event
                await write(b"data: %b\n\n" % errors.answer(e, headers.get("x-request-id", "")).body)
            await write(DONE)
            await send({"type": "http.response.body", "body": b""})


def _event(chunk: msgspec.Struct) -> bytes:
    """JSON has no raw line breaks, so it is one line."""
    return b"data: %b\n\n" % _ENCODER.encode(chunk)


async def _send(send: Send, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": True})

"""Sending of HTTP answers: whole as ASGI messages, or streamed as server-sent events."""

import functools
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

import msgspec
from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from penstock_frontend.api.openai import errors


async def send_head(send: Send, status: int, headers: Mapping[str, str]) -> None:
    """The status line and the headers."""
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})


async def send_json(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """A whole answer."""
    length = {"content-type": "application/json", "content-length": str(len(body))}
    await send_head(send, status, {**length, **headers})
    await send({"type": "http.response.body", "body": body})


PIECES = "penstock.pieces"
"""The ASGI extension under which a request's scope has its ``Pieces``, where it has them."""


class Pieces:
    """Writes pieces of a streamed body straight to the connection: on its way through the application, and through uvicorn, a
    piece of a few bytes takes longer than everything else that is done for it.

    The answer's head must be sent, without a length, and its end is sent as always: between them uvicorn has nothing to know.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    async def write(self, data: bytes) -> None:
        """Write one piece, which must not be empty, when the connection takes it; into the void when the client has gone."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


DONE = b"data: [DONE]\n\n"
"""The last event of a stream of OpenAI's first protocols."""
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_ENCODER = msgspec.json.Encoder()


class StreamForm(msgspec.Struct, frozen=True):
    """How a protocol writes events. ``failure``: the event for what an error is told with, which comes when the status is sent;
    ``end``: what comes last.
    """

    event: Callable[[msgspec.Struct], bytes]
    failure: Callable[[Exception, str], bytes]
    end: bytes = b""


class EventStream:
    """An answer that is streamed, chunk by chunk. Its first chunk is there: what fails before it becomes a status.

    An event is written when the client's connection takes it. Until then no chunk is asked for, and what the engine
    produces meanwhile gathers in the request's collector: a slow client gets fewer, larger chunks.
    """

    def __init__(self, first: bytes, rest: AsyncGenerator[msgspec.Struct, None], form: StreamForm) -> None:
        """``first``: the event of the first chunk."""
        self._first = first
        self._rest = rest
        self._form = form

    @classmethod
    async def started(
        cls, chunks: AsyncGenerator[msgspec.Struct, None], form: StreamForm | None = None
    ) -> "EventStream":
        """Wait for the first of ``chunks``. ``form``: that of completions if it is not given. Raises what it fails with."""
        form = form or CHUNKS
        try:
            return cls(form.event(await anext(chunks)), chunks, form)
        except BaseException:
            await chunks.aclose()  # the work behind it has ended, or ends now
            raise

    async def write(self, scope: Scope, send: Send, headers: Mapping[str, str]) -> None:
        """Send everything, the form's end last, also behind an error. However this ends, the work behind the chunks ends."""
        event = self._form.event
        pieces: Pieces | None = scope.get("extensions", {}).get(PIECES)
        write = pieces.write if pieces is not None else functools.partial(_send, send)
        async with aclosing(self._rest) as rest:
            await send_head(send, 200, {**_HEADERS, **headers})
            await write(self._first)
            try:
                async for chunk in rest:
                    await write(event(chunk))
            except Exception as e:  # the status is sent: all that is left is an event
                await write(self._form.failure(e, headers.get("x-request-id", "")))
            if self._form.end:
                await write(self._form.end)
            await send({"type": "http.response.body", "body": b""})


def _event(chunk: msgspec.Struct) -> bytes:
    """JSON has no raw line breaks, so it is one line."""
    return b"data: %b\n\n" % _ENCODER.encode(chunk)


def _failure(error: Exception, request_id: str) -> bytes:
    return b"data: %b\n\n" % errors.answer(error, request_id).body


def named(chunk: msgspec.Struct) -> bytes:
    """An event that is named after the ``type`` of its chunk."""
    kind: str = chunk.type  # type: ignore[attr-defined]
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _ENCODER.encode(chunk))


CHUNKS = StreamForm(_event, _failure, DONE)
"""Of completions: events without names."""


async def _send(send: Send, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": True})

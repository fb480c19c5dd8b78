"""Sending of HTTP answers, either complete or as server-sent events."""

import functools
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

import msgspec
from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from penstock_frontend.api.openai import errors


async def send_head(send: Send, status: int, headers: Mapping[str, str]) -> None:
    """Send the status line and the headers."""
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})


async def send_json(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """Send a complete answer."""
    length = {"content-type": "application/json", "content-length": str(len(body))}
    await send_head(send, status, {**length, **headers})
    await send({"type": "http.response.body", "body": body})


PIECES = "penstock.pieces"
"""Name of the ASGI extension that contains a request's ``Pieces``, if the server supports them."""


class Pieces:
    """Writes pieces of a streamed body directly to the connection.

    For a piece of a few bytes, sending it through the application and uvicorn would cost more than all other work. The
    caller sends the answer's head before, without a content length. The caller sends the end of the answer through
    uvicorn as usual. uvicorn does not need the pieces between head and end.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    async def write(self, data: bytes) -> None:
        """Write one piece when the connection accepts data. The piece must not be empty. If the client has
        disconnected, the piece is dropped.
        """
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


DONE = b"data: [DONE]\n\n"
"""Last event of a stream in the OpenAI completion protocols."""
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_ENCODER = msgspec.json.Encoder()


class StreamForm(msgspec.Struct, frozen=True):
    """Event format of a protocol.

    Attributes:
        event: returns the event of a chunk.
        failure: returns the event for an error that occurs after the status was sent, given the error and the request
            id.
        end: last event of the stream.
    """

    event: Callable[[msgspec.Struct], bytes]
    failure: Callable[[Exception, str], bytes]
    end: bytes = b""


class EventStream:
    """An answer that is streamed as chunks.

    The answer starts only when the first chunk is available, so that errors before it become an HTTP status. The stream
    writes an event when the client's connection accepts data. Until then the stream requests no further chunk, and the
    request's collector merges new output. So a slow client gets fewer and larger chunks.
    """

    def __init__(self, first: bytes, rest: AsyncGenerator[msgspec.Struct, None], form: StreamForm) -> None:
        """Create the stream. ``first`` is the event of the first chunk."""
        self._first = first
        self._rest = rest
        self._form = form

    @classmethod
    async def started(
        cls, chunks: AsyncGenerator[msgspec.Struct, None], form: StreamForm | None = None
    ) -> "EventStream":
        """Wait for the first of ``chunks``, and return the stream. The default ``form`` is that of completions.

        Raises the error that occurs before the first chunk.
        """
        form = form or CHUNKS
        try:
            return cls(form.event(await anext(chunks)), chunks, form)
        except BaseException:
            await chunks.aclose()  # this ends the request that produces the chunks
            raise

    async def write(self, scope: Scope, send: Send, headers: Mapping[str, str]) -> None:
        """Send all chunks, then the last event of the form, even after an error. The request that produces the chunks
        always ends.
        """
        event = self._form.event
        pieces: Pieces | None = scope.get("extensions", {}).get(PIECES)
        write = pieces.write if pieces is not None else functools.partial(_send, send)
        async with aclosing(self._rest) as rest:
            await send_head(send, 200, {**_HEADERS, **headers})
            await write(self._first)
            try:
                async for chunk in rest:
                    await write(event(chunk))
            except Exception as e:  # the status was already sent, so send the error as an event
                await write(self._form.failure(e, headers.get("x-request-id", "")))
            if self._form.end:
                await write(self._form.end)
            await send({"type": "http.response.body", "body": b""})


def _event(chunk: msgspec.Struct) -> bytes:
    """Return the event of a chunk. The event is one line, because JSON has no raw line breaks."""
    return b"data: %b\n\n" % _ENCODER.encode(chunk)


def _failure(error: Exception, request_id: str) -> bytes:
    return b"data: %b\n\n" % errors.answer(error, request_id).body


def named(chunk: msgspec.Struct) -> bytes:
    """Return the event of a chunk. The event's name is the ``type`` of the chunk."""
    kind: str = chunk.type  # type: ignore[attr-defined]
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _ENCODER.encode(chunk))


CHUNKS = StreamForm(_event, _failure, DONE)
"""Event format of completions: events without names."""


async def _send(send: Send, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": True})

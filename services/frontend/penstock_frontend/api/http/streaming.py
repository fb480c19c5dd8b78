"""Sending of HTTP answers, either complete or as server-sent events."""

import functools
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

import msgspec
from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from penstock_frontend.api.openai import errors


async def send_head(send: Send, status: int, headers: Mapping[str, str]) -> None:
    """Send the status line and the headers of an answer."""
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})


async def send_json(send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """Send a complete answer as JSON."""
    length = {"content-type": "application/json", "content-length": str(len(body))}
    await send_head(send, status, {**length, **headers})
    await send({"type": "http.response.body", "body": body})


PIECES = "penstock.pieces"
"""Name of the ASGI extension that contains the ``Pieces`` of a request, if the server supports them."""


class Pieces:
    """Writes the pieces of a streamed body directly to the connection of the client.

    Sending a piece of a few bytes through the application and uvicorn would take more time than all other work on it.
    Before the first piece, the caller must send the head of the answer, without a content length. After the last piece,
    the caller ends the answer through uvicorn as usual. uvicorn need not see the pieces between the head and the end.
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
"""Last event of a stream in OpenAI's completion protocols."""
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_ENCODER = msgspec.json.Encoder()


class StreamForm(msgspec.Struct, frozen=True):
    """Format of the events in a stream, in one protocol.

    Attributes:
        event: returns the event of a chunk.
        failure: returns the event for an error that occurs after the status was sent. Its arguments are the error and
            the request id.
        end: last event of the stream.
    """

    event: Callable[[msgspec.Struct], bytes]
    failure: Callable[[Exception, str], bytes]
    end: bytes = b""


class EventStream:
    """An answer that is streamed in chunks.

    The answer starts only when the first chunk is available, so that errors before it become an HTTP status. The stream
    writes an event when the client's connection accepts data. Until then, the stream asks for no further chunk, and new
    output of the request is merged. A slow client therefore gets fewer and larger chunks.
    """

    def __init__(self, first: bytes, rest: AsyncGenerator[msgspec.Struct, None], form: StreamForm) -> None:
        """Create the stream of an answer. ``first`` is the event with the first chunk."""
        self._first = first
        self._rest = rest
        self._form = form

    @classmethod
    async def started(
        cls, chunks: AsyncGenerator[msgspec.Struct, None], form: StreamForm | None = None
    ) -> "EventStream":
        """Wait for the first of ``chunks``, and return the stream. By default, ``form`` is the format of completions.

        If an error occurs before the first chunk, this method raises the error.
        """
        form = form or CHUNKS
        try:
            return cls(form.event(await anext(chunks)), chunks, form)
        except BaseException:
            await chunks.aclose()  # closing the chunks ends the request that produces them
            raise

    async def write(self, scope: Scope, send: Send, headers: Mapping[str, str]) -> None:
        """Send all chunks, then the last event of the format, even after an error. The request that produces the chunks
        ends in every case.
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


def data_event(chunk: msgspec.Struct) -> bytes:
    """Return the event with a chunk. The event is one line, because JSON contains no line breaks outside of escapes."""
    return b"data: %b\n\n" % _ENCODER.encode(chunk)


def data_failure(error: Exception, request_id: str) -> bytes:
    """Return the event with an error."""
    return b"data: %b\n\n" % errors.answer(error, request_id).body


def named(chunk: msgspec.Struct) -> bytes:
    """Return the event with a chunk. The name of the event is the field ``type`` of the chunk."""
    kind: str = chunk.type  # type: ignore[attr-defined]
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _ENCODER.encode(chunk))


CHUNKS = StreamForm(data_event, data_failure, DONE)
"""Event format of completions: events without names."""


async def _send(send: Send, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": True})

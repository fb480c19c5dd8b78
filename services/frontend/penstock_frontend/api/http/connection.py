"""A connection of the HTTP listener: what a client may send, how long it may take, and when the connection ends."""

import asyncio
import math
import random
from http import HTTPStatus
from typing import Any, Protocol

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from penstock_frontend.api.http.request_parsing import (
    SLICE,
    DiscardingTurns,
    ParsingTurns,
    RequestLimits,
    RequestParsing,
)
from penstock_frontend.api.http.streaming import PIECES, Pieces
from penstock_frontend.api.openai.errors import HttpError, answer
from penstock_frontend.config import HttpConfig

# The answer to one HTTP request, on its way to the connection.


class AnsweredConnection(Protocol):
    """The connection that an answer is sent on."""

    @property
    def is_old(self) -> bool:
        """Whether the connection ends with its next answer."""
        ...

    def leaves_rest(self, cycle: RequestResponseCycle) -> bool:
        """Whether more of the request's body is to come than is worth reading after the answer."""
        ...

    def discard_rest(self) -> None:
        """End the output, discard the input for a while, and close."""
        ...


class Answer:
    """Sends an answer with uvicorn's cycle, which knows neither connections that end early nor clients of HTTP/1.0.

    The answer has ``Connection: close`` when its connection is old, or when the rest of the request's body will not be read. An
    answer without a length to a client of HTTP/1.0 ends with its connection, since such clients do not know chunks.
    """

    def __init__(self, cycle: RequestResponseCycle, connection: AnsweredConnection) -> None:
        self._cycle = cycle
        self._connection = connection
        self._leaves_rest = False
        self._ends_by_closing = False

    def of(self, app: ASGIApp) -> ASGIApp:
        """The application, whose answer this one is."""

        async def answered(scope: Scope, receive: Receive, _: Send) -> None:
            if scope["http_version"] == "1.1":
                scope.setdefault("extensions", {})[PIECES] = Pieces(self._cycle)
            await app(scope, receive, self.send)

        return answered

    async def send(self, message: Message) -> None:
        """Send one ASGI message. Raises RuntimeError for one that is out of order."""
        cycle = self._cycle
        if message["type"] == "http.response.start" and not cycle.response_started:
            await self._start(message)
        elif self._ends_by_closing and message["type"] == "http.response.body":
            await self._write(message)
        elif self._leaves_rest and not message.get("more_body", False):
            cycle.keep_alive = True  # the cycle would close the connection, and the client might not read the answer
            await cycle.send(message)  # type: ignore[arg-type]  # of the same form
            self._connection.discard_rest()
        else:
            await cycle.send(message)  # type: ignore[arg-type]

    async def _start(self, message: Message) -> None:
        cycle = self._cycle
        headers: list[tuple[bytes, bytes]] = list(message.get("headers", []))
        self._leaves_rest = self._connection.leaves_rest(cycle)
        if (self._leaves_rest or self._connection.is_old) and CLOSE_HEADER not in headers:
            headers.append(CLOSE_HEADER)
        if cycle.scope["http_version"] == "1.0" and not any(name.lower() == b"content-length" for name, _ in headers):
            self._start_without_length(message["status"], [*cycle.default_headers, *headers])
        else:
            await cycle.send({**message, "headers": headers})  # type: ignore[arg-type]

    def _start_without_length(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._ends_by_closing = True
        cycle = self._cycle
        cycle.response_started = True
        if CLOSE_HEADER not in headers:
            headers.append(CLOSE_HEADER)
        if not cycle.disconnected:
            lines = [b"%b: %b\r\n" % header for header in headers]
            cycle.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n"]))

    async def _write(self, message: Message) -> None:
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        cycle.transport.write(message.get("body", b""))
        if not message.get("more_body", False):
            cycle.response_complete = True
            cycle.message_event.set()
            cycle.transport.close()
            cycle.on_response()


# Refusals of HTTP requests that no handler gets.


def malformed(error: httptools.HttpParserError, cause: BaseException | None) -> HttpError:
    """The refusal of bytes that are not an HTTP request. ``cause``: the exception of a parser event, if one failed. Raises it if
    it says nothing about the request.
    """
    if isinstance(cause, (UnicodeDecodeError, AttributeError, httptools.HttpParserInvalidURLError)):
        # A target that is not ASCII, has no path, or is no URL.
        return HttpError(400, "the request's target must be a path, or an http URL with one, in ASCII", "bad_request")
    if cause is not None:
        raise cause
    return HttpError(400, f"not an HTTP/1.1 request: {error}", "bad_request")


def refusal(error: HttpError) -> bytes:
    """The whole answer, head and body, which ends its connection."""
    body = answer(error).body
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


_JITTER = 0.1
"""Part of ``max_age`` by which connections live longer or shorter, so that not all clients come back at once."""
_WORTH_READING = 64 * 1024
"""Bytes of a body which are read after the answer, so that the connection can be used again."""
_LINGER = 2.0
"""Seconds in which a client whose body is not read to its end can read the answer."""


class HttpConnection(RequestParsing):
    """uvicorn's connection, with limits for what it does without a handler.

    - Bytes are parsed in slices, and ``turns`` shares the event loop's time between connections. While bytes wait, while a
      handler has enough of its body, and while a pipelined request waits, nothing more is read.
    - A request's head has limits, and so has all that is around its body (``RequestSize``).
    - A head must be complete within ``header_timeout`` seconds from its first byte, and a rest of a body whose request has been
      answered within as many from the answer. Otherwise, and while no request is on its way, the connection is idle: uvicorn
      closes it after ``timeout_keep_alive``, also a new one. Bodies that are read have a deadline where they are read.
    - It ends by ``Connection: close`` in an answer, the first after ``max_age`` seconds (infinite: never), or after
      ``end_with_next_answer``: closed while it is idle, it would fail the request that its client is just sending.
    - Where a request is answered before its body has come, the rest is not parsed: it is discarded for a short while, so that
      the client reads the answer, and the connection is closed.
    """

    header_timeout = 10.0
    max_age = math.inf
    turns: ParsingTurns
    discards: DiscardingTurns

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unparsed = memoryview(b"")
        self._waits_for_turn = False
        self._reads = True
        self._num_unanswered = 0
        self._answering: RequestResponseCycle | None = None
        """The request whose handler runs; pipelined ones wait behind it."""
        self._discards = False
        self._refusal: HttpError | None = None
        """Why nothing more is parsed. The client is told when the answers under way are complete."""
        self._deadline: asyncio.TimerHandle | None = None
        self._ends_at = math.inf

    # Transport events

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own type
        """A client has connected."""
        super().connection_made(transport)
        self.flow = _Flow(transport, self)
        self._ends_at = self.loop.time() + self.max_age * random.uniform(1.0 - _JITTER, 1.0 + _JITTER)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """The client has sent something."""
        if self._discards:
            self._rest_until_next_discard()
            return
        self._unparsed = memoryview(bytes(self._unparsed) + data if self._unparsed else data)
        while self._can_parse and self.turns.has_room:
            self._parse()
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone. uvicorn tells the handler of the newest request, which may wait behind another one."""
        for cycle in (self._answering, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self._disarm()
        self._unset_keepalive_if_required()
        self._unparsed = memoryview(b"")
        super().connection_lost(exc)

    # Parsing

    def parse_slice(self) -> bool:
        """Parse some of what has come. Returns whether there is more to parse."""
        self._waits_for_turn = False
        if self._can_parse:
            self._parse()
        if self._can_parse:
            self._waits_for_turn = True
            return True
        self._go_on()
        return False

    def reading_changed(self) -> None:
        """A handler wants more of its body, or has enough of it."""
        self._go_on()

    @property
    def _can_parse(self) -> bool:
        return bool(self._unparsed) and not (
            self._refusal is not None
            or self._discards
            or self.pipeline
            or self.flow.read_paused
            or self.transport.is_closing()
        )

    def _parse(self) -> None:
        """Give the parser one slice."""
        self._unset_keepalive_if_required()
        piece, self._unparsed = self._unparsed[:SLICE], self._unparsed[SLICE:]
        try:
            self.feed(piece)
        except HttpError as e:
            self._refuse(e)
        except httptools.HttpParserError as e:
            cause = e.__context__ if isinstance(e, httptools.HttpParserCallbackError) else None
            self._refuse(cause if isinstance(cause, HttpError) else malformed(e, cause))
        self.turns.spend(len(piece), self.num_events)

    def _go_on(self) -> None:
        """Read, or wait for a turn, as the connection's state wants it."""
        if self._can_parse and not self._waits_for_turn:
            self._waits_for_turn = True
            self.turns.wait(self)
        self._read(wanted=not (self._unparsed or self.pipeline or self.flow.read_paused or self._refusal))
        self._watch()

    def _read(self, *, wanted: bool) -> None:
        if wanted != self._reads and not self.transport.is_closing():
            self._reads = wanted
            (self.transport.resume_reading if wanted else self.transport.pause_reading)()

    # Answers

    @property
    def busy(self) -> bool:
        """Whether a request is being answered, or on its way."""
        return bool(self._num_unanswered or self.in_head or self._unparsed)

    @property
    def is_old(self) -> bool:
        return self.loop.time() >= self._ends_at

    def end_with_next_answer(self) -> None:
        """Let the connection end with the answer that has not begun yet, or with the next one."""
        self._ends_at = 0.0

    def leaves_rest(self, cycle: RequestResponseCycle) -> bool:
        """Whether more of the request's body is to come than is worth reading after its answer."""
        if cycle is not self.cycle or not self.in_body:
            return False
        if cycle.waiting_for_100_continue or self.length is None:  # it may never come, or never end
            return True
        return self.length - self.size.body > _WORTH_READING

    def discard_rest(self) -> None:
        """End the output, discard the input for a while, and close: with bytes that nobody has read the system would tell the
        client that the connection broke, and its answer might be lost.
        """
        if self.transport.is_closing() or self._discards:
            return
        self._discards = True
        self._disarm()
        self._unset_keepalive_if_required()
        self._unparsed = memoryview(b"")
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._deadline = self.loop.call_later(_LINGER, self.transport.close)
        self._rest_until_next_discard()

    def discard_more(self) -> None:
        """Read and discard once more."""
        self._read(wanted=True)

    def _rest_until_next_discard(self) -> None:
        self._read(wanted=False)
        self.discards.wait(self)

    def on_response_complete(self) -> None:
        """A request was answered; the next one may have come already."""
        self._num_unanswered -= 1
        super().on_response_complete()
        if self._refusal is not None and not self._num_unanswered and not self.transport.is_closing():
            self._tell_refusal(self._refusal)
        else:
            self._go_on()

    def on_headers_complete(self) -> None:
        """A request is served from now on, or waits for the one before it."""
        before = self.cycle
        super().on_headers_complete()
        self._num_unanswered += self.cycle is not before

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._answering = cycle
        super()._start_asgi_task(cycle, Answer(cycle, self).of(app))  # type: ignore[arg-type]

    def _refuse(self, error: HttpError) -> None:
        """Parse nothing more, and have the client told why, unless the answer to the request at fault has begun."""
        cycle: RequestResponseCycle | None = self.cycle
        self._refusal = error
        if cycle is not None and not self.in_head and self._num_unanswered == 1:
            if cycle.response_started:
                self.transport.abort()
                return
            cycle.disconnected = True  # for the handler its client has gone; the client gets this error in its place
            cycle.message_event.set()
            self._num_unanswered = 0
        if not self._num_unanswered:
            self._tell_refusal(error)

    def _tell_refusal(self, error: HttpError) -> None:
        self.transport.write(refusal(error))
        self.discard_rest()

    # Timeouts

    def _watch(self) -> None:
        """Start or stop the clock, as the connection's state wants it."""
        if self._discards:
            return
        if self.transport.is_closing() or self._num_unanswered or self._unparsed:
            self._disarm()
        elif self.in_head or self.in_body:
            if self._deadline is None:
                self._deadline = self.loop.call_later(self.header_timeout, self._too_slow)
        else:
            self._disarm()
            if self.timeout_keep_alive_task is None:
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        self._unset_keepalive_if_required()
        if self.in_head:
            seconds = f"{self.header_timeout:g}"
            message = f"the headers were not complete after {seconds} s; http.header_timeout is {seconds}"
            self._refuse(HttpError(408, message, "header_timeout"))
        else:
            self.transport.close()


class _Flow(FlowControl):
    """uvicorn's flow control, where the connection decides whether it reads: bytes may wait to be parsed as well."""

    def __init__(self, transport: asyncio.Transport, connection: HttpConnection) -> None:
        super().__init__(transport)
        self._connection = connection

    def pause_reading(self) -> None:
        """The handler has enough of its body, or a pipelined request waits."""
        self.read_paused = True

    def resume_reading(self) -> None:
        """The handler wants more."""
        if self.read_paused:
            self.read_paused = False
            self._connection.reading_changed()


def connection_class(config: HttpConfig) -> type[HttpConnection]:
    """The class of a listener's connections: uvicorn makes one instance for every client."""
    settings = {
        "limits": RequestLimits(config.max_header_bytes, config.max_headers),
        "header_timeout": config.header_timeout,
        "max_age": config.max_connection_age or math.inf,
        "turns": ParsingTurns(),
        "discards": DiscardingTurns(),
    }
    return type("HttpConnection", (HttpConnection,), settings)

"""Connections of clients to the HTTP listener, with their limits, timeouts and answers."""

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

# The code below sends the answer to one HTTP request.


class AnsweredConnection(Protocol):
    """Connection on which a request is answered, as ``Answer`` uses it."""

    @property
    def is_old(self) -> bool:
        """True if the connection must close after its next answer."""
        ...

    def leaves_rest(self, cycle: RequestResponseCycle) -> bool:
        """Return True if so much of the request's body has not arrived yet that the server will not read it after the
        answer.
        """
        ...

    def discard_rest(self) -> None:
        """End the output, discard received bytes for a short time, then close the connection."""
        ...


class Answer:
    """Sends the answer to a request with uvicorn's cycle object. This class adds support for closing the connection
    early, and for HTTP/1.0.

    The answer has ``Connection: close`` if the connection has reached its maximum age, or if the server will not read
    the rest of the request's body. HTTP/1.0 clients do not support chunked answers. For these clients, an answer
    without a length ends when the server closes the connection.
    """

    def __init__(self, cycle: RequestResponseCycle, connection: AnsweredConnection) -> None:
        self._cycle = cycle
        self._connection = connection
        self._leaves_rest = False
        self._ends_by_closing = False

    def of(self, app: ASGIApp) -> ASGIApp:
        """Return an application that runs ``app`` and sends its messages through this answer."""

        async def answered(scope: Scope, receive: Receive, _: Send) -> None:
            if scope["http_version"] == "1.1":
                scope.setdefault("extensions", {})[PIECES] = Pieces(self._cycle)
            await app(scope, receive, self.send)

        return answered

    async def send(self, message: Message) -> None:
        """Send one ASGI message of the application. Raises RuntimeError if the message comes in the wrong order."""
        cycle = self._cycle
        if message["type"] == "http.response.start" and not cycle.response_started:
            await self._start(message)
        elif self._ends_by_closing and message["type"] == "http.response.body":
            await self._write(message)
        elif self._leaves_rest and not message.get("more_body", False):
            cycle.keep_alive = (
                # otherwise uvicorn's cycle would close the connection, and the client might not be able to read the
                # answer
                True
            )
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


# The code below refuses HTTP requests before a handler sees them.


def malformed(error: httptools.HttpParserError, cause: BaseException | None) -> HttpError:
    """Return the refusal for bytes that are not an HTTP request.

    ``cause`` is the exception that a callback of the HTTP parser raised, or None. If the request did not cause this
    exception, this function raises the exception again.
    """
    if isinstance(cause, (UnicodeDecodeError, AttributeError, httptools.HttpParserInvalidURLError)):
        # The target of the request is not ASCII, has no path, or is not a URL.
        return HttpError(
            400,
            "the target in the request line must be a path, or an http URL with a path, in ASCII characters",
            "bad_request",
        )
    if cause is not None:
        raise cause
    return HttpError(400, f"the client did not send a valid HTTP/1.1 request: {error}", "bad_request")


def refusal(error: HttpError) -> bytes:
    """Return the bytes of the complete answer to a refused request, with head and body. The answer has ``Connection:
    close``.
    """
    body = answer(error).body
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


_JITTER = 0.1
"""Fraction of ``max_age`` by which the lifetimes of connections vary, so that clients do not all reconnect at the same
time.
"""
_WORTH_READING = 64 * 1024
"""Maximum number of bytes of a request's body that the server reads after the answer, so that the connection can be
used again.
"""
_LINGER = 2.0
"""Number of seconds that a client has to read the answer before the connection closes, if the server has not read the
whole body.
"""


class HttpConnection(RequestParsing):
    """Connection of a client. This class extends uvicorn's connection by limits on the work that happens before a
    handler runs.

    - Bytes are parsed in slices. ``turns`` divides the event loop's time between connections. Reading pauses while
      received bytes are not parsed yet, while a handler has enough of its body, and while a pipelined request waits.
    - A request's head has size limits, and so does the framing around its body (``RequestSize``).
    - A head must be complete within ``header_timeout`` seconds from its first byte. If a request was answered before
      its body was complete, the body must be complete within ``header_timeout`` seconds from the answer. At other times
      without an active request, the connection is idle, even if it is new. uvicorn closes an idle connection after
      ``timeout_keep_alive``. The reader of a body enforces the deadline of the body.
    - The connection closes after an answer with ``Connection: close``. That is the first answer after ``max_age``
      seconds (infinite: never), or after ``end_with_next_answer``. An idle connection stays open until then, because
      the client may be sending a request at this moment.
    - If a request is answered before its body has arrived, the server does not parse the rest of the body. The server
      discards the rest for a short time, so that the client can read the answer, and then closes the connection.
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
        """The request whose handler runs now. Pipelined requests wait until this request is answered."""
        self._discards = False
        self._refusal: HttpError | None = None
        """Error because of which parsing has stopped. The client gets the error after the answers in progress are
        complete.
        """
        self._deadline: asyncio.TimerHandle | None = None
        self._ends_at = math.inf

    # The methods below are called for events of the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own type
        """Handle a new client connection."""
        super().connection_made(transport)
        self.flow = _Flow(transport, self)
        self._ends_at = self.loop.time() + self.max_age * random.uniform(1.0 - _JITTER, 1.0 + _JITTER)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Handle bytes that the client has sent."""
        if self._discards:
            self._rest_until_next_discard()
            return
        self._unparsed = memoryview(bytes(self._unparsed) + data if self._unparsed else data)
        while self._can_parse and self.turns.has_room:
            self._parse()
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the loss of the client's connection. uvicorn informs only the handler of the newest request, so this
        method informs all other handlers.
        """
        for cycle in (self._answering, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        self._disarm()
        self._unset_keepalive_if_required()
        self._unparsed = memoryview(b"")
        super().connection_lost(exc)

    # The methods below parse requests.

    def parse_slice(self) -> bool:
        """Parse one slice of the received bytes. Return True if another slice can be parsed now."""
        self._waits_for_turn = False
        if self._can_parse:
            self._parse()
        if self._can_parse:
            self._waits_for_turn = True
            return True
        self._go_on()
        return False

    def reading_changed(self) -> None:
        """Resume or pause reading, after a handler has asked for more of the body, or has enough of it."""
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
        """Pass one slice of received bytes to the HTTP parser."""
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
        """Resume or pause reading and parsing, as the state of the connection requires."""
        if self._can_parse and not self._waits_for_turn:
            self._waits_for_turn = True
            self.turns.wait(self)
        self._read(wanted=not (self._unparsed or self.pipeline or self.flow.read_paused or self._refusal))
        self._watch()

    def _read(self, *, wanted: bool) -> None:
        if wanted != self._reads and not self.transport.is_closing():
            self._reads = wanted
            (self.transport.resume_reading if wanted else self.transport.pause_reading)()

    # The methods below handle answers.

    @property
    def busy(self) -> bool:
        """Return True if a request is being received or answered on this connection."""
        return bool(self._num_unanswered or self.in_head or self._unparsed)

    @property
    def is_old(self) -> bool:
        return self.loop.time() >= self._ends_at

    def end_with_next_answer(self) -> None:
        """Close the connection after the next answer whose head was not sent yet."""
        self._ends_at = 0.0

    def leaves_rest(self, cycle: RequestResponseCycle) -> bool:
        """Return True if so much of the request's body has not arrived yet that the server will not read it after the
        answer.
        """
        if cycle is not self.cycle or not self.in_body:
            return False
        if cycle.waiting_for_100_continue or self.length is None:
            # the rest of the body may never arrive, or may never end
            return True
        return self.length - self.size.body > _WORTH_READING

    def discard_rest(self) -> None:
        """End the output, discard received bytes for a short time, then close the connection.

        If the server closed the connection while unread bytes are left, the operating system would reset it, and the
        client might lose the answer.
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
        """Read and discard received bytes once more."""
        self._read(wanted=True)

    def _rest_until_next_discard(self) -> None:
        self._read(wanted=False)
        self.discards.wait(self)

    def on_response_complete(self) -> None:
        """Handle the end of an answer. The next request may have arrived already."""
        self._num_unanswered -= 1
        super().on_response_complete()
        if self._refusal is not None and not self._num_unanswered and not self.transport.is_closing():
            self._tell_refusal(self._refusal)
        else:
            self._go_on()

    def on_headers_complete(self) -> None:
        """Handle the complete head of a request. The request is served now, or waits until the previous request is
        answered.
        """
        before = self.cycle
        super().on_headers_complete()
        self._num_unanswered += self.cycle is not before

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._answering = cycle
        super()._start_asgi_task(cycle, Answer(cycle, self).of(app))  # type: ignore[arg-type]

    def _refuse(self, error: HttpError) -> None:
        """Stop parsing requests on this connection. Send an error to the client if the answer to the faulty request has
        not started yet.
        """
        cycle: RequestResponseCycle | None = self.cycle
        self._refusal = error
        if cycle is not None and not self.in_head and self._num_unanswered == 1:
            if cycle.response_started:
                self.transport.abort()
                return
            # the handler sees that the client has disconnected, and the client gets this error instead of an answer
            cycle.disconnected = True
            cycle.message_event.set()
            self._num_unanswered = 0
        if not self._num_unanswered:
            self._tell_refusal(error)

    def _tell_refusal(self, error: HttpError) -> None:
        self.transport.write(refusal(error))
        self.discard_rest()

    # The method below handles timeouts.

    def _watch(self) -> None:
        """Start or stop the timeout for incomplete heads and for the rest of bodies, as the state of the connection
        requires.
        """
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
    """uvicorn's flow control, changed so that the connection decides whether to read.

    Reading must also pause while received bytes are not parsed yet. uvicorn's flow control does not consider these
    bytes.
    """

    def __init__(self, transport: asyncio.Transport, connection: HttpConnection) -> None:
        super().__init__(transport)
        self._connection = connection

    def pause_reading(self) -> None:
        """Record that the handler has enough of the body, or that a pipelined request waits."""
        self.read_paused = True

    def resume_reading(self) -> None:
        """Record that the handler needs more of the body."""
        if self.read_paused:
            self.read_paused = False
            self._connection.reading_changed()


def connection_class(config: HttpConfig) -> type[HttpConnection]:
    """Return the class for the connections of a listener. uvicorn creates one instance for each client connection."""
    settings = {
        "limits": RequestLimits(config.max_header_bytes, config.max_headers),
        "header_timeout": config.header_timeout,
        "max_age": config.max_connection_age or math.inf,
        "turns": ParsingTurns(),
        "discards": DiscardingTurns(),
    }
    return type("HttpConnection", (HttpConnection,), settings)

"""Parsing of HTTP requests: limits on their size, and fair sharing of the event loop between connections."""

import asyncio
from collections import deque
from typing import Any, Protocol

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock_frontend.api.openai.errors import HttpError

# The code below limits the bytes outside of the body: the head, the framing of chunks, and trailers.


class RequestLimits(msgspec.Struct, frozen=True):
    """Limits on one request. ``max_header_bytes`` limits the size of its head, and ``max_headers`` limits the number of
    headers and trailers.
    """

    max_header_bytes: int
    max_headers: int


class RequestSize:
    """Counts the bytes of one request, and refuses a request that consists mostly of framing.

    The parser reports a header or a piece of a body only when the header or piece is complete. This class therefore
    counts all bytes when they arrive, and subtracts the bytes of the body. The difference is the size of the head,
    chunk size lines, chunk extensions and trailers.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self.begin()

    def begin(self) -> None:
        """Start to count a new request."""
        self.body = 0
        self._received = 0
        self._headers = 0
        self._head_is_complete = False

    def add_header(self) -> None:
        """Count a header or trailer. Raises HttpError 431 if the request has too many headers."""
        self._headers += 1
        if self._headers > self._limits.max_headers:
            limit = self._limits.max_headers
            raise HttpError(
                431, f"the request has more than {limit} headers; http.max_headers is {limit}", "too_many_headers"
            )

    def complete_head(self) -> None:
        """Record that the head is complete, so that all further bytes belong to the body."""
        self._head_is_complete = True

    def add(self, num_bytes: int) -> None:
        """Count bytes that are passed to the parser. Raises HttpError 431 if the head is too large, and HttpError 400
        if the framing is too large.
        """
        self._received += num_bytes
        limit = self._limits.max_header_bytes
        around = self._received - self.body
        if around <= limit:
            return
        if not self._head_is_complete:
            raise HttpError(
                431,
                f"the headers have more than {limit} bytes; http.max_header_bytes is {limit}",
                "headers_too_large",
            )
        if around > limit + self.body:
            raise HttpError(
                400,
                f"the request has {around} bytes in addition to its body of {self.body} bytes; the limit for headers, trailers, "
                f"chunk sizes and chunk extensions is http.max_header_bytes, {limit}, plus the size of the body. Send "
                "larger chunks",
                "chunks_too_small",
            )


# The code below shares the parsing time of each iteration of the event loop fairly between connections.

SLICE = 4096
"""Maximum number of bytes in one slice, which is passed to the HTTP parser of a connection in one call."""
BYTES_PER_TURN = 256 * 1024
"""Maximum number of bytes that all connections together parse in one iteration of the event loop. Parsing this many
bytes takes less than 1 ms.
"""
EVENTS_PER_TURN = 4096
"""Maximum number of parser events (a header, or a piece of a body) of all connections together in one iteration of the
event loop. Processing this many events takes about 1 ms.
"""
REQUEST_EVENTS = 64
"""Number of parser events for which the head of a request counts. The head counts as more than one event, because it
starts a task.
"""
_DISCARD_INTERVAL = 0.001
"""Number of seconds between two reads from the connections whose input is discarded. One read returns at most 256 KiB."""


class Parsing(Protocol):
    """A connection that has received bytes which are not parsed yet."""

    def parse_slice(self) -> bool:
        """Parse at most ``SLICE`` received bytes. Return True if the connection can parse another slice now."""
        ...


class Discarding(Protocol):
    """A connection whose input is read and discarded."""

    def discard_more(self) -> None:
        """Read from the connection once, and discard the bytes."""
        ...


class ParsingTurns:
    """Scheduler that limits the parsing in each iteration of the event loop, and lets the connections of a listener
    parse in turn.

    A client decides how many events its bytes produce. Without a limit, a few connections with bodies in one-byte
    chunks would block the loop, and no other request would be served.
    """

    def __init__(self) -> None:
        self._bytes = 0
        self._events = 0
        self._waiting: deque[Parsing] = deque()
        self._is_scheduled = False

    @property
    def has_room(self) -> bool:
        """True if a connection may parse now, without a call of ``wait``."""
        return not self._waiting and self._is_below_limits

    def spend(self, num_bytes: int, events: int) -> None:
        """Count bytes and parser events that were parsed in this iteration of the event loop."""
        self._bytes += num_bytes
        self._events += events
        self._schedule()

    def wait(self, connection: Parsing) -> None:
        """Let ``connection`` parse in later iterations of the event loop, slice by slice, until its ``parse_slice``
        returns False.
        """
        self._waiting.append(connection)
        self._schedule()

    @property
    def _is_below_limits(self) -> bool:
        return self._bytes < BYTES_PER_TURN and self._events < EVENTS_PER_TURN

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        self._bytes = self._events = 0
        while self._waiting and self._is_below_limits:
            connection = self._waiting.popleft()
            if connection.parse_slice():
                self._waiting.append(connection)
        if self._waiting:
            self._schedule()


class DiscardingTurns:
    """Scheduler for connections whose input is discarded. The connections read one after the other, so that the number
    of connections does not change the work per second.
    """

    def __init__(self) -> None:
        self._waiting: deque[Discarding] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, connection: Discarding) -> None:
        """Add a connection whose input must be discarded. The method ``discard_more`` of the connection is called when
        the connection's turn comes.
        """
        self._waiting.append(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DISCARD_INTERVAL, self._turn)

    def _turn(self) -> None:
        self._timer = None
        connection = self._waiting.popleft()
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(_DISCARD_INTERVAL, self._turn)
        connection.discard_more()


class RequestParsing(HttpToolsProtocol):
    """The part of uvicorn's connection that parses requests. This class adds limits on heads and framing, and checks
    that usually a proxy does.

    Attributes of the current request: ``in_head``, ``in_body``, ``length`` (announced bytes of the body), and ``size``.
    """

    limits = RequestLimits(64 * 1024, 128)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.size = RequestSize(self.limits)
        self.in_head = self.in_body = False
        self.length: int | None = None
        self.num_events = 0
        self._hosts = 0
        self._repeats_head = False

    def feed(self, piece: memoryview) -> None:
        """Parse a slice of received bytes, and set ``num_events`` to the number of resulting events. Raises
        HttpParserError and HttpError.
        """
        self.num_events = 1
        rest = piece
        while rest:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as e:
                rest = rest[e.args[0] :]
            else:
                break
            self._decline_upgrade()
        self.size.add(len(piece))

    def _decline_upgrade(self) -> None:
        """Continue with the body of a request that offers a protocol upgrade, as Java's HTTP client does.

        The parser would treat the body as data of the other protocol. This method therefore passes another head to the
        parser, with the length of the body and without the upgrade.
        """
        framing = [header for header in self.headers if header[0] in (b"content-length", b"transfer-encoding")]
        self._repeats_head = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % header for header in framing))
        finally:
            self._repeats_head = False

    def on_message_begin(self) -> None:
        """Handle the first byte of a request."""
        if self._repeats_head:
            return
        super().on_message_begin()
        self.size.begin()
        self.in_head, self.length, self._hosts = True, None, 0

    def on_url(self, url: bytes) -> None:
        """Handle the target of a request, or a part of it."""
        if not self._repeats_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handle a header or a trailer. Trailers are only counted, because the handler may already have read the
        headers.
        """
        if self._repeats_head:
            return
        self.num_events += 1
        self.size.add_header()
        if not self.in_head:
            return
        super().on_header(name, value)
        lower = self.headers[-1][0]
        if lower == b"content-length":
            self.length = int(value)
        elif lower == b"host":
            self._hosts += 1

    def on_headers_complete(self) -> None:
        """Handle the complete head of a request. The request is served now, or waits until the previous request is
        answered.
        """
        if self._repeats_head:
            return
        if self._hosts != 1 and self.parser.get_http_version() == "1.1":
            raise HttpError(400, f"the request has {self._hosts} Host headers; it must have one", "host_header")
        self.num_events += REQUEST_EVENTS
        self.in_head, self.in_body = False, True
        self.size.complete_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Handle a piece of a request's body."""
        self.num_events += 1
        self.size.body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Handle the end of a request."""
        if self.parser.should_upgrade():  # the parser reports the body later, after the upgrade was declined
            return
        self.in_body = False
        super().on_message_complete()

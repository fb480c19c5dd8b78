"""Parsing of HTTP requests: size limits, and how connections share each turn of the event loop."""

import asyncio
from collections import deque
from typing import Any, Protocol

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock_frontend.api.openai.errors import HttpError

# Limits on the bytes around a body: its head, the framing of chunks, and trailers.


class RequestLimits(msgspec.Struct, frozen=True):
    """Limits of one request: ``max_header_bytes`` of its head, ``max_headers`` lines of it, those of trailers included."""

    max_header_bytes: int
    max_headers: int


class RequestSize:
    """Counts what the parser was given of one request, and refuses a request that is mostly framing.

    The parser reports a header or a piece of a body only when it is complete. So bytes are counted as they come, and those of
    the body are subtracted: the difference is the head, the lines around chunks, chunk extensions and trailers.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self.begin()

    def begin(self) -> None:
        """A new request begins."""
        self.body = 0
        self._received = 0
        self._headers = 0
        self._head_is_complete = False

    def add_header(self) -> None:
        """One more header or trailer. Raises HttpError 431 when there are too many."""
        self._headers += 1
        if self._headers > self._limits.max_headers:
            limit = self._limits.max_headers
            raise HttpError(
                431, f"the request has more than {limit} headers; http.max_headers is {limit}", "too_many_headers"
            )

    def complete_head(self) -> None:
        """All bytes from now on are of the body."""
        self._head_is_complete = True

    def add(self, num_bytes: int) -> None:
        """Count bytes that the parser has taken. Raises HttpError 431 for the head, 400 for the framing of the body."""
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
                f"{around} bytes around a body of {self.body} bytes; send larger chunks: chunk sizes, chunk extensions, "
                f"headers and trailers may have http.max_header_bytes, {limit}, and as much as the body",
                "chunks_too_small",
            )


# How connections share parsing in each turn of the event loop.

SLICE = 4096
"""Bytes that a connection's parser gets at once."""
BYTES_PER_TURN = 256 * 1024
"""Bytes that all connections together parse in one turn of the event loop; they take less than 1 ms."""
EVENTS_PER_TURN = 4096
"""Parser events (a header, a piece of a body) of all connections in one turn of the event loop; they take about 1 ms."""
REQUEST_EVENTS = 64
"""Events that the head of a request counts as, because it starts a task."""
_DISCARD_INTERVAL = 0.001
"""Seconds between two reads of connections whose input is discarded; a read has at most 256 KiB."""


class Parsing(Protocol):
    """A connection with unparsed bytes."""

    def parse_slice(self) -> bool:
        """Parse up to ``SLICE`` bytes. Returns whether the connection can go on at once."""
        ...


class Discarding(Protocol):
    """A connection whose input is read and discarded."""

    def discard_more(self) -> None:
        """Read once more."""
        ...


class ParsingTurns:
    """Limits what all connections of a listener parse in one turn of the event loop, and lets them take turns.

    A client decides how many events its bytes make. Without a limit, a few connections with bodies in chunks of one byte
    would occupy the loop, and no other request would be served.
    """

    def __init__(self) -> None:
        self._bytes = 0
        self._events = 0
        self._waiting: deque[Parsing] = deque()
        self._is_scheduled = False

    @property
    def has_room(self) -> bool:
        """Whether a connection may parse now, rather than ``wait``."""
        return not self._waiting and self._is_below_limits

    def spend(self, num_bytes: int, events: int) -> None:
        """Count bytes and events as parsed in this turn."""
        self._bytes += num_bytes
        self._events += events
        self._schedule()

    def wait(self, connection: Parsing) -> None:
        """Have ``connection`` parse in later turns, slice by slice, until its ``parse_slice`` returns False."""
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
    """Lets connections whose input is discarded read one after the other, so that they cost the same however many there are."""

    def __init__(self) -> None:
        self._waiting: deque[Discarding] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, connection: Discarding) -> None:
        """Have ``connection`` call ``discard_more`` when its turn comes."""
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
    """uvicorn's connection, as far as it parses: with limits for heads and framing, and for what it would leave to servers
    in front. Of the request that comes: ``in_head``, ``in_body``, ``length`` of its body in bytes as it says, ``size``.
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
        """Parse some bytes. ``num_events`` says how many events came of them. Raises HttpParserError, HttpError."""
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
        """Go on with the body of a request that offers another protocol, as Java's client does. The parser takes the body for
        that protocol, so it is given a head again that says how long the body is, and nothing of an upgrade.
        """
        framing = [header for header in self.headers if header[0] in (b"content-length", b"transfer-encoding")]
        self._repeats_head = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(b"%b: %b\r\n" % header for header in framing))
        finally:
            self._repeats_head = False

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if self._repeats_head:
            return
        super().on_message_begin()
        self.size.begin()
        self.in_head, self.length, self._hosts = True, None, 0

    def on_url(self, url: bytes) -> None:
        """The request's target, or a part of it."""
        if not self._repeats_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer. Trailers are counted and dropped: the handler may have read the headers already."""
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
        """The head is complete: the request is served, or waits for the one before it."""
        if self._repeats_head:
            return
        if self._hosts != 1 and self.parser.get_http_version() == "1.1":
            raise HttpError(400, f"the request has {self._hosts} Host headers; it must have one", "host_header")
        self.num_events += REQUEST_EVENTS
        self.in_head, self.in_body = False, True
        self.size.complete_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self.num_events += 1
        self.size.body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self.parser.should_upgrade():  # its body comes when the upgrade has been declined
            return
        self.in_body = False
        super().on_message_complete()

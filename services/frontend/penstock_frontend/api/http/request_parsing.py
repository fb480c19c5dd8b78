"""Parsing of the requests of a connection, within limits."""

from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock_frontend.api.http.request_size import RequestLimits, RequestSize
from penstock_frontend.api.http.turns import REQUEST_EVENTS
from penstock_frontend.api.openai.errors import HttpError


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

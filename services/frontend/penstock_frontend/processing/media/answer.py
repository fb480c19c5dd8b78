"""Parses the HTTP answer of a media host as its bytes arrive."""

from http import HTTPStatus

import httptools

_MOST_HEADERS = 256
_MOST_INFORMATIONAL = 16
_FRAMING = 64 * 1024
"""Bytes that an answer may have beside its body: headers, informational answers, chunk sizes and their extensions, trailers, and
what TLS adds.
"""
_FRAMING_SHARE = 4
"""Such a part of its body an answer may have beside it in addition. Chunks of 24 bytes and more are within that."""


class BadAnswer(Exception):  # noqa: N818 - it says what is wrong with the answer
    """The host breaks the protocol, or a limit. The text continues "could not be fetched: "."""


class Answer:
    """The final answer to one GET request, without informational ones (1xx) before it.

    The parser is compiled, and the limits are checked after every slice of bytes. A host that sends one-byte chunks, headers
    without end or other answers with little content is given up after some 64 KiB.
    """

    def __init__(self) -> None:
        self.status: int | None = None
        """None until all headers are here."""
        self.headers: dict[str, str] = {}
        """By name in lower case."""
        self.body = bytearray()
        self.is_complete = False
        self._is_until_close = False
        self._num_headers = 0
        self._num_informational = 0
        self._parser = httptools.HttpResponseParser(self)
        # Some hosts end lines with LF alone, or pad chunk sizes. No second answer follows that could be hidden so.
        self._parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True)

    def feed(self, data: bytes, num_received: int) -> None:
        """Parse the next bytes.

        Args:
            data: the bytes; none where the host has closed the connection.
            num_received: bytes that the host has sent so far in all, with those of TLS.

        Raises:
            BadAnswer: the answer breaks the protocol or a limit.
            ConnectionResetError: the answer is not complete, and the connection is closed.
        """
        if not data:
            self._close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self.is_complete:  # what comes behind the answer is not looked at
                raise BadAnswer("its host breaks the protocol") from None
        self._check(num_received)

    def _close(self) -> None:
        self.is_complete = self.is_complete or (self.status is not None and self._is_until_close)
        if not self.is_complete:
            raise ConnectionResetError

    def _check(self, num_received: int) -> None:
        if self._num_informational > _MOST_INFORMATIONAL:
            raise BadAnswer(f"its host sends more than {_MOST_INFORMATIONAL} informational answers (1xx)")
        if self._num_headers > _MOST_HEADERS:
            raise BadAnswer(f"its host sends more than {_MOST_HEADERS} headers")
        if num_received - len(self.body) > _FRAMING + len(self.body) // _FRAMING_SHARE:
            raise BadAnswer(
                f"its host sends more than {_FRAMING} bytes of headers, chunk sizes and the like, and more than "
                f"1/{_FRAMING_SHARE} of the file; it should send chunks of 1 KiB or more"
            )

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; those behind the body are only counted."""
        self._num_headers += 1
        if self.status is None:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        """Keep the status, unless the answer is informational."""
        if self.status is not None:
            return
        status = self._parser.get_status_code()
        if HTTPStatus.CONTINUE <= status < HTTPStatus.OK:
            self._num_informational += 1
            self.headers.clear()
            return
        self.status = status
        self._is_until_close = not self.headers.keys() & {"content-length", "transfer-encoding"}

    def on_body(self, data: bytes) -> None:
        """Keep a part of the body."""
        if not self.is_complete:
            self.body += data

    def on_message_complete(self) -> None:
        """The body is complete, unless the answer is informational."""
        self.is_complete = self.status is not None

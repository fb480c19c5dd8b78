"""How much a client may send around the body of a request: its head, the framing of chunks, and trailers."""

import msgspec

from penstock_frontend.api.openai.errors import HttpError


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

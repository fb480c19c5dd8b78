"""One GET request to a media host, and its answer."""

from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import urljoin

from penstock_frontend.processing.media import refusals
from penstock_frontend.processing.media.answer import Answer, BadAnswer
from penstock_frontend.processing.media.sources import Target
from penstock_frontend.processing.media.wire import Wire

Counted = Callable[[int], None]
"""Called with the number of further bytes in memory. Raises ResourceExhausted."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_FOR_NOW = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which another try may bring the file."""


class Exchange:
    """One request and its answer."""

    def __init__(self, wire: Wire, field: str, max_bytes: int, counted: Counted) -> None:
        self._wire = wire
        self._field = field
        self._max_bytes = max_bytes
        self._counted = counted
        self._answer = Answer()

    async def get(self, target: Target, check: Callable[..., Target]) -> bytes | Target:
        """Return the file, or the checked target of a redirect.

        Raises:
            OSError: the connection is lost.
            RequestFailed: the answer is no file, or more than may be.
        """
        answer = self._answer
        await self._wire.send(_request(target))
        while answer.status is None:
            await self._read()
        if answer.status in _REDIRECTS:
            return check(self._joined(target, answer.headers.get("location", "")), field=self._field)
        if answer.status != HTTPStatus.OK:
            why = f"its host answered with status {answer.status}"
            raise refusals.fetch_failed(self._field, why, for_now=answer.status in _FOR_NOW)
        if answer.headers.get("content-encoding", "").lower() not in ("", "identity"):
            raise refusals.fetch_failed(self._field, "its host encodes the content, unasked", for_now=False)
        if answer.headers.get("transfer-encoding", "chunked").lower() != "chunked":
            raise refusals.fetch_failed(self._field, "its host encodes the transfer, unasked", for_now=False)
        return await self._body(int(answer.headers.get("content-length", 0)))

    async def _read(self) -> None:
        data = await self._wire.read()
        try:
            self._answer.feed(data, self._wire.num_received)
        except BadAnswer as e:
            raise refusals.fetch_failed(self._field, str(e), for_now=False) from None

    def _joined(self, target: Target, location: str) -> str:
        try:
            return urljoin(target.url, location)
        except ValueError:
            raise refusals.fetch_failed(self._field, "it redirects to what is no URL", for_now=False) from None

    async def _body(self, announced: int) -> bytes:
        self._check_size(announced)
        if announced:
            self._counted(announced)
        body, counted = self._answer.body, announced
        while True:
            self._check_size(len(body))
            if len(body) > counted:
                self._counted(len(body) - counted)
                counted = len(body)
            if self._answer.is_complete:
                break
            await self._read()
        if not body:
            raise refusals.fetch_failed(self._field, "it is empty", for_now=False)
        return bytes(body)

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise refusals.too_large(self._field, f"has {size} bytes or more", "media.max_bytes", self._max_bytes)


def _request(target: Target) -> bytes:
    """Targets have no line breaks: sources.py encodes paths and checks hosts."""
    lines = (
        f"GET {target.path} HTTP/1.1",
        f"Host: {target.authority}",
        "User-Agent: penstock",
        "Accept: */*",
        "Accept-Encoding: identity",
        "Connection: close",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")

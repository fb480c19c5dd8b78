"""Reading of the bodies of HTTP requests: size limits, decompression, and limits on memory until the call is admitted."""

import asyncio
import codecs
import sys
import zlib
from collections.abc import Callable, Iterator
from itertools import accumulate
from types import TracebackType
from typing import Any, Protocol, TypeVar

import brotli  # type: ignore[import-untyped]
from prometheus_client import CollectorRegistry
from starlette.types import Receive

from penstock_common.errors import InvalidArgument, ResourceExhausted
from penstock_frontend.api.http.form_data import FormReader, Part, as_json, converted, file_fields, values_of
from penstock_frontend.api.openai.body_fields import decode
from penstock_frontend.api.openai.errors import HttpError
from penstock_frontend.api.openai.unknown_fields import FieldPolicy
from penstock_frontend.call_warnings import WarningLog
from penstock_frontend.calls.admission import InFlight
from penstock_frontend.config import HttpConfig

# The code below decompresses bodies whose ``Content-Encoding`` is gzip, deflate, br or zstd. A decompressor yields
# pieces of limited size. A small body that decompresses to a large body is therefore refused early, and the event loop
# can serve other calls between two pieces.

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PIECE = 256 * 1024
"""Approximate number of bytes in a piece of decompressed data. For brotli, a piece has up to four times as many bytes."""
_WINDOW_LOG = 23
"""Limit on the window size of zstd data, as a power of two: 8 MiB, which is the maximum that HTTP allows (RFC 9659)."""


class Decompressor(Protocol):
    """Decompressor for a body that arrives in several parts."""

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """Yield the content of the next part of the body, in pieces of about ``PIECE`` bytes. Raises HttpError 400 if
        the body is damaged.
        """

    def finish(self) -> None:
        """Check, after the last part, that the body is complete. Raises HttpError 400 if it is not."""


def decompressor_of(encoding: str) -> Decompressor | None:
    """Return the decompressor for a ``Content-Encoding``. Return None for a body that is not compressed.

    Raises HttpError 415 for an unknown encoding or several encodings.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name not in _MAKERS:
        known = ", ".join(sorted({*_MAKERS} - {"x-gzip"}))
        raise HttpError(
            415,
            f"Content-Encoding is {encoding[:40]!r}; supported: one of {known}, or no Content-Encoding",
            "unsupported_content_encoding",
        )
    return _Checked(name, _MAKERS[name]())


class _Codec(Protocol):
    @property
    def ended(self) -> bool:
        """True if the decompressor has read the end of the body."""

    @property
    def surplus(self) -> bool:
        """True if more data followed after the end of the compressed body."""

    def feed(self, part: bytes) -> Iterator[bytes]:
        """Yield the content of a part of the body in pieces. The part must not be empty."""


class _Checked:
    """Decompressor that uses a codec, and converts the codec's errors to HttpError."""

    def __init__(self, name: str, codec: _Codec) -> None:
        self._name = name
        self._codec = codec
        self._empty = True

    def pieces(self, part: bytes) -> Iterator[bytes]:
        if not part:
            return
        self._empty = False
        if self._codec.ended:
            raise self._damaged("there is data after its end")
        try:
            yield from self._codec.feed(part)
        except (zlib.error, brotli.error, zstd.ZstdError) as e:
            raise self._damaged(str(e)) from None
        if self._codec.surplus:
            raise self._damaged("there is data after its end")

    def finish(self) -> None:
        if not self._empty and not self._codec.ended:
            raise self._damaged("the compressed data ends too early")

    def _damaged(self, why: str) -> HttpError:
        return HttpError(400, f"the body cannot be decompressed as {self._name}: {why[:200]}", "invalid_body")


class _Zlib:
    """Decompressor for the formats of zlib. ``window`` is zlib's parameter ``wbits``.

    If ``window`` is None, the format is deflate. HTTP requires the header of zlib in this format, but some clients
    leave the header out. The class accepts data with and without this header.
    """

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._first: bytes | None = b""
        """Bytes that were received before the header was complete. None after that."""
        self._stream = zlib.decompressobj()

    @property
    def ended(self) -> bool:
        return self._stream.eof

    @property
    def surplus(self) -> bool:
        return bool(self._stream.unused_data)

    def feed(self, part: bytes) -> Iterator[bytes]:
        if self._first is not None:
            part = self._first + part
            if self._window is None and len(part) < 2:
                self._first = part
                return
            self._first = None
            self._stream = zlib.decompressobj(self._window or (15 if _has_zlib_header(part) else -15))
        while True:
            piece = self._stream.decompress(part, PIECE)
            part = self._stream.unconsumed_tail
            yield piece
            if self._stream.eof or (not part and len(piece) < PIECE):
                return


class _Brotli:
    surplus = False
    """Always False, because the brotli codec itself refuses data after the end."""

    def __init__(self) -> None:
        self._stream = brotli.Decompressor()

    @property
    def ended(self) -> bool:
        return bool(self._stream.is_finished())

    def feed(self, part: bytes) -> Iterator[bytes]:
        piece = self._stream.process(part, output_buffer_limit=PIECE)
        while (
            piece or not self._stream.can_accept_more_data()
        ):  # the codec may need an empty last piece to finish the stream
            yield piece
            if self._stream.is_finished():
                return
            piece = self._stream.process(b"", output_buffer_limit=PIECE)


class _Zstd:
    def __init__(self) -> None:
        options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
        self._stream = zstd.ZstdDecompressor(options=options)

    @property
    def ended(self) -> bool:
        return self._stream.eof

    @property
    def surplus(self) -> bool:
        return bool(self._stream.eof and self._stream.unused_data)

    def feed(self, part: bytes) -> Iterator[bytes]:
        yield self._stream.decompress(part, PIECE)
        while not self._stream.eof and not self._stream.needs_input:
            yield self._stream.decompress(b"", PIECE)


def _has_zlib_header(start: bytes) -> bool:
    """Return True if the data begin with a header as in RFC 1950: method 8, and a valid checksum over the first two
    bytes.
    """
    return start[0] & 0x0F == 8 and int.from_bytes(start[:2], "big") % 31 == 0


_MAKERS: dict[str, Callable[[], _Codec]] = {
    "br": _Brotli,
    "deflate": lambda: _Zlib(None),
    "gzip": lambda: _Zlib(31),
    "x-gzip": lambda: _Zlib(31),
    "zstd": _Zstd,
}


# The code below checks the size of a JSON text before it is decoded. The decoder keeps the interpreter's lock until the
# whole text is decoded, even in another thread, and no other request is served in that time. The limits on the text
# bound that time.

_PIECE = 256 * 1024
"""Number of bytes that are checked in one iteration of the event loop."""
MAX_NESTING = 512
"""Maximum nesting of lists and objects. With this limit, recursive code over the decoded value stays within Python's
stack limit.
"""
_STEP = [{"[": 1, "{": 1, "]": -1, "}": -1}.get(chr(byte), 0) for byte in range(256)]
_NO_BRACKETS = bytes(byte for byte in range(256) if not _STEP[byte])


async def check_json_size(text: bytes, *, max_values: int, max_objects: int) -> None:
    """Check the number of values, the number of objects, and the nesting depth of a JSON text. Raises InvalidArgument
    if a limit is exceeded.

    If the text is not valid JSON, the counts have no meaning.
    """
    if not _may_exceed(text, max_values, max_objects):
        return
    size = JsonSize()
    for begin in range(0, len(text), _PIECE):
        size.add(text[begin : begin + _PIECE])
        for count, what, limit in ((size.values, "values", max_values), (size.objects, "objects", max_objects)):
            if count > limit:
                raise InvalidArgument(
                    f"the body has more than {limit} JSON {what}; http.max_body_{what} is {limit}",
                    reason="BODY_TOO_COMPLEX",
                )
        if size.nesting > MAX_NESTING:
            raise InvalidArgument(
                f"the body's lists and objects are nested more than {MAX_NESTING} levels deep",
                reason="BODY_TOO_COMPLEX",
            )
        await asyncio.sleep(0)


class JsonSize:
    """Counts the values and objects of a JSON text that arrives in pieces. For this, it counts the commas and brackets
    outside of strings.

    If an object or list has only one value, this value is not counted separately. ``nesting`` is the maximum depth of
    lists and objects.
    """

    def __init__(self) -> None:
        self.values = 0
        self.objects = 0
        self.nesting = 0
        self._level = 0
        self._in_string = False
        self._rest = b""

    def add(self, piece: bytes) -> None:
        """Count the values and objects in the next piece of the text."""
        text = self._rest + piece
        num_backslashes = len(text) - len(text.rstrip(b"\\"))
        self._rest = b"\\" if num_backslashes % 2 else b""
        text = text[: len(text) - len(self._rest)]
        parts = text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        objects = outside.count(b"{")
        self.objects += objects
        self.values += outside.count(b",") + outside.count(b"[") + objects
        levels = [*accumulate(map(_STEP.__getitem__, outside.translate(None, _NO_BRACKETS)), initial=self._level)]
        self.nesting = max(self.nesting, max(levels))
        self._level = levels[-1]


def _may_exceed(text: bytes, max_values: int, max_objects: int) -> bool:
    """Return True if the limits could be exceeded, because they are exceeded when commas and brackets in strings are
    counted too.
    """
    if len(text) <= min(max_values, max_objects, MAX_NESTING):
        return False
    objects, lists = text.count(b"{"), text.count(b"[")
    return objects > max_objects or objects + lists > MAX_NESTING or objects + lists + text.count(b",") > max_values


_LARGE = 1024 * 1024
"""Size in bytes from which on a body is converted in a thread."""

_PARTS_PER_TURN = 64
"""Number of received parts of a form that are parsed in one iteration of the event loop. A part has at most 64 KiB."""

T = TypeVar("T")


class ClientGone(Exception):  # noqa: N818 - not an error
    """Raised if the client disconnects before its body is complete."""


class Bodies:
    """Registry of all request bodies that are in memory. ``HttpConfig`` has the limits.

    If the bodies together have too many bytes, the largest of the bodies that are being read is dropped. If too many
    bodies are being read, the oldest of them is dropped. Clients that stop sending can therefore not block other
    clients.
    """

    def __init__(
        self, config: HttpConfig, registry: CollectorRegistry | None = None, warnings: WarningLog | None = None
    ) -> None:
        """Create the registry of bodies.

        ``registry`` is the metrics registry for the number of unknown fields. None means that they are not counted.
        ``warnings`` is the log of warnings that all protocols share. None means a separate log.
        """
        self.config = config
        self.warnings = warnings or WarningLog(registry)
        self.policy = FieldPolicy(refuse=config.unknown_fields == "refuse", registry=registry)
        self.in_flight = InFlight()
        self._reading: dict[Body, None] = {}  # the oldest body comes first

    def open(self, client: str, content_type: str = "") -> "Body":
        """Return the body of a new call, for use in a ``with`` block. ``client`` is the name of the caller, from
        ``client_of``. ``content_type`` is the header of the request, which only forms need.
        """
        return Body(self, client, content_type)

    def begin(self, body: "Body") -> None:
        """Record that the reading of a body has begun."""
        limit = self.config.max_requests
        if len(self._reading) >= limit:
            oldest = next(iter(self._reading))
            oldest.give_way(f"{len(self._reading)} HTTP bodies are being read; http.max_requests is {limit}", 0)
        self._reading[body] = None

    def end(self, body: "Body") -> None:
        """Record that the reading of a body has ended. Idempotent."""
        self._reading.pop(body, None)

    def make_room(self) -> None:
        """Drop bodies that are being read, until the total size is within the limit or no such body remains."""
        limit = self.config.max_body_bytes_in_flight
        while (total := self.in_flight.length) > limit and self._reading:
            largest = max(self._reading, key=lambda body: body.size)
            message = f"HTTP bodies of {total} bytes would be in memory; http.max_body_bytes_in_flight is {limit}"
            largest.give_way(message, total - limit)


class Body:
    """Body of one call, used as ``with bodies.open(client) as body``.

    The handler calls ``read``, then ``decode`` or ``decode_form``, and then ``close`` once the call is admitted. The bytes
    of the body, including its decoded form, count towards the limit until ``close``. Leaving the ``with`` block also
    closes the body.
    """

    def __init__(self, bodies: Bodies, client: str, content_type: str = "") -> None:
        self.size = 0
        self._client = client
        self._content_type = content_type
        self._bodies = bodies
        self._parts: list[bytes] = []
        self._read = False
        self._refusal: ResourceExhausted | None = None
        self._wait: asyncio.Timeout | None = None
        self._closed = False
        self._is_checked = False
        self._form: list[Part] | None = None

    def __enter__(self) -> "Body":
        self._bodies.in_flight.enter()
        self._bodies.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop counting the bytes of the body. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._bodies.end(self)
        self._parts.clear()
        self._form = None
        self._bodies.in_flight.leave(self.size, served=self._read)

    async def read(self, receive: Receive, announced: int | None = None, encoding: str = "") -> None:
        """Read the complete body of the request.

        Args:
            receive: the ASGI receive function.
            announced: length in bytes that the client announced, or None.
            encoding: value of ``Content-Encoding``.

        Raises:
            HttpError: with status 408 if the body arrives too slowly, 413 if it is too large, 415 if its compression is
                not known, and 400 if it is damaged.
            ResourceExhausted: the body was dropped, because the limit on bodies in memory was reached.
            ClientGone: the client disconnected.
        """
        decompressor = decompressor_of(encoding)
        seconds = self._bodies.config.body_timeout
        if announced is not None:
            self._check_size(f"{announced}", announced)
        try:
            async with asyncio.timeout(seconds) as self._wait:
                await self._take(receive, decompressor)
        except TimeoutError:
            if self._refusal is not None:
                raise self._refusal from None
            raise HttpError(
                408,
                f"the body was not complete after {seconds:g} s: only {self.size} bytes had arrived; http.body_timeout "
                f"is {seconds:g}",
                "body_timeout",
            ) from None
        finally:
            self._wait = None
            self._bodies.end(self)
        self._read = True

    async def decode(self, kind: type[T]) -> T:
        """Decode the body to a struct, and free the bytes of the body. Raises InvalidArgument, which names the faulty
        field.
        """
        data = await self._checked_text()
        self._parts.clear()
        body = decode(data, kind)
        await self._bodies.policy.check(data, kind, self._client)
        return body

    async def peek(self, kind: type[T]) -> T:
        """Decode some fields of the body to a struct, and keep the body for ``decode``. Raises InvalidArgument, which
        names the faulty field.
        """
        return decode(await self._checked_text(), kind)

    async def _checked_text(self) -> bytes:
        """Return the JSON text of the body. Raises InvalidArgument if the text has too many values."""
        if not self._is_checked:
            data = b"".join(self._parts).removeprefix(codecs.BOM_UTF8)
            self._parts = [data]
            config = self._bodies.config
            await check_json_size(data, max_values=config.max_body_values, max_objects=config.max_body_objects)
            self._is_checked = True
        return self._parts[0]

    async def decode_form(self, kind: type[T]) -> T:
        """Decode the body to a struct, if the body has the type multipart/form-data, and free the bytes of the body.

        The fields of the struct with the type bytes are files. All other values of the form are texts, which are
        converted to the types of the fields. Fields without text count as not set.

        Raises:
            InvalidArgument: the form or a field is not valid.
            HttpError: with status 415 if the body has another type.
        """
        values = await self.peek_form(kind)
        self._form = None
        body = converted(values, kind)
        await self._bodies.policy.check(as_json(values, kind), kind, self._client)
        return body

    async def peek_form(self, kind: type) -> dict[str, Any]:
        """Return the fields of the form by name, as ``values_of`` does, and keep the form for ``decode_form``. Raises the
        errors of ``decode_form``.
        """
        if self._form is None:
            reader = FormReader(self._content_type, file_fields(kind))
            parts, self._parts = self._parts, []
            parts.reverse()
            while parts:
                for _ in range(min(len(parts), _PARTS_PER_TURN)):
                    reader.feed(parts.pop())
                await asyncio.sleep(0)
            self._form = reader.finish()
        return values_of(self._form, kind)

    async def converted(self, convert: Callable[[], T]) -> T:
        """Return the result of ``convert`` for the decoded body. For a large body, ``convert`` runs in a thread,
        because the body may contain videos.
        """
        return await asyncio.to_thread(convert) if self.size > _LARGE else convert()

    def give_way(self, message: str, excess: int) -> None:
        """Stop reading the body, so that ``read`` raises ResourceExhausted with ``message``. ``excess`` is the number
        of bytes above the limit.
        """
        self._refusal = ResourceExhausted(message, retry_after=self._bodies.in_flight.retry_after(1, excess))
        self._forget()
        self._bodies.end(self)
        if self._wait is not None:
            self._wait.reschedule(0)

    async def _take(self, receive: Receive, decompressor: Decompressor | None) -> None:
        limit, more = self._bodies.config.max_body_bytes, True
        while more:
            if self._refusal is not None:
                raise self._refusal
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            more = message.get("more_body", False)
            if decompressor is None:
                self._check_size(f"more than {limit}", self.size + len(part))
                self._keep(part)
                continue
            for piece in decompressor.pieces(part):
                self._check_size(f"more than {limit}", self.size + len(piece), decompressed=True)
                self._keep(piece)
                await asyncio.sleep(0)
                if self._refusal is not None:
                    raise self._refusal
        if decompressor is not None:
            decompressor.finish()
        if self._refusal is not None:
            raise self._refusal

    def _check_size(self, told: str, size: int, *, decompressed: bool = False) -> None:
        limit = self._bodies.config.max_body_bytes
        if size > limit:
            when = " when it is decompressed" * decompressed
            raise HttpError(
                413, f"the body has {told} bytes{when}; http.max_body_bytes is {limit}", "request_too_large"
            )

    def _keep(self, part: bytes) -> None:
        self._parts.append(part)
        self.size += len(part)
        self._bodies.in_flight.length += len(part)
        self._bodies.make_room()

    def _forget(self) -> None:
        self._bodies.in_flight.length -= self.size
        self.size = 0
        self._parts.clear()

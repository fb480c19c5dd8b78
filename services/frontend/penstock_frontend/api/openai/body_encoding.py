"""Bodies that clients have compressed: ``Content-Encoding`` gzip, deflate, br or zstd.

Decompression yields pieces of bounded size, so that a small body which becomes a large one is refused as soon as it is too large,
and other calls go on meanwhile.
"""

import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

import brotli  # type: ignore[import-untyped]

from penstock_frontend.api.openai.errors import HttpError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PIECE = 256 * 1024
"""Bytes that are decompressed at once, about; brotli gives up to four times as many."""
_WINDOW_LOG = 23
"""zstd: 8 MiB, the most that HTTP allows (RFC 9659)."""


class Decompressor(Protocol):
    """Takes a compressed body in parts."""

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """What comes of one more part, in pieces of about ``PIECE`` bytes. Raises HttpError 400 for one that is damaged."""

    def finish(self) -> None:
        """There are no more parts. Raises HttpError 400 if the body is not complete."""


def decompressor_of(encoding: str) -> Decompressor | None:
    """For a ``Content-Encoding``; None if the body is as it is. Raises HttpError 415 for one that is not known, or several."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return None
    if name not in _MAKERS:
        known = ", ".join(sorted({*_MAKERS} - {"x-gzip"}))
        raise HttpError(
            415,
            f"Content-Encoding is {encoding[:40]!r}; served: {known}, one at a time, or none",
            "unsupported_content_encoding",
        )
    return _Checked(name, _MAKERS[name]())


class _Codec(Protocol):
    @property
    def ended(self) -> bool:
        """Whether the end of the body has come."""

    @property
    def surplus(self) -> bool:
        """Whether more came behind it."""

    def feed(self, part: bytes) -> Iterator[bytes]:
        """Pieces of what comes of a part that is not empty."""


class _Checked:
    """Says what is wrong in words of HTTP."""

    def __init__(self, name: str, codec: _Codec) -> None:
        self._name = name
        self._codec = codec
        self._empty = True

    def pieces(self, part: bytes) -> Iterator[bytes]:
        if not part:
            return
        self._empty = False
        if self._codec.ended:
            raise self._damaged("more follows its end")
        try:
            yield from self._codec.feed(part)
        except (zlib.error, brotli.error, zstd.ZstdError) as e:
            raise self._damaged(str(e)) from None
        if self._codec.surplus:
            raise self._damaged("more follows its end")

    def finish(self) -> None:
        if not self._empty and not self._codec.ended:
            raise self._damaged("it ends too early")

    def _damaged(self, why: str) -> HttpError:
        return HttpError(400, f"the body cannot be decompressed as {self._name}: {why[:200]}", "invalid_body")


class _Zlib:
    """``window``: zlib's ``wbits``; None: with zlib's header, as HTTP wants deflate, or without, as some clients send it."""

    def __init__(self, window: int | None) -> None:
        self._window = window
        self._first: bytes | None = b""
        """What came before the header was known; None behind it."""
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
    """brotli refuses what follows the end."""

    def __init__(self) -> None:
        self._stream = brotli.Decompressor()

    @property
    def ended(self) -> bool:
        return bool(self._stream.is_finished())

    def feed(self, part: bytes) -> Iterator[bytes]:
        piece = self._stream.process(part, output_buffer_limit=PIECE)
        while (
            piece or not self._stream.can_accept_more_data()
        ):  # a last piece of nothing may be what finishes the stream
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
    """RFC 1950: method 8, and a checksum over the first two bytes."""
    return start[0] & 0x0F == 8 and int.from_bytes(start[:2], "big") % 31 == 0


_MAKERS: dict[str, Callable[[], _Codec]] = {
    "br": _Brotli,
    "deflate": lambda: _Zlib(None),
    "gzip": lambda: _Zlib(31),
    "x-gzip": lambda: _Zlib(31),
    "zstd": _Zstd,
}

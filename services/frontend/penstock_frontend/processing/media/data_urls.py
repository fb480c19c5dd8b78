"""Decoder of ``data:`` URLs, which also accepts common deviations from RFC 2397 and RFC 4648."""

import binascii
import re
import time
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from penstock_common.errors import quoted

_HEAD = re.compile(r"[ \t\r\n\f]*data:([^,]{0,256}?)(; *base64 *)?,", re.IGNORECASE)
_WHITESPACE = " \t\r\n\f"
_SLICE = 128 * 1024
"""Number of base64 characters to decode per call, which is a multiple of four.

Decoding this many characters of canonical base64 blocks the GIL for half a millisecond.
"""
_MAX_PADDING = 2
_DIGITS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_TO_STANDARD = bytes.maketrans(b"-_", b"+/")
_TOKEN = re.compile(r"%[0-9A-Fa-f]{2}|[\s\S]")


class DataUrlError(ValueError):
    """Error for a text that is not a ``data:`` URL, or whose data cannot be decoded.

    The message is the text that follows the name of the field in error messages, such as ``is empty``.
    """


class DataUrl(NamedTuple):
    """A ``data:`` URL whose data have not been decoded yet."""

    text: str
    start: int
    """Position of the first character of the data in the URL."""
    is_base64: bool

    @property
    def most_bytes(self) -> int:
        """Upper bound of the number of bytes after decoding, computed from the length of the text.

        For base64 without whitespace, the upper bound is the exact number.
        """
        length = len(self.text) - self.start
        if not self.is_base64:
            return length
        return (length * 3 - 3 * self.text.count("=", max(self.start, len(self.text) - _MAX_PADDING))) // 4


def is_data_url(url: str) -> bool:
    """Return whether a URL is a ``data:`` URL. Whitespace may precede the URL."""
    return (url if url[:1] not in _WHITESPACE else url.lstrip(_WHITESPACE))[:5].lower() == "data:"


def parse_data_url(url: str) -> DataUrl:
    """Find where the data of a ``data:`` URL begin. The media type in the URL is ignored.

    Raises:
        DataUrlError: The URL has no comma near its start, or it has neither ``;base64`` nor a percent-encoded byte.
    """
    if (head := _HEAD.match(url)) is None:
        raise DataUrlError("is not a data: URL, because it has no comma after the media type")
    if head.end() == len(url):
        raise DataUrlError("is empty")
    is_base64 = head[2] is not None
    if not is_base64 and "%" not in url:
        # an image or audio file cannot be written into a URL without base64 or percent-encoding
        raise DataUrlError("is a data: URL without ;base64 before its comma")
    return DataUrl(url, head.end(), is_base64)


def decode_data_url(url: DataUrl, *, unwritten: int = 0) -> bytes:
    """Decode the data of a ``data:`` URL. ``unwritten`` has the same meaning as in ``decode_base64``.

    Raises:
        DataUrlError: The data cannot be decoded.
    """
    if url.is_base64:
        return decode_base64(url.text, url.start, len(url.text), unwritten=unwritten)
    decoded = []
    for begin, piece in _slices(url.text, url.start, len(url.text)):
        if not piece.isascii():
            wrong = next(index for index, character in enumerate(piece) if not character.isascii())
            raise _wrong(piece[wrong], begin + wrong - unwritten, "which must be percent-encoded")
        decoded.append(unquote_to_bytes(piece))
    return b"".join(decoded)


def decode_base64(text: str, start: int, end: int, *, unwritten: int = 0) -> bytes:
    """Decode the base64 text ``text[start:end]``, which may have any common form of base64.

    The function accepts both alphabets (RFC 4648, sections 4 and 5), whitespace, missing padding and percent-encoding.

    Args:
        text: Text of a request that contains the base64.
        start: Position of the first base64 character.
        end: Position after the last base64 character.
        unwritten: Number of characters at the start of ``text`` that Penstock added to the client's text.

    Raises:
        DataUrlError: The text is not base64. The message has the first wrong character, and the position of this
            character in the client's text, counted from 1.
    """
    if start == end:
        raise DataUrlError("is empty")
    try:
        return _decode_canonical(text, start, end)
    except ValueError:
        return _decode_lenient(text, start, end, unwritten)


def _decode_canonical(text: str, start: int, end: int) -> bytes:
    """Decode base64 text that is strictly valid. Raises ValueError if the text is not."""
    decoded: list[bytes] = []
    for begin in range(start, end, _SLICE):
        if decoded:
            time.sleep(0)  # release the interpreter's lock between two pieces, so that other threads can run
        decoded.append(binascii.a2b_base64(text[begin : min(begin + _SLICE, end)], strict_mode=True))
    data = decoded[0] if len(decoded) == 1 else b"".join(decoded)
    # Check the length, because binascii accepts more than two padding characters, and accepts padding at the end of
    # every slice.
    if len(data) != (end - start) // 4 * 3 - text.count("=", max(start, end - _MAX_PADDING), end):
        raise ValueError("padding in a wrong place")
    return data


def _decode_lenient(text: str, start: int, end: int, unwritten: int) -> bytes:
    decoded: list[bytes] = []
    rest = b""  # the characters at the end of a slice that do not form a complete group of four
    num_digits = padding = 0
    for begin, piece in _slices(text, start, end):
        raw = piece.encode("utf-8", "replace")
        written = unquote_to_bytes(raw) if b"%" in raw else raw
        digits = written.translate(_TO_STANDARD, _WHITESPACE.encode())
        unpadded = digits.rstrip(b"=")
        if unpadded.translate(None, _DIGITS) or (padding and unpadded) or padding + len(digits) - len(unpadded) > 2:
            raise _first_wrong(piece, begin - unwritten, padding)
        padding += len(digits) - len(unpadded)
        num_digits += len(unpadded)
        rest += unpadded
        whole = len(rest) // 4 * 4
        decoded.append(binascii.a2b_base64(rest[:whole]))
        rest = rest[whole:]
    if not num_digits:
        raise DataUrlError("is empty")
    if len(rest) == 1:
        raise DataUrlError(
            f"has {num_digits} base64 characters, but the number of characters can never be a multiple of four "
            "plus one; the text "
            "is cut off, or a character is missing"
        )
    decoded.append(binascii.a2b_base64(rest + b"=" * (-len(rest) % 4)))
    return b"".join(decoded)


def _slices(text: str, start: int, end: int) -> Iterator[tuple[int, str]]:
    """Yield the text in pieces, each with its position. No piece ends inside a percent-encoded byte."""
    begin = start
    while begin < end:
        if begin > start:
            time.sleep(0)  # release the interpreter's lock between two pieces, so that other threads can run
        stop = begin + _SLICE
        if (percent := text.find("%", stop - 2, stop)) >= 0:
            stop = percent + 3
        stop = min(stop, end)
        yield begin, text[begin:stop]
        begin = stop


def _first_wrong(piece: str, begin: int, padding: int) -> DataUrlError:
    """Return the error for the first character of a piece that is not a base64 character.

    ``padding`` is the number of ``=`` characters in the text before this piece.
    """
    for token in _TOKEN.finditer(piece):
        value = unquote_to_bytes(token[0]) if len(token[0]) == 3 else token[0].encode("utf-8", "replace")
        if value.translate(_TO_STANDARD, _WHITESPACE.encode()) == b"":
            continue
        if value == b"=":
            padding += 1
        if padding > _MAX_PADDING or (value != b"=" and (padding or value.translate(None, _DIGITS + b"-_"))):
            why = "after base64's padding" if padding else "which is not base64"
            return _wrong(token[0], begin + token.start(), why)
    raise AssertionError("every character of the slice is base64")


def _wrong(character: str, position: int, why: str) -> DataUrlError:
    """Return the error for a wrong character at this position. The position is counted from 0."""
    return DataUrlError(f"has {quoted(character)} at character {position + 1}, {why}")

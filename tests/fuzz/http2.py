"""HTTP/2 frames as hand-written bytes, including frames that no library would write."""

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
INITIAL_WINDOW_SIZE = 4
WINDOW = 65_535
"""Initial flow-control window in bytes."""
_HEAD = struct.Struct(">BHBBI")


class Frame(NamedTuple):
    """A received frame."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def raw_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return the bytes of a frame."""
    size = len(payload)
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def frames_in(received: bytes) -> Iterator[Frame]:
    """Yield the complete frames in the bytes from a server."""
    at = 0
    while at + _HEAD.size <= len(received):
        high, low, kind, flags, stream = _HEAD.unpack_from(received, at)
        end = at + _HEAD.size + (high << 16 | low)
        if end > len(received):
            return
        yield Frame(kind, flags, stream & 0x7FFF_FFFF, received[at + _HEAD.size : end])
        at = end


def setting(identifier: int, value: int) -> bytes:
    """Return one entry of a SETTINGS frame."""
    return struct.pack(">HI", identifier, value)


def header(name: bytes, value: bytes) -> bytes:
    """Return a header as an uncompressed literal without indexing."""
    return b"\0" + _text(name) + _text(value)


def call_headers(path: bytes, more: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """Return the header block of a gRPC call."""
    usual = [(b":path", path), (b":authority", b"x"), (b"content-type", b"application/grpc"), (b"te", b"trailers")]
    return b"\x83\x86" + b"".join(header(*each) for each in (*usual, *more))  # POST, over http


def message(payload: bytes) -> bytes:
    """Return a gRPC message in the form for DATA frames."""
    return struct.pack(">BI", 0, len(payload)) + payload


def call(stream: int, path: bytes, payload: bytes, *, ends: bool = True) -> bytes:
    """Return a gRPC call with one message. ``ends`` says whether the client half-closes the stream."""
    return raw_frame(HEADERS, END_HEADERS, stream, call_headers(path)) + raw_frame(
        DATA, END_STREAM if ends else 0, stream, message(payload)
    )


def _text(text: bytes) -> bytes:
    length = len(text)
    if length < 0x7F:
        return bytes([length]) + text
    rest, coded = length - 0x7F, bytearray([0x7F])
    while rest > 0x7F:
        coded.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*coded, rest]) + text

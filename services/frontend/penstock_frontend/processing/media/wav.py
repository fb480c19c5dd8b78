"""WAV files whose header does not say how long they are, because their writer did not know it yet."""

import struct

_UNKNOWN = (0, 0xFFFF_FFFF)
"""Sizes that programs write before they know how much sound a stream has."""
_RIFF_HEADER = 12
_CHUNK = struct.Struct("<4sI")


def with_size(data: bytes) -> bytes:
    """Return the file with the size of its samples in the header, where the header has 0 or 0xFFFFFFFF.

    Everything behind such a header counts as samples, unless its size is 0 and other chunks follow to the end of the file.
    Files that say their size, and files without samples, are returned as they are.
    """
    offset = _RIFF_HEADER
    while offset + _CHUNK.size <= len(data):
        name, size = _CHUNK.unpack_from(data, offset)
        start = offset + _CHUNK.size
        if name == b"data":
            if size not in _UNKNOWN or (size == 0 and _are_chunks(data, start)):
                return data
            length = len(data) - start
            riff = struct.pack("<4sI", b"RIFF", len(data) - 8)
            return b"".join((riff, data[8:offset], _CHUNK.pack(name, length), memoryview(data)[start:]))
        offset = start + size + size % 2
    return data


def _are_chunks(data: bytes, offset: int) -> bool:
    """Return whether nothing but whole chunks is there up to the end of the file."""
    while offset + _CHUNK.size <= len(data):
        name, size = _CHUNK.unpack_from(data, offset)
        if not (name.isascii() and name.decode().isprintable()):
            return False
        offset += _CHUNK.size + size + size % 2
    return offset in (len(data), len(data) + 1)

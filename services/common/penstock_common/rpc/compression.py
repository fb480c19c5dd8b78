"""Compressed messages of clients, decompressed here: gRPC would decompress any number of bytes before it looks at its limit."""

import zlib

from penstock_common.errors import ResourceExhausted

MAX_DECOMPRESSED_BYTES = 4 * 1024 * 1024
"""Bytes that a compressed message has when it is decompressed, at most."""
GZIP_ONLY = [
    ("grpc.compression_enabled_algorithms_bitset", 0b101),  # identity and gzip; calls with others end as UNIMPLEMENTED
    ("grpc.per_message_decompression", 0),
]
"""Arguments of a server whose deserializers call ``decompressed``."""
NOT_COMPRESSED = [("grpc.compression_enabled_algorithms_bitset", 0b001)]
"""Arguments of a server that takes no compressed messages."""
_GZIP = b"\x1f\x8b"
"""The first bytes of gzip. No message of protobuf begins with them: 0x1f would be a field of a type that does not exist."""
_WITH_GZIP_HEADER = 31


def decompressed(data: bytes, limit: int = MAX_DECOMPRESSED_BYTES) -> bytes:
    """Return a message as its bytes were before gzip; other messages as they are.

    Args:
        data: The message as it came.
        limit: Bytes that a compressed message may have when it is decompressed.

    Raises:
        ResourceExhausted: It has more bytes than the limit; no more than these are decompressed.
        zlib.error: It is broken.
    """
    if not data.startswith(_GZIP):
        return data
    decompressor = zlib.decompressobj(wbits=_WITH_GZIP_HEADER)
    plain = decompressor.decompress(data, limit + 1)
    if len(plain) > limit:
        raise ResourceExhausted(
            f"a compressed message has more than {limit} bytes when it is decompressed; send it without compression",
            reason="MESSAGE_TOO_LARGE",
        )
    if not decompressor.eof or decompressor.unused_data:
        raise zlib.error("the compressed message is cut off, or something follows it")
    return plain

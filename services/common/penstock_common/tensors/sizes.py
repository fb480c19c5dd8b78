"""What goes inline, what in chunks, and how much at once: of both ends of a session."""

from typing import NamedTuple

Buffer = bytes | bytearray
"""The elements of a tensor."""

DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""What an end takes that does not say what it takes."""
MAX_TENSOR_BYTES = 256 * 1024 * 1024
"""Of tensors in chunks that an end holds for one session at once."""
MAX_UNANNOUNCED_BYTES = 64 * 1024 * 1024
"""The same for a session whose frontend does not announce its tensors."""
MAX_INLINE_BYTES = 64 * 1024
"""A tensor of up to so many bytes goes inline."""
MAX_CHUNK_BYTES = 256 * 1024
"""The bytes of a chunk, at most."""
STALE_AFTER = 30.0
"""Seconds after which a tensor is dropped of which nothing more has come, and that no message has referred to."""

_CHUNK_OVERHEAD = 64
"""Bytes of a message around a chunk's data, at most."""


class Limits(NamedTuple):
    """What both ends of a stream take: bytes of a message, and of all tensors in chunks at once, 0 where none are taken."""

    max_message_bytes: int
    max_tensor_bytes: int

    @classmethod
    def of(cls, own: int, max_message_bytes: int, max_tensor_bytes: int) -> "Limits":
        """Those towards an end that says these of itself, 0 where it says nothing, on a connection that sends ``own`` bytes."""
        return cls(min(own, max_message_bytes or DEFAULT_MAX_MESSAGE_BYTES), max_tensor_bytes)

    @property
    def inline_bytes(self) -> int:
        """The largest tensor that goes inline where chunks are taken."""
        return min(MAX_INLINE_BYTES, self.max_message_bytes // 2)

    @property
    def chunk_bytes(self) -> int:
        """The bytes of a chunk."""
        return min(MAX_CHUNK_BYTES, self.max_message_bytes - _CHUNK_OVERHEAD)

"""How many bytes of large messages a server holds at once."""

from typing import Any

from penstock_common.errors import ResourceExhausted

SMALL = 64 * 1024
"""Bytes of a message that is not counted."""


class MessagesInFlight:
    """Counts the messages that calls have, from when they are decoded until nobody holds them. ``limit`` in bytes, which
    ``setting`` names in errors. On one event loop.
    """

    def __init__(self, limit: int, setting: str) -> None:
        self._limit = limit
        self._setting = setting
        self.num_bytes = 0

    def refusal(self, size: int) -> ResourceExhausted | None:
        """Why a message of this size is not taken now. One is taken whatever its size where no other is held."""
        total = self.num_bytes + size
        if size <= SMALL or not self.num_bytes or total <= self._limit:
            return None
        return ResourceExhausted(
            f"messages of {total} bytes would be in memory; {self._setting} is {self._limit}",
            reason="MESSAGES_IN_FLIGHT",
            retry_after=1.0,
        )

    def hold(self, message: Any, size: int) -> Any:
        """The message or, where it is counted, a Held with it."""
        return message if size <= SMALL else Held(self, message, size)


class Held:
    """A message that is counted while this lives: gRPC keeps what it has decoded, with the bytes it is made of, until the call
    has ended.
    """

    __slots__ = ("_size", "_where", "message")

    def __init__(self, where: MessagesInFlight, message: Any, size: int) -> None:
        self.message = message
        self._where = where
        self._size = size
        where.num_bytes += size

    def release(self) -> None:
        """Count it no more. Idempotent."""
        self._where.num_bytes -= self._size
        self._size = 0

    def __del__(self) -> None:
        self.release()

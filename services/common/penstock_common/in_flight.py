"""How many bytes of what is large a service holds at once: messages of clients, answers to them."""

from collections.abc import Callable
from typing import Any

from penstock_common.errors import ResourceExhausted

SMALL = 64 * 1024
"""Bytes of what is not counted."""


class BytesInFlight:
    """Counts what calls have, from when it is there until nobody holds it. On one event loop.

    ``limit`` tells it in bytes, as it is now, and ``setting`` names it in errors. ``what``: the plural of what is counted, as in
    "messages".
    """

    def __init__(self, limit: Callable[[], int], setting: str, *, what: str = "messages") -> None:
        self._limit = limit
        self._setting = setting
        self._what = what
        self.num_bytes = 0

    def refusal(self, size: int) -> ResourceExhausted | None:
        """Why so many bytes are not taken now. They are taken, however many, where no others are held."""
        total = self.num_bytes + size
        if size <= SMALL or not self.num_bytes or total <= (limit := self._limit()):
            return None
        return ResourceExhausted(
            f"{self._what} of {total} bytes would be in memory; {self._setting} is {limit}",
            reason=f"{self._what.upper()}_IN_FLIGHT",
            retry_after=1.0,
        )

    def hold(self, message: Any, size: int) -> Any:
        """The message or, where it is counted, a Held with it."""
        return message if size <= SMALL else Held(self, message, size)


class Held:
    """Something that is counted while this lives. Of a gRPC call that is the message: gRPC keeps what it has decoded, with the
    bytes it is made of, until the call has ended.
    """

    __slots__ = ("_size", "_where", "message")

    def __init__(self, where: BytesInFlight, message: Any, size: int) -> None:
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

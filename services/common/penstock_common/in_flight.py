"""Limit on the bytes of large messages and answers that a service has in memory at the same time."""

from collections.abc import Callable
from typing import Any

from penstock_common.errors import ResourceExhausted

SMALL = 64 * 1024
"""Size in bytes up to which messages are not counted."""


class BytesInFlight:
    """Counter of the bytes of messages from their arrival until their release. Use a counter in one event loop only.

    Args:
        limit: Returns the current limit in bytes.
        setting: Name of the limit's setting, for errors.
        what: Plural noun for the counted objects, such as "messages".
    """

    def __init__(self, limit: Callable[[], int], setting: str, *, what: str = "messages") -> None:
        self._limit = limit
        self._setting = setting
        self._what = what
        self.num_bytes = 0

    def refusal(self, size: int) -> ResourceExhausted | None:
        """Return the error if a message of ``size`` bytes would exceed the limit, else None.

        While no message is counted, a message of any size is accepted.
        """
        total = self.num_bytes + size
        if size <= SMALL or not self.num_bytes or total <= (limit := self._limit()):
            return None
        return ResourceExhausted(
            f"{self._what} of {total} bytes would be in memory; {self._setting} is {limit}",
            reason=f"{self._what.upper()}_IN_FLIGHT",
            retry_after=1.0,
        )

    def hold(self, message: Any, size: int) -> Any:
        """Return the message, or if the message is counted, a ``Held`` that contains the message."""
        return message if size <= SMALL else Held(self, message, size)


class Held:
    """Message whose bytes count towards the limit while this object exists.

    In a gRPC call, this object replaces the message. gRPC keeps the object until the call ends, so the message and its
    bytes can be freed earlier.
    """

    __slots__ = ("_size", "_where", "message")

    def __init__(self, where: BytesInFlight, message: Any, size: int) -> None:
        self.message = message
        self._where = where
        self._size = size
        where.num_bytes += size

    def release(self) -> None:
        """Stop counting the message. Idempotent."""
        self._where.num_bytes -= self._size
        self._size = 0

    def __del__(self) -> None:
        self.release()

"""Limit on the bytes of large messages and answers that a service holds at a time."""

from collections.abc import Callable
from typing import Any

from penstock_common.errors import ResourceExhausted

SMALL = 64 * 1024
"""Maximum size in bytes of messages that are not counted."""


class BytesInFlight:
    """Counts the bytes of messages from their arrival until they are released. Belongs to one event loop.

    Args:
        limit: Returns the current limit in bytes.
        setting: Name of the limit's setting, for errors.
        what: Plural of what is counted, such as "messages".
    """

    def __init__(self, limit: Callable[[], int], setting: str, *, what: str = "messages") -> None:
        self._limit = limit
        self._setting = setting
        self._what = what
        self.num_bytes = 0

    def refusal(self, size: int) -> ResourceExhausted | None:
        """Return the error if ``size`` more bytes exceed the limit. A message of any size is accepted while no other is
        held.
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
        """Return the message, or a Held with the message if it is counted."""
        return message if size <= SMALL else Held(self, message, size)


class Held:
    """Counted message. The message counts against the limit while this object exists.

    For a gRPC call, this object replaces the message, because gRPC keeps the decoded message and its bytes until the
    call ends.
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

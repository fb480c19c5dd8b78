"""Bytes on their way from the engine that has them."""

from penstock_common.errors import InvalidArgument

MESSAGE_BYTES = 1024 * 1024
"""Of blocks in a message, about."""
WINDOW_BYTES = 32 * 1024 * 1024
"""That are sent and not acknowledged, at most."""


class Window:
    """How much of a stream was sent, and how much has come. A block larger than the window is sent alone."""

    def __init__(self, limit: int = WINDOW_BYTES) -> None:
        self._limit = limit
        self.num_sent = 0
        self.num_acknowledged = 0

    @property
    def num_under_way(self) -> int:
        """Bytes that have not come yet, as far as is known."""
        return self.num_sent - self.num_acknowledged

    def has_room(self, size: int) -> bool:
        """Whether so many bytes may be sent now."""
        return not self.num_under_way or self.num_under_way + size <= self._limit

    def sent(self, size: int) -> None:
        """So many bytes are on their way."""
        self.num_sent += size

    def acknowledged(self, num_bytes: int) -> None:
        """So many have come since the begin. Raises InvalidArgument for fewer than before, or more than were sent."""
        if not self.num_acknowledged <= num_bytes <= self.num_sent:
            raise InvalidArgument(
                f"ack.num_bytes is {num_bytes}; between {self.num_acknowledged} and {self.num_sent} bytes may have come",
                field="ack.num_bytes",
            )
        self.num_acknowledged = num_bytes

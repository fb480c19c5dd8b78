"""Messages that cannot be read, as errors of their senders: gRPC itself would call them UNKNOWN, with a traceback."""

from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any, NamedTuple

from penstock_common.errors import InvalidArgument

REASON = "UNREADABLE_MESSAGE"


class Unreadable(NamedTuple):
    """Stands for a message. ``why``: what the parser says."""

    why: str


def reader(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """A deserializer that does not raise: it returns Unreadable instead."""
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception as e:
            return Unreadable(str(e))

    return read


def checked(message: Any) -> Any:
    """The message. Raises InvalidArgument when it is Unreadable."""
    if isinstance(message, Unreadable):
        raise InvalidArgument(f"the message cannot be read: {message.why}", reason=REASON)
    return message


class CheckedMessages:
    """A stream's messages. The first that cannot be read raises InvalidArgument."""

    def __init__(self, messages: AsyncIterable[Any]) -> None:
        self._messages = messages
        self._iterator: AsyncIterator[Any] | None = None

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._iterator is None:  # gRPC complains of an iterator that was made and never asked
            self._iterator = aiter(self._messages)
        return checked(await anext(self._iterator))

"""Messages that cannot be taken, as errors of their calls: gRPC itself would call them UNKNOWN, with a traceback."""

import zlib
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any, NamedTuple

from penstock_common.errors import InvalidArgument, ResourceExhausted
from penstock_common.in_flight import BytesInFlight, Held
from penstock_common.rpc.compression import MAX_DECOMPRESSED_BYTES, decompressed

REASON = "UNREADABLE_MESSAGE"


class Unreadable(NamedTuple):
    """Stands for a message. ``why``: what the parser says."""

    why: str


class Refused(NamedTuple):
    """Stands for a message that was not decoded."""

    why: ResourceExhausted


def reader(
    deserialize: Callable[[bytes], Any] | None,
    in_flight: BytesInFlight | None = None,
    max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
) -> Callable[[bytes], Any] | None:
    """A deserializer that does not raise: it returns Unreadable or Refused instead. ``in_flight``: where large messages are
    counted; these come as Held. ``max_decompressed_bytes``: of a message that came compressed.
    """
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            data = decompressed(data, max_decompressed_bytes)
        except ResourceExhausted as e:
            return Refused(e)
        except zlib.error as e:
            return Unreadable(str(e))
        if in_flight is not None and (refusal := in_flight.refusal(len(data))) is not None:
            return Refused(refusal)
        try:
            message = deserialize(data)
        except Exception as e:
            return Unreadable(str(e))
        return message if in_flight is None else in_flight.hold(message, len(data))

    return read


def checked(message: Any) -> Any:
    """The message. Raises InvalidArgument when it is Unreadable, and why it was Refused."""
    if isinstance(message, Unreadable):
        raise InvalidArgument(f"the message cannot be read: {message.why}", reason=REASON)
    if isinstance(message, Refused):
        raise message.why
    return message.message if isinstance(message, Held) else message


class CheckedMessages:
    """A stream's messages, each counted until the next is asked for. The first that cannot be taken raises as in ``checked``."""

    def __init__(self, messages: AsyncIterable[Any]) -> None:
        self._messages = messages
        self._iterator: AsyncIterator[Any] | None = None
        self._last: Any = None

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._iterator is None:  # gRPC complains of an iterator that was made and never asked
            self._iterator = aiter(self._messages)
        if isinstance(self._last, Held):
            self._last.release()  # gRPC's own iterator lets go of it later
        self._last = await anext(self._iterator)
        return checked(self._last)

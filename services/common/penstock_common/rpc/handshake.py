"""Stream handshake: the first message, which identifies the caller, and the protocol revisions."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from penstock_common.errors import DeadlineExceeded

FIRST_MESSAGE_TIMEOUT = 10.0
"""Seconds within which a stream must send its first message."""

T = TypeVar("T")


async def first_message(messages: AsyncIterator[T], field: str) -> T | None:
    """Return the first message of a stream, or None if the stream ends without a message.

    Args:
        messages: Messages that the caller sends.
        field: Required field of the first message, for example ``hello``.

    Raises:
        DeadlineExceeded: No message arrived within FIRST_MESSAGE_TIMEOUT.
    """
    try:
        async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT):
            return await anext(aiter(messages), None)
    except TimeoutError:
        raise DeadlineExceeded(
            f"the first message, {field}, did not arrive within {FIRST_MESSAGE_TIMEOUT:g} s", field=field
        ) from None


# Protocol revisions of frontend and engine. Both ends use the lower of their two revisions.

OLDEST_REVISION = 1
"""Oldest supported revision. Each output and each frame is a separate message."""
COLUMNS_SINCE = 2
"""First revision with new tokens in columns, keyed by request number. Several frames may share a message."""
ANNOUNCED_SINCE = 3
"""First revision in which the first chunk of a tensor announces the tensor's size in bytes."""
PROTOCOL_REVISION = 3
"""Newest revision."""

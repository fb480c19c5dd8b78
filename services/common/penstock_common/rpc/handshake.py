"""How a stream begins: its first message, which says who calls, and the revisions of the contract."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from penstock_common.errors import DeadlineExceeded

# The first message of a stream, which says who calls: a stream that does not send it ends.

FIRST_MESSAGE_TIMEOUT = 10.0
"""Seconds in which a stream has to send its first message."""

T = TypeVar("T")


async def first_message(messages: AsyncIterator[T], field: str) -> T | None:
    """Return the first message of a stream, or None if the stream ends without one.

    Args:
        messages: What the caller sends.
        field: What the first message has to be, for example ``hello``.

    Raises:
        DeadlineExceeded: The message did not come within FIRST_MESSAGE_TIMEOUT.
    """
    try:
        async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT):
            return await anext(aiter(messages), None)
    except TimeoutError:
        raise DeadlineExceeded(f"{field} did not come within {FIRST_MESSAGE_TIMEOUT:g} s", field=field) from None


# Revisions of the contract between a frontend and an engine. Both ends speak the lower of their two.

OLDEST_REVISION = 1
"""Every output is a message, and so is every frame."""
COLUMNS_SINCE = 2
"""New tokens come in columns, under the numbers of their requests, and several frames may come in one message."""
ANNOUNCED_SINCE = 3
"""The first chunk of a tensor says how many bytes the tensor has."""
PROTOCOL_REVISION = 3
"""The newest."""

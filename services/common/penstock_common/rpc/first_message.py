"""The first message of a stream, which says who calls: a stream that does not send it ends."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from penstock_common.errors import DeadlineExceeded

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

"""What is to be sent to one rank."""

import asyncio
from collections import deque

from penstock_common.types.data_parallel import Reconfigure, StartDpWave


class Outbox:
    """Messages in order, for the stream that reads them."""

    def __init__(self) -> None:
        self._messages: deque[StartDpWave | Reconfigure] = deque()
        self._there = asyncio.Event()

    def put(self, message: StartDpWave | Reconfigure) -> None:
        """Send a message."""
        self._messages.append(message)
        self._there.set()

    async def next(self) -> StartDpWave | Reconfigure:
        """The next message, as soon as there is one."""
        while not self._messages:
            self._there.clear()
            await self._there.wait()
        return self._messages.popleft()

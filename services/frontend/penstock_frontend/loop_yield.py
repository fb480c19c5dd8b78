"""Work that is spread over turns of the event loop, so that a large piece of it holds nobody up."""

import asyncio
from collections import deque

SEQUENCES_PER_TURN = 32
"""Sequences that are sent to engines in one turn of the event loop; each takes some 60 us."""

NUMBERS_PER_TURN = 32_768
"""Numbers of vectors that are made into an answer in one turn of the event loop; they take some 3 ms."""


class Pace:
    """Lets in so many units of work per turn of the event loop; what is beyond waits for later turns, in its order.

    A piece of more units than are left begins where any are left: a turn takes a piece more than ``limit`` at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._is_scheduled = False

    async def take(self, units: int = 1) -> None:
        """Wait for room for so many units. Returns at once while there is some."""
        loop = asyncio.get_running_loop()
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._turn)
        if self._left > 0 and not self._waiting:
            self._left -= units
            return
        turn = loop.create_future()
        self._waiting.append((units, turn))
        await turn

    def _turn(self) -> None:
        self._left, self._is_scheduled = self._limit, False
        while self._waiting and self._left > 0:
            units, turn = self._waiting.popleft()
            if not turn.done():  # it may be cancelled
                turn.set_result(None)
                self._left -= units
        if self._waiting or self._left < self._limit:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)


def loop_time() -> float:
    """Seconds on the clock of the running event loop."""
    return asyncio.get_running_loop().time()

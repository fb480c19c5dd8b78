"""Division of large work over several iterations of the event loop, so that the work does not block other requests."""

import asyncio
from collections import deque

SEQUENCES_PER_TURN = 32
"""Number of sequences to send to engines per iteration of the event loop. Sending one sequence takes about 60 us."""

NUMBERS_PER_TURN = 32_768
"""Number of embedding elements to convert into a response per iteration of the event loop. This takes about 3 ms."""


class Pace:
    """Limits the units of work per iteration of the event loop. Further work waits for later iterations, in order.

    A piece of work starts if any units are left in the iteration. The last piece of an iteration may therefore exceed
    ``limit``.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._is_scheduled = False

    async def take(self, units: int = 1) -> None:
        """Wait until ``units`` units may run. Return without waiting if units are left in this iteration."""
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
            if not turn.done():  # the waiting task may have been cancelled
                turn.set_result(None)
                self._left -= units
        if self._waiting or self._left < self._limit:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)


def loop_time() -> float:
    """Return the time of the running event loop, in seconds."""
    return asyncio.get_running_loop().time()

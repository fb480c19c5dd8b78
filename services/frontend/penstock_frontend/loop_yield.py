"""Division of long computations over several iterations of the event loop, so that they do not block other requests."""

import asyncio
from collections import deque

SEQUENCES_PER_TURN = 32
"""Number of sequences to send to engines in one iteration of the event loop. Sending one sequence takes about 60 us."""

NUMBERS_PER_TURN = 32_768
"""Number of elements of embeddings to convert into a response in one iteration of the event loop. Converting this many
elements takes about 3 ms.
"""

PRODUCTS_PER_TURN = 4_194_304
"""Number of products of embedding elements to compute in one iteration of the event loop. Computing this many products
takes about 1 ms.
"""


class Pace:
    """Limits the amount of work, in units, in each iteration of the event loop. Work above the limit waits for later
    iterations, in order of arrival.

    A piece of work starts if any units are left in the current iteration. The last piece of work in an iteration may
    therefore exceed ``limit``.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._is_scheduled = False

    async def take(self, units: int = 1) -> None:
        """Wait until a piece of work with ``units`` units may run. Return without waiting if units are left in this
        iteration.
        """
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

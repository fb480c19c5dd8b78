"""Which requests have run out of time."""

import heapq

from penstock_enginecore.core.request import Request


class DeadlineQueue:
    """Requests with a deadline, the next one to expire first.

    A request that ends earlier stays in the heap until the dead outnumber the living; then the heap is rebuilt. So an
    end costs O(1) amortized, and memory stays in proportion to the requests alive.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, Request]] = []
        self._num_alive = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch a request; one without a deadline is ignored."""
        if request.context.deadline is not None:
            self._num_alive += 1
            heapq.heappush(self._heap, (request.context.deadline, request.key, request))

    def discard(self, request: Request) -> None:
        """Note that a request has ended."""
        if request.context.deadline is None:
            return
        self._num_alive -= 1
        if len(self._heap) > 2 * self._num_alive + 64:
            self._heap = [entry for entry in self._heap if not entry[2].finished]
            heapq.heapify(self._heap)

    def next_deadline(self) -> float | None:
        while self._heap and self._heap[0][2].finished:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_expired(self, now: float) -> list[Request]:
        """Living requests whose deadline is not after ``now``. The caller ends them."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            _, _, request = heapq.heappop(self._heap)
            if not request.finished:
                expired.append(request)
        return expired

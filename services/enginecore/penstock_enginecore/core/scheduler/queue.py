"""Waiting requests in the order of the policy."""

import heapq

from penstock_enginecore.core.request import Request

Rank = tuple[float, float, int]


def rank(request: Request, *, by_priority: bool) -> Rank:
    """What requests are ordered by: the lowest is the most urgent.

    By priority: the lower number, then the earlier arrival at the frontend. Else those that resume, then the rest, each
    first come, first served.
    """
    if by_priority:
        return request.context.priority, request.context.arrival_time, request.arrival
    return 0 if request.resumes else 1, 0, request.arrival


class RequestQueue:
    """The request whose turn is next at the head. Adding and removing, from the middle too, cost O(log n) amortized.

    First come, first served: a preempted request is at the head again, as is one that outlived another engine. Under the
    priority policy the lower number goes first, then the earlier arrival at the frontend.

    Removed requests stay in the heap until they get to its head, or outnumber the living; then the heap is rebuilt.
    """

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._requests: dict[str, Request] = {}
        self._heap: list[tuple[Rank, str]] = []
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def rank(self, request: Request) -> Rank:
        """What a request is ordered by here: the lowest is the most urgent."""
        return rank(request, by_priority=self._by_priority)

    def add(self, request: Request) -> None:
        """Take in a request that is not in the queue."""
        self._requests[request.key] = request
        self.num_tokens += request.num_tokens
        heapq.heappush(self._heap, (self.rank(request), request.key))

    def peek(self) -> Request:
        """The head. The queue must not be empty."""
        while self._heap[0][1] not in self._requests:
            heapq.heappop(self._heap)
        return self._requests[self._heap[0][1]]

    def remove(self, request: Request) -> None:
        """Take out a request that is in the queue."""
        del self._requests[request.key]
        self.num_tokens -= request.num_tokens
        if self._heap[0][1] == request.key:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._requests) + 64:
            self._heap = [(self.rank(r), key) for key, r in self._requests.items()]
            heapq.heapify(self._heap)

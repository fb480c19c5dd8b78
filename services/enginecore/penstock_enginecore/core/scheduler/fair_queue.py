"""The queue of all waiting requests."""

from collections.abc import Callable

from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.fair_shares import FairShares
from penstock_enginecore.core.scheduler.keyed_heap import KeyedHeap
from penstock_enginecore.core.scheduler.queue import Rank, rank


class FairQueue:
    """The request whose turn is next at the head. Every operation costs O(log n) amortized.

    Tenants take turns as ``FairShares`` says, each with its requests in the order of the policy. Under the priority policy the
    lower number goes first whoever it is of, and tenants share among requests of the same number. With ``fair`` False, as
    with one tenant, that order is all there is. Nothing is remembered of tenants once nothing waits.
    """

    def __init__(
        self, *, by_priority: bool, fair: bool, cost: Callable[[Request], float] = Request.take_uncharged_tokens
    ) -> None:
        """``cost``: what a tenant is charged for a request that is taken out to start, or has ended."""
        self._cost = cost
        self._by_priority = by_priority
        self._fair = fair
        self._levels: dict[int, FairShares] = {}
        self._order: KeyedHeap[int] = KeyedHeap()
        self._num_requests = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._num_requests

    def rank(self, request: Request) -> Rank:
        """The policy's order, tenants aside: the lowest is the most urgent."""
        return rank(request, by_priority=self._by_priority)

    def add(self, request: Request) -> None:
        """Take in a request that is not in the queue."""
        level = self._level(request)
        shares = self._levels.get(level)
        if shares is None:
            shares = self._levels[level] = FairShares(by_priority=self._by_priority, cost=self._cost)
            self._order.set(level, level)
        shares.add(self._tenant(request), request)
        self._num_requests += 1
        self.num_tokens += request.num_tokens

    def peek(self) -> Request:
        """The head. The queue must not be empty."""
        return self._levels[self._order.peek()].peek()

    def remove(self, request: Request) -> None:
        """Take out a request that has ended while it waited."""
        self._levels[self._level(request)].remove(self._tenant(request), request)
        self._taken_out(request)

    def take(self, request: Request) -> None:
        """Take out a request that starts."""
        self._levels[self._level(request)].take(self._tenant(request), request)
        self._taken_out(request)

    def charge(self, request: Request) -> None:
        """A request that had started has ended, and is not in the queue."""
        if (shares := self._levels.get(self._level(request))) is not None:
            shares.charge(self._tenant(request), request)

    def _taken_out(self, request: Request) -> None:
        level = self._level(request)
        self._num_requests -= 1
        self.num_tokens -= request.num_tokens
        if not self._levels[level]:
            del self._levels[level]
            self._order.remove(level)

    def _level(self, request: Request) -> int:
        return request.context.priority if self._by_priority else 0

    def _tenant(self, request: Request) -> str:
        return request.context.tenant if self._fair else ""

"""Waiting requests of one urgency, shared out between tenants by their weights."""

import math
from collections.abc import Callable

from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.keyed_heap import KeyedHeap
from penstock_enginecore.core.scheduler.queue import Rank, RequestQueue


class _Tenant:
    """A tenant with waiting requests. ``virtual_time``: tokens it was given, by its weight."""

    __slots__ = ("name", "queue", "virtual_time", "weight")

    def __init__(self, name: str, weight: float, virtual_time: float, queue: RequestQueue) -> None:
        self.name = name
        self.weight = weight
        self.virtual_time = virtual_time
        self.queue = queue


class FairShares:
    """Start-time fair queueing (Goyal, Vin and Cheng 1996), with the virtual time of WF2Q+ (Bennett and Zhang 1997).

    Each tenant has a virtual time, which moves by tokens over weight: by those to compute when one of its requests starts, by
    those of its output when it ends. The tenant that is furthest behind is next, in its queue's own order. So over any time
    in which two tenants have requests waiting they get tokens in proportion to their weights, but for those of
    one request of each and the outputs still to come. A request that resumes goes before all that have not begun.

    The shares' own virtual time moves by tokens over the weights of all that wait, and is never behind them. A
    tenant that comes starts there: it has no credit for the time in which it asked for nothing. One that leaves with more
    than its share is remembered until the others have caught up, and starts where it left.
    """

    def __init__(self, *, by_priority: bool, cost: Callable[[Request], float] = Request.take_uncharged_tokens) -> None:
        self._cost = cost
        self._by_priority = by_priority
        self._tenants: dict[str, _Tenant] = {}
        self._turns: KeyedHeap[str] = KeyedHeap()
        self._ahead: KeyedHeap[str] = KeyedHeap()
        self._virtual_time = 0.0
        self._weights = 0.0

    def __len__(self) -> int:
        """Tenants that have requests waiting."""
        return len(self._tenants)

    @property
    def num_remembered(self) -> int:
        """Tenants that have had more than their share and have nothing waiting."""
        return len(self._ahead)

    def add(self, name: str, request: Request) -> None:
        """Take in a request of a tenant. Its weight is the tenant's from now on."""
        weight = request.context.tenant_weight
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(
                name, weight, self._start_of(name), RequestQueue(by_priority=self._by_priority)
            )
            self._weights += weight
        elif tenant.weight != weight:
            self._weights += weight - tenant.weight
            tenant.weight = weight
        tenant.queue.add(request)
        self._turns.set(name, _turn(tenant))

    def peek(self) -> Request:
        """The request whose turn is next. There must be one."""
        return self._tenants[self._turns.peek()].queue.peek()

    def remove(self, name: str, request: Request) -> None:
        """Take out a request, wherever it stands."""
        tenant = self._tenants[name]
        tenant.queue.remove(request)
        if tenant.queue:
            self._turns.set(name, _turn(tenant))
        else:
            del self._tenants[name]
            self._turns.remove(name)
            self._weights -= tenant.weight
            if tenant.virtual_time > self._virtual_time:
                self._ahead.set(name, tenant.virtual_time)
        self._catch_up()

    def take(self, name: str, request: Request) -> None:
        """Take out a request that starts: its tenant gets the tokens that it brings."""
        tenant = self._tenants[name]
        tokens = self._cost(request)
        tenant.virtual_time += tokens / tenant.weight
        self._virtual_time += tokens / max(self._weights, tenant.weight)
        self.remove(name, request)

    def charge(self, name: str, request: Request) -> None:
        """A request that had started has ended: its tenant has got its output."""
        tokens = self._cost(request)
        tenant = self._tenants.get(name)
        if tenant is None:
            self._ahead.set(name, self._start_of(name) + tokens / request.context.tenant_weight)
            return
        tenant.virtual_time += tokens / tenant.weight
        self._turns.set(name, _turn(tenant))
        self._catch_up()

    def _start_of(self, name: str) -> float:
        """Where a tenant that had nothing waiting goes on; what was remembered of it is forgotten."""
        left_at = self._ahead.rank(name)
        if left_at is None:
            return self._virtual_time
        self._ahead.remove(name)
        return max(float(left_at), self._virtual_time)

    def _catch_up(self) -> None:
        """The virtual time is not behind those that wait; tenants that it has reached are forgotten."""
        if self._tenants:
            behind, _ = self._turns.rank(self._turns.peek())
            self._virtual_time = max(self._virtual_time, behind)
        while self._ahead and self._ahead.rank(self._ahead.peek()) <= self._virtual_time:
            self._ahead.remove(self._ahead.peek())


def _turn(tenant: _Tenant) -> tuple[float, Rank]:
    head = tenant.queue.peek()
    return (-math.inf if head.resumes else tenant.virtual_time), tenant.queue.rank(head)

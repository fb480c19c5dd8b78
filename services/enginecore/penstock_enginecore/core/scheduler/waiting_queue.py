"""The waiting queue: policy order, fair sharing between tenants, and limits on its size."""

import heapq
import math
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from penstock_common.bounded_queue import DrainRate, TenantRoom, retry_after
from penstock_common.errors import ResourceExhausted
from penstock_enginecore.config import SchedulerConfig
from penstock_enginecore.core.request import Hold, Request

K = TypeVar("K", str, int)


class KeyedHeap(Generic[K]):
    """A heap of keys, ordered by rank, then by key. Every operation takes O(log n) amortized time.

    Outdated entries stay in the heap until they reach its head. If the heap has more outdated than current entries, it
    is rebuilt without the outdated entries.
    """

    def __init__(self) -> None:
        self._ranks: dict[K, Any] = {}
        self._heap: list[tuple[Any, K]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def set(self, key: K, rank: Any) -> None:
        """Add a key with a rank, or change the rank of a key. All ranks in the heap must be comparable with each
        other.
        """
        if self._ranks.get(key) == rank:
            return
        self._ranks[key] = rank
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (rank, key))

    def remove(self, key: K) -> None:
        """Remove a key. The key must be in the heap."""
        del self._ranks[key]

    def peek(self) -> K:
        """Return the key with the lowest rank. The heap must not be empty."""
        while True:
            rank, key = self._heap[0]
            if key in self._ranks and self._ranks[key] == rank:
                return key
            heapq.heappop(self._heap)

    def rank(self, key: K) -> Any:
        """Return the rank of a key, or None if the key is not in the heap."""
        return self._ranks.get(key)


Rank = tuple[float, float, int]


def rank(request: Request, *, by_priority: bool) -> Rank:
    """Return the sort key of a request. The request with the lowest rank is the most urgent.

    With the priority policy, requests are ordered by priority number, then by arrival time at the frontend. With the
    FCFS policy, resumed requests precede new requests. Among resumed requests, and among new requests, the order is
    first come, first served.
    """
    if by_priority:
        return request.context.priority, request.context.arrival_time, request.arrival
    return 0 if request.resumes else 1, 0, request.arrival


class RequestQueue:
    """A priority queue of requests. Adding or removing a request at any position takes O(log n) amortized time.

    With FCFS, preempted requests and requests from a lost engine are at the head. With the priority policy, requests
    are ordered by priority number, then by arrival time at the frontend.

    Removed requests stay in the heap until they reach its head. If the heap has more removed than queued requests, it
    is rebuilt without the removed requests.
    """

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._requests: dict[str, Request] = {}
        self._heap: list[tuple[Rank, str]] = []
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def rank(self, request: Request) -> Rank:
        """Return the sort key of a request. The request with the lowest rank is the most urgent."""
        return rank(request, by_priority=self._by_priority)

    def add(self, request: Request) -> None:
        """Add a request. It must not be in the queue."""
        self._requests[request.key] = request
        self.num_tokens += request.num_tokens
        heapq.heappush(self._heap, (self.rank(request), request.key))

    def peek(self) -> Request:
        """Return the first request without removing it. The queue must not be empty."""
        while self._heap[0][1] not in self._requests:
            heapq.heappop(self._heap)
        return self._requests[self._heap[0][1]]

    def remove(self, request: Request) -> None:
        """Remove a request. It must be in the queue."""
        del self._requests[request.key]
        self.num_tokens -= request.num_tokens
        if self._heap[0][1] == request.key:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._requests) + 64:
            self._heap = [(self.rank(r), key) for key, r in self._requests.items()]
            heapq.heapify(self._heap)


class _Tenant:
    """A tenant with waiting requests.

    Attributes:
        virtual_time: Number of tokens that the tenant was charged, divided by the tenant's weight.
    """

    __slots__ = ("name", "queue", "virtual_time", "weight")

    def __init__(self, name: str, weight: float, virtual_time: float, queue: RequestQueue) -> None:
        self.name = name
        self.weight = weight
        self.virtual_time = virtual_time
        self.queue = queue


class FairShares:
    """Start-time fair queueing (Goyal, Vin and Cheng 1996), with the virtual time of WF2Q+ (Bennett and Zhang 1997).

    Each tenant has a virtual time. When a tenant is charged for tokens, its virtual time advances by the number of
    tokens divided by the tenant's weight. When a request starts, its tenant is charged for the tokens to compute. When
    the request ends, its tenant is charged for the output tokens. The next request to start is from the tenant with the
    lowest virtual time. The requests of one tenant start in the order of the tenant's queue. While two tenants both
    have waiting requests, they get tokens in proportion to their weights. The difference from this proportion is at
    most the tokens of one request of each tenant, plus the output tokens that are not charged yet. A resumed request
    starts before all requests that have not begun.

    When any tenant is charged, the global virtual time advances by the number of tokens divided by the sum of the
    weights of all waiting tenants. The global virtual time is never less than the lowest virtual time of a waiting
    tenant. A new tenant starts at the global virtual time, so it gets no credit for idle time. A tenant without waiting
    requests is remembered while its virtual time is ahead of the global virtual time. If the tenant gets a new request
    during that time, the tenant continues from its old virtual time.
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
        """Return the number of tenants with waiting requests."""
        return len(self._tenants)

    @property
    def num_remembered(self) -> int:
        """Number of tenants without waiting requests whose virtual time is ahead of the global virtual time."""
        return len(self._ahead)

    def add(self, name: str, request: Request) -> None:
        """Add a request of a tenant. The tenant weight in this request becomes the tenant's weight."""
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
        """Return the next request to start without removing it. There must be a waiting request."""
        return self._tenants[self._turns.peek()].queue.peek()

    def remove(self, name: str, request: Request) -> None:
        """Remove a request at any position."""
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
        """Remove a request that starts, and charge its tenant for the request's tokens."""
        tenant = self._tenants[name]
        tokens = self._cost(request)
        tenant.virtual_time += tokens / tenant.weight
        self._virtual_time += tokens / max(self._weights, tenant.weight)
        self.remove(name, request)

    def charge(self, name: str, request: Request) -> None:
        """Charge a tenant for the output of a started request that has ended."""
        tokens = self._cost(request)
        tenant = self._tenants.get(name)
        if tenant is None:
            self._ahead.set(name, self._start_of(name) + tokens / request.context.tenant_weight)
            return
        tenant.virtual_time += tokens / tenant.weight
        self._turns.set(name, _turn(tenant))
        self._catch_up()

    def _start_of(self, name: str) -> float:
        """Return the virtual time at which a tenant without waiting requests starts again, and forget the remembered
        virtual time of the tenant.
        """
        left_at = self._ahead.rank(name)
        if left_at is None:
            return self._virtual_time
        self._ahead.remove(name)
        return max(float(left_at), self._virtual_time)

    def _catch_up(self) -> None:
        """Advance the global virtual time to the lowest virtual time of the waiting tenants. Then forget the remembered
        tenants whose virtual time is not ahead of the global virtual time.
        """
        if self._tenants:
            behind, _ = self._turns.rank(self._turns.peek())
            self._virtual_time = max(self._virtual_time, behind)
        while self._ahead and self._ahead.rank(self._ahead.peek()) <= self._virtual_time:
            self._ahead.remove(self._ahead.peek())


def _turn(tenant: _Tenant) -> tuple[float, Rank]:
    head = tenant.queue.peek()
    return (-math.inf if head.resumes else tenant.virtual_time), tenant.queue.rank(head)


class FairQueue:
    """A queue of requests in which tenants take turns. Every operation takes O(log n) amortized time.

    ``FairShares`` decides which tenant is next. Each tenant's requests are in the order of the policy, FCFS or
    priority. With the priority policy, the request with the lower priority number is first regardless of tenant.
    Tenants take turns only among requests with the same priority number. If ``fair`` is False, or if there is only one
    tenant, the policy alone decides the order. The queue drops the state of all tenants once it is empty.
    """

    def __init__(
        self, *, by_priority: bool, fair: bool, cost: Callable[[Request], float] = Request.take_uncharged_tokens
    ) -> None:
        """Create an empty queue. ``cost`` returns the charge to a tenant when its request starts or ends."""
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
        """Return the position in policy order, ignoring tenants. The lowest rank is the most urgent."""
        return rank(request, by_priority=self._by_priority)

    def add(self, request: Request) -> None:
        """Add a request. It must not be in the queue."""
        level = self._level(request)
        shares = self._levels.get(level)
        if shares is None:
            shares = self._levels[level] = FairShares(by_priority=self._by_priority, cost=self._cost)
            self._order.set(level, level)
        shares.add(self._tenant(request), request)
        self._num_requests += 1
        self.num_tokens += request.num_tokens

    def peek(self) -> Request:
        """Return the first request without removing it. The queue must not be empty."""
        return self._levels[self._order.peek()].peek()

    def remove(self, request: Request) -> None:
        """Remove a request that has ended while it waited."""
        self._levels[self._level(request)].remove(self._tenant(request), request)
        self._taken_out(request)

    def take(self, request: Request) -> None:
        """Remove a request that starts, and charge its tenant."""
        self._levels[self._level(request)].take(self._tenant(request), request)
        self._taken_out(request)

    def charge(self, request: Request) -> None:
        """Charge the tenant of a started request that has ended. The request must not be in the queue."""
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


class HeldRequests:
    """Requests with a ``Hold``, in the order in which they were held. Every operation takes O(1) time."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Add a request that is not yet in this collection."""
        self._requests[request.key] = request

    def remove(self, request: Request) -> None:
        """Remove a request from the held requests."""
        del self._requests[request.key]


class WaitingRequests:
    """Requests without KV blocks. Requests with a ``Hold`` wait for an event. All other requests are queued in policy
    order.
    """

    def __init__(self, *, by_priority: bool, fair: bool) -> None:
        self._queue = FairQueue(by_priority=by_priority, fair=fair)
        self._held = HeldRequests()
        self._fair = fair
        self._room = TenantRoom()

    def __len__(self) -> int:
        return self._room.count

    @property
    def num_held(self) -> int:
        """Number of waiting requests with a hold."""
        return len(self._held)

    @property
    def num_tokens(self) -> int:
        """Total number of tokens of all waiting requests."""
        return self._room.size

    def takes(self, request: Request, *, max_requests: int, max_tokens: int) -> bool:
        """Return whether ``TenantRoom`` allows one more waiting request. If fair sharing is off, all requests count as
        requests of one tenant.
        """
        tenant, weight = self._tenant(request), request.context.tenant_weight
        return self._room.takes_count(tenant, weight, 1, max_requests) and self._room.takes_size(
            tenant, weight, request.num_tokens, max_tokens
        )

    def rank(self, request: Request) -> Rank:
        """Return the position in policy order, ignoring tenants. The lowest rank is the most urgent."""
        return self._queue.rank(request)

    def head(self) -> Request | None:
        """Return the next queued request without removing it, or None if every waiting request is held."""
        return self._queue.peek() if self._queue else None

    def longest_held(self) -> Request:
        """Return the request that has been held for the longest time. There must be a held request."""
        return next(iter(self._held))

    def add(self, request: Request) -> None:
        """Add a request that is new, or that has lost its blocks."""
        self._room.enter(self._tenant(request), request.context.tenant_weight, request.num_tokens)
        if request.hold:
            self._held.add(request)
        else:
            self._queue.add(request)

    def start(self, request: Request) -> None:
        """Remove a request that starts, and all of its holds."""
        self._room.leave(self._tenant(request), request.num_tokens)
        if request.hold:
            self._held.remove(request)
            request.hold = Hold.NONE
        else:
            self._queue.take(request)

    def remove(self, request: Request) -> None:
        """Remove a request that has ended while it waited."""
        self._room.leave(self._tenant(request), request.num_tokens)
        if request.hold:
            self._held.remove(request)
        else:
            self._queue.remove(request)

    def hold(self, request: Request, hold: Hold) -> None:
        """Add a hold to a request."""
        if not request.hold:
            self._queue.remove(request)
            self._held.add(request)
        request.hold |= hold

    def release(self, request: Request, hold: Hold) -> None:
        """Remove a hold from a request. If the request has no other hold, it joins the queue."""
        if request.hold & hold:
            request.hold &= ~hold
            if not request.hold:
                self._held.remove(request)
                self._queue.add(request)

    def release_all(self, hold: Hold) -> None:
        """Remove a hold from all requests with this hold."""
        for request in list(self._held):
            self.release(request, hold)

    def charge(self, request: Request) -> None:
        """Charge the tenant of a started request that has ended. The request must not be waiting."""
        self._queue.charge(request)

    def _tenant(self, request: Request) -> str:
        return request.context.tenant if self._fair else ""


class QueueAdmission:
    """Refuses requests that would exceed the limits of the queue, and measures how fast requests leave the queue.

    Held requests count toward the limits. An empty queue accepts any request. A full queue refuses requests of tenants
    that use more than their fair share of the queue. Requests of other tenants may use a reserve beyond the limits (see
    ``TenantRoom``). If another engine was lost after it had admitted a request, this engine never refuses that request.
    """

    def __init__(self, config: SchedulerConfig, waiting: WaitingRequests) -> None:
        self._config = config
        self._waiting = waiting
        self._rate = DrainRate()

    def check(self, request: Request, now: float) -> None:
        """Raise ResourceExhausted, with a retry delay, if the queue cannot accept ``request``.

        ``now`` is in monotonic seconds. The retry delay is based on the measured rate at which requests leave the
        queue. Before any request has left the queue, the delay is half of the time that the first request has waited.
        """
        num_waiting = len(self._waiting)
        if not num_waiting:
            self._rate.begin(now)
            return
        if request.outlives:
            return
        config = self._config
        num_tokens = self._waiting.num_tokens + request.num_tokens
        if self._waiting.takes(request, max_requests=config.max_waiting_requests, max_tokens=config.max_waiting_tokens):
            return
        if num_waiting >= config.max_waiting_requests:
            why = f"{num_waiting} requests are waiting, scheduler.max_waiting_requests is {config.max_waiting_requests}"
        else:
            why = f"{num_tokens} tokens would be waiting, scheduler.max_waiting_tokens is {config.max_waiting_tokens}"
        too_many = max(num_waiting + 1 - config.max_waiting_requests, 0)
        seconds = self._rate.time_for(now, too_many, max(num_tokens - config.max_waiting_tokens, 0))
        if seconds is None:
            head = self._waiting.head() or self._waiting.longest_held()
            seconds = (now - head.queued_time) / 2
        raise ResourceExhausted(f"the engine's queue is full: {why}", retry_after=retry_after(seconds))

    def started(self, request: Request, now: float) -> None:
        """Count a request that leaves the queue for the first time. Requests that start again after a preemption do not
        count.
        """
        self._rate.left(now, request.num_tokens)

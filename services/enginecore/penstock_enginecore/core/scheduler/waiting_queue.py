"""The waiting queue: requests in the order of the policy, shared fairly between tenants, and the limits on how many wait."""

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
    """Keys by rank, the lowest first; equal ranks by key. Every operation costs O(log n) amortized.

    What is out of date stays in the heap until it gets to the head, or outnumbers the living; then the heap is rebuilt.
    """

    def __init__(self) -> None:
        self._ranks: dict[K, Any] = {}
        self._heap: list[tuple[Any, K]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def set(self, key: K, rank: Any) -> None:
        """Add a key, or give it another rank. Ranks must be comparable with each other."""
        if self._ranks.get(key) == rank:
            return
        self._ranks[key] = rank
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (rank, key))

    def remove(self, key: K) -> None:
        """Take out a key that is in the heap."""
        del self._ranks[key]

    def peek(self) -> K:
        """The key with the lowest rank. The heap must not be empty."""
        while True:
            rank, key = self._heap[0]
            if key in self._ranks and self._ranks[key] == rank:
                return key
            heapq.heappop(self._heap)

    def rank(self, key: K) -> Any:
        """The rank of a key; None for one that is not in the heap."""
        return self._ranks.get(key)


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


class HeldRequests:
    """Requests with a ``Hold``, in the order in which they came. Every operation costs O(1)."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def add(self, request: Request) -> None:
        """Add a request that is not held."""
        self._requests[request.key] = request

    def remove(self, request: Request) -> None:
        """Remove a request that is held."""
        del self._requests[request.key]


class WaitingRequests:
    """Without KV blocks: some wait for their turn in the order of the policy, those with a ``Hold`` for something else."""

    def __init__(self, *, by_priority: bool, fair: bool) -> None:
        self._queue = FairQueue(by_priority=by_priority, fair=fair)
        self._held = HeldRequests()
        self._fair = fair
        self._room = TenantRoom()

    def __len__(self) -> int:
        return self._room.count

    @property
    def num_held(self) -> int:
        """Those with a hold."""
        return len(self._held)

    @property
    def num_tokens(self) -> int:
        """Tokens of all of them."""
        return self._room.size

    def takes(self, request: Request, *, max_requests: int, max_tokens: int) -> bool:
        """Whether a request may wait, too, as ``TenantRoom`` says. Without fairness all requests are of one tenant."""
        tenant, weight = self._tenant(request), request.context.tenant_weight
        return self._room.takes_count(tenant, weight, 1, max_requests) and self._room.takes_size(
            tenant, weight, request.num_tokens, max_tokens
        )

    def rank(self, request: Request) -> Rank:
        """The policy's order, tenants aside: the lowest is the most urgent."""
        return self._queue.rank(request)

    def head(self) -> Request | None:
        """The one whose turn is next; None when there is none without a hold."""
        return self._queue.peek() if self._queue else None

    def longest_held(self) -> Request:
        """The one that has been held longest. There must be one."""
        return next(iter(self._held))

    def add(self, request: Request) -> None:
        """Take in a request that has come, or has lost its blocks."""
        self._room.enter(self._tenant(request), request.context.tenant_weight, request.num_tokens)
        if request.hold:
            self._held.add(request)
        else:
            self._queue.add(request)

    def start(self, request: Request) -> None:
        """Take out a request that starts, whatever it was held for."""
        self._room.leave(self._tenant(request), request.num_tokens)
        if request.hold:
            self._held.remove(request)
            request.hold = Hold.NONE
        else:
            self._queue.take(request)

    def remove(self, request: Request) -> None:
        """Take out a request that has ended."""
        self._room.leave(self._tenant(request), request.num_tokens)
        if request.hold:
            self._held.remove(request)
        else:
            self._queue.remove(request)

    def hold(self, request: Request, hold: Hold) -> None:
        """Give a request a reason more to wait."""
        if not request.hold:
            self._queue.remove(request)
            self._held.add(request)
        request.hold |= hold

    def release(self, request: Request, hold: Hold) -> None:
        """Take a reason to wait away; without another one the request gets its turn."""
        if request.hold & hold:
            request.hold &= ~hold
            if not request.hold:
                self._held.remove(request)
                self._queue.add(request)

    def release_all(self, hold: Hold) -> None:
        """Take a reason to wait away from all that have it."""
        for request in list(self._held):
            self.release(request, hold)

    def charge(self, request: Request) -> None:
        """A request that had started has ended, and is not among them: its tokens count for its tenant's share."""
        self._queue.charge(request)

    def _tenant(self, request: Request) -> str:
        return request.context.tenant if self._fair else ""


class QueueAdmission:
    """Refuses what would overfill the queue, and measures how fast requests leave it for the model.

    Requests that are held count. An empty queue takes any request. A full queue refuses the tenants above their fair share,
    and takes requests of the others into a reserve beyond the limits, as ``TenantRoom`` says.
    One that outlived another engine was admitted there: it is never refused, however full this queue is.
    """

    def __init__(self, config: SchedulerConfig, waiting: WaitingRequests) -> None:
        self._config = config
        self._waiting = waiting
        self._rate = DrainRate()

    def check(self, request: Request, now: float) -> None:
        """Raise ResourceExhausted, with the time until there is room, unless the queue may take ``request``.

        ``now``: monotonic seconds. Until a request has left the queue there is no rate to go by. Then the wait of its
        head stands for the time that the whole queue takes, and half of that is what the client is told.
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
        """A request has left the queue for the first time. One that comes back took no room that others could have had."""
        self._rate.left(now, request.num_tokens)

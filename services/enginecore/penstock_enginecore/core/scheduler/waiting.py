"""The requests that wait."""

from collections.abc import Iterator

from penstock_common.tenant_room import TenantRoom
from penstock_enginecore.core.hold import Hold
from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.fair_queue import FairQueue
from penstock_enginecore.core.scheduler.queue import Rank


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

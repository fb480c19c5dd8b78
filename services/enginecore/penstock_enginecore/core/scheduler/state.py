"""The requests of a scheduler, and the state that its parts share."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from penstock_common.errors import InvalidArgument, quoted
from penstock_enginecore.core.kv_cache.manager import KVCacheManager
from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.base import PauseState, SchedulerContext
from penstock_enginecore.core.scheduler.client_outputs import ClientOutputs
from penstock_enginecore.core.scheduler.failure_bisection import StepTrial
from penstock_enginecore.core.scheduler.token_budget import StepBudget, budget_of
from penstock_enginecore.core.scheduler.waiting_queue import Rank, WaitingRequests
from penstock_enginecore.kv_transfer.core.leases import KVLeases


class SchedulerState:
    """Requests, KV cache and budget of one scheduler. Its parts get this object instead of one another.

    Attributes:
        context: The settings and collaborators that the scheduler was built from.
        requests: All requests that have not ended.
        waiting: Requests without KV blocks, held or queued. A request is either here or in ``running``.
        running: Requests with KV blocks, in the order in which they started.
        kv_cache: Maps each request to its KV blocks.
        budget: Limits of one step.
        outputs: Outputs that the clients have not got yet.
        trial: Finds the request that makes a step fail.
        next_step: Number of the next step that computes something.
        pause_state: Whether work is handed out.
    """

    def __init__(self, context: SchedulerContext) -> None:
        """Raises ConfigError when the step budget cannot serve the model."""
        config = context.config
        self.context = context
        self.clock = context.monotonic_clock
        self.by_priority = config.policy == "priority"
        self.kv_cache = KVCacheManager(
            context.kv_cache,
            enable_prefix_caching=context.enable_prefix_caching,
            enable_kv_events=context.enable_kv_events,
        )
        self.budget: StepBudget = budget_of(context)
        self.requests = RequestTable()
        self.waiting = WaitingRequests(by_priority=self.by_priority, fair=config.fairness)
        self.running = RunningRequests(self.waiting.rank if self.by_priority else None)
        self.outputs = ClientOutputs()
        self.trial = StepTrial()
        self.next_step = 0
        self.pause_state = PauseState.RUNNING

    @property
    def leases(self) -> KVLeases | None:
        """Lease manager for KV blocks that another engine may still read, or None if KV transfer is off."""
        return self.context.leases()


class RequestTable:
    """Living requests, by key and by client and id. Every operation costs what it returns."""

    def __init__(self) -> None:
        self._by_key: dict[str, Request] = {}
        self._by_client: dict[str, dict[str, Request]] = {}
        self.num_constrained = 0
        """Requests with a grammar. If there are none, a step need not look for them."""

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def by_key(self) -> Mapping[str, Request]:
        """All living requests."""
        return self._by_key

    def check_unused(self, client_id: str, request_id: str) -> None:
        """Raise InvalidArgument when the client has a living request with this id."""
        if request_id in self._by_client.get(client_id, ()):
            raise InvalidArgument(f"request_id {quoted(request_id)} is already in use", field="request_id")

    def add(self, request: Request) -> None:
        """Add a request whose id is unused."""
        self._by_key[request.key] = request
        self.num_constrained += request.constrained
        self._by_client.setdefault(request.client_id, {})[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Remove a request that has ended."""
        del self._by_key[request.key]
        self.num_constrained -= request.constrained
        of_client = self._by_client[request.client_id]
        del of_client[request.request_id]
        if not of_client:
            del self._by_client[request.client_id]

    def of_client(self, client_id: str) -> list[Request]:
        """Return the requests of a client."""
        return list(self._by_client.get(client_id, {}).values())

    def find(self, client_id: str, request_ids: Iterable[str]) -> list[Request]:
        """Return the client's living requests among ``request_ids``, each once."""
        of_client = self._by_client.get(client_id, {})
        return [of_client[request_id] for request_id in dict.fromkeys(request_ids) if request_id in of_client]


class RunningRequests:
    """Running requests, in the order in which they started. Each has KV blocks.

    ``rank`` orders requests under the priority policy, the most urgent first; None: the first that started is the most urgent.
    """

    def __init__(self, rank: Callable[[Request], Rank] | None) -> None:
        self._rank = rank
        self.requests: list[Request] = []

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def add(self, request: Request) -> None:
        """Add a request that starts."""
        self.requests.append(request)

    def remove(self, request: Request) -> None:
        """Remove a running request."""
        if self.requests[-1] is request:
            self.requests.pop()
        else:
            self.requests.remove(request)

    def least_urgent(self) -> Request:
        """Return the request that is preempted first. There must be one."""
        return self.requests[-1] if self._rank is None else max(self.requests, key=self._rank)

    def drop_finished(self) -> None:
        """Remove the requests that have ended."""
        self.requests = [request for request in self.requests if not request.finished]

    def take_all(self) -> list[Request]:
        """Remove and return all requests."""
        requests, self.requests = self.requests, []
        return requests

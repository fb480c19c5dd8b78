"""The state that the parts of a scheduler share: its requests, and the outputs collected for each client."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from penstock_common.errors import InvalidArgument, quoted
from penstock_common.types.kv_transfer import KvSource
from penstock_common.types.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    Logprobs,
    PrefillStats,
    RequestError,
    SchedulerStats,
    TokenColumns,
)
from penstock_common.types.request import Vectors
from penstock_enginecore.core.kv_cache.manager import KVCacheManager
from penstock_enginecore.core.request import Request, log_failed
from penstock_enginecore.core.scheduler.base import PauseState, SchedulerContext
from penstock_enginecore.core.scheduler.failure_bisection import StepTrial
from penstock_enginecore.core.scheduler.token_budget import StepBudget, budget_of
from penstock_enginecore.core.scheduler.waiting_queue import Rank, WaitingRequests

# Outputs for clients, collected until the results of the step are processed.


class _ForClient:
    """Outputs for one client.

    Attributes:
        whole: Ids of requests that already have a full output in this message. Later tokens of these requests must not
            go into columns (arrays of tokens of many requests), because the client could process the columns before the
            full output.
    """

    __slots__ = ("finished", "outputs", "tokens", "whole")

    def __init__(self) -> None:
        self.outputs: list[EngineCoreOutput] = []
        self.tokens: TokenColumns | None = None
        self.whole: set[str] = set()
        self.finished: list[str] = []


class ClientOutputs:
    """Collects outputs per client: one ``EngineCoreOutputs`` per step and client.

    If a client numbers its requests, outputs that contain only new tokens are sent as columns (arrays with the tokens
    of many requests).
    """

    def __init__(self) -> None:
        self._clients: defaultdict[str, _ForClient] = defaultdict(_ForClient)
        self._told_loras: dict[str, int] = {}
        """Version of the list of LoRA adapters that was last sent to a client, by client id."""

    def __bool__(self) -> bool:
        return bool(self._clients)

    def add_tokens(
        self,
        request: Request,
        new_token_ids: list[int],
        *,
        logprobs: Logprobs | None = None,
        prompt_logprobs: Logprobs | None = None,
        num_drafts: int = 0,
    ) -> None:
        """Add new tokens to the outputs of the request's client. The tokens must already be in the request.

        The method is a hot path: it runs once per request and step. ``num_drafts`` is the number of draft tokens that
        the step verified. Raises OverflowError for a token id that does not fit into 32 bits.
        """
        client = self._clients[request.client_id]
        plain = request.prefill_reported and not request.events and logprobs is None and prompt_logprobs is None
        if not plain or not request.number or request.request_id in client.whole:
            output = self._add_whole(request, new_token_ids, logprobs, prompt_logprobs)
            if num_drafts and request.spec_stats is not None:
                # Copy the statistics, because they can change while the output waits to be sent.
                output.spec_decoding_stats = request.spec_stats.copy()
            return
        if client.tokens is None:
            client.tokens = TokenColumns()
        client.tokens.add(request.number, _offset(request, new_token_ids), new_token_ids, num_drafts)

    def add_end(
        self,
        request: Request,
        new_token_ids: list[int],
        *,
        error: RequestError | None = None,
        logprobs: Logprobs | None = None,
        prompt_logprobs: Logprobs | None = None,
        num_nans: int = 0,
        pooled: Vectors | None = None,
    ) -> None:
        """Add the final output of a request, with its last new tokens."""
        output = self._add_whole(request, new_token_ids, logprobs, prompt_logprobs)
        output.num_nans_in_logits = num_nans
        output.finish_reason = request.status.finish_reason
        output.stop_reason = request.stop_reason
        output.pooling_output = pooled
        output.spec_decoding_stats = request.spec_stats
        if error is not None:
            output.error = error
            log_failed(request.request_id, request.context.external_request_id, error)
        self._clients[request.client_id].finished.append(request.request_id)

    def add_source(self, request: Request, source: KvSource) -> None:
        """Add ``source``, the engine that leases the request's blocks, to the request's last output. The request must
        already have an output.
        """
        self._last(request).kv_source = source

    def add_answer(self, request: Request, answer: str) -> None:
        """Add the response of a connector plugin to the request's last output. An empty response is ignored."""
        if answer:
            self._last(request).kv_params = answer

    def _last(self, request: Request) -> EngineCoreOutput:
        outputs = reversed(self._clients[request.client_id].outputs)
        return next(output for output in outputs if output.request_id == request.request_id)

    def _add_whole(
        self,
        request: Request,
        new_token_ids: list[int],
        logprobs: Logprobs | None,
        prompt_logprobs: Logprobs | None,
    ) -> EngineCoreOutput:
        """Add a full output (not columns) for the request, with events and prefill statistics."""
        output = EngineCoreOutput(
            request_id=request.request_id,
            attempt=request.attempt,
            offset=_offset(request, new_token_ids),
            new_token_ids=new_token_ids,
            new_logprobs=logprobs,
            new_prompt_logprobs=prompt_logprobs,
        )
        if request.events:
            output.events = request.take_events()
        if not request.prefill_reported and request.num_cached_tokens >= 0:
            request.prefill_reported = True
            output.prefill_stats = _prefill_stats(request)
        client = self._clients[request.client_id]
        client.outputs.append(output)
        client.whole.add(request.request_id)
        return output

    def forget(self, client_id: str) -> None:
        """Drop the collected outputs for a disconnected client."""
        self._clients.pop(client_id, None)
        self._told_loras.pop(client_id, None)

    def take(self, stats: SchedulerStats, timestamp: float) -> dict[str, EngineCoreOutputs]:
        """Return all outputs since the last call, by client id. ``timestamp`` is in monotonic seconds."""
        clients, self._clients = self._clients, defaultdict(_ForClient)
        return {
            client_id: EngineCoreOutputs(
                outputs=client.outputs,
                tokens=client.tokens,
                scheduler_stats=self._for_client(client_id, stats),
                timestamp=timestamp,
                finished_requests=client.finished,
            )
            for client_id, client in clients.items()
        }

    def _for_client(self, client_id: str, stats: SchedulerStats) -> SchedulerStats:
        """Return the statistics for a client. Leave out the list of LoRA adapters if the client already has its current
        version.
        """
        if stats.lora is None or stats.lora.held is None:
            return stats
        version = stats.lora.held.version
        if self._told_loras.get(client_id) == version:
            return stats.without_held()
        self._told_loras[client_id] = version
        return stats


def _prefill_stats(request: Request) -> PrefillStats:
    num_prompt_tokens = request.num_prompt_tokens
    num_cached_tokens = min(request.num_cached_tokens, num_prompt_tokens)
    if not request.loaded_tokens:
        return PrefillStats(num_prompt_tokens=num_prompt_tokens, num_cached_tokens=num_cached_tokens)
    host, disk, peer = (min(count, num_cached_tokens) for count in request.loaded_tokens)
    return PrefillStats(
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=num_cached_tokens,
        num_host_tokens=host,
        num_disk_tokens=disk,
        num_peer_tokens=peer,
    )


def _offset(request: Request, new_token_ids: list[int]) -> int:
    return len(request.all_token_ids) - request.num_prompt_tokens - len(new_token_ids)


class SchedulerState:
    """Requests, KV cache and budget of one scheduler. The classes that make up the scheduler share this object and do
    not refer to each other.

    Attributes:
        context: The settings and objects with which the scheduler was created.
        leases: Lease manager for KV blocks that another engine may still read.
        requests: All requests that have not ended.
        waiting: Requests without KV blocks, held or queued. A request is either in ``waiting`` or in ``running``.
        running: Requests with KV blocks, in the order in which the requests started.
        kv_cache: Maps each request to its KV blocks.
        budget: Limits of one step, in tokens and in requests.
        outputs: Collector of outputs that have not been sent to the clients yet.
        trial: Finds the request that makes a step fail.
        next_step: Number of the next step that computes something.
        pause_state: Whether requests are scheduled, drained or paused.
    """

    def __init__(self, context: SchedulerContext) -> None:
        """Create the state. Raises ConfigError if the step budget is too small for the model."""
        config = context.config
        self.context = context
        self.clock = context.monotonic_clock
        self.leases = context.leases
        self.by_priority = config.by_priority
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


class RequestTable:
    """Requests that have not ended, by key, and by client and request id. The time of each operation is proportional to
    the size of its result.
    """

    def __init__(self) -> None:
        self._by_key: dict[str, Request] = {}
        self._by_client: dict[str, dict[str, Request]] = {}
        self.num_constrained = 0
        """Number of requests with a grammar. If this number is 0, steps skip the search for constrained requests."""

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def by_key(self) -> Mapping[str, Request]:
        """All requests that have not ended, by key."""
        return self._by_key

    def check_unused(self, client_id: str, request_id: str) -> None:
        """Raise InvalidArgument if the client already has a request with this id."""
        if request_id in self._by_client.get(client_id, ()):
            raise InvalidArgument(f"request_id {quoted(request_id)} is already in use", field="request_id")

    def add(self, request: Request) -> None:
        """Add a request. The client must have no other request with this id."""
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
        """Return the requests of a client that have not ended."""
        return list(self._by_client.get(client_id, {}).values())

    def find(self, client_id: str, request_ids: Iterable[str]) -> list[Request]:
        """Return the client's requests among ``request_ids`` that have not ended, without duplicates."""
        of_client = self._by_client.get(client_id, {})
        return [of_client[request_id] for request_id in dict.fromkeys(request_ids) if request_id in of_client]


class RunningRequests:
    """Running requests, in the order in which they started. All running requests have KV blocks.

    The function ``rank`` returns a request's rank in urgency. The request with the lowest rank is the most urgent. If
    ``rank`` is None, the request that started first is the most urgent.
    """

    def __init__(self, rank: Callable[[Request], Rank] | None) -> None:
        self._rank = rank
        self.requests: list[Request] = []

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def add(self, request: Request) -> None:
        """Append a request that starts."""
        self.requests.append(request)

    def remove(self, request: Request) -> None:
        """Remove a request from the running requests."""
        if self.requests[-1] is request:
            self.requests.pop()
        else:
            self.requests.remove(request)

    def least_urgent(self) -> Request:
        """Return the request to preempt first. There must be a running request."""
        return self.requests[-1] if self._rank is None else max(self.requests, key=self._rank)

    def drop_finished(self) -> None:
        """Remove the requests that have ended from the running requests."""
        self.requests = [request for request in self.requests if not request.finished]

    def take_all(self) -> list[Request]:
        """Remove and return all running requests."""
        requests, self.requests = self.requests, []
        return requests

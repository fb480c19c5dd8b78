"""Adding and ending of requests. Each request ends exactly once."""

import heapq
import itertools
from collections.abc import Iterable, Sequence

from penstock_common.types.kv_transfer import KvSource
from penstock_common.types.outputs import EventType, RequestError
from penstock_enginecore.core.request import Hold, Request, RequestStatus
from penstock_enginecore.core.scheduler.base import StepResource
from penstock_enginecore.core.scheduler.results import check_stop
from penstock_enginecore.core.scheduler.state import SchedulerState
from penstock_enginecore.core.scheduler.waiting_queue import QueueAdmission
from penstock_enginecore.kv_transfer.core.kv_loads import KvLoads


class DeadlineQueue:
    """Requests with a deadline, in a heap ordered by deadline.

    A request that ends before its deadline stays in the heap. When the heap has more ended requests than other
    requests, it is rebuilt without the ended requests. Ending a request therefore takes O(1) amortized time, and memory
    stays proportional to the number of requests.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, Request]] = []
        self._num_alive = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Add a request to the queue of deadlines. A request without a deadline is ignored."""
        if request.context.deadline is not None:
            self._num_alive += 1
            heapq.heappush(self._heap, (request.context.deadline, request.key, request))

    def discard(self, request: Request) -> None:
        """Record that a request has ended."""
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
        """Remove and return the requests whose deadline is at or before ``now``. The caller must end them."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            _, _, request = heapq.heappop(self._heap)
            if not request.finished:
                expired.append(request)
        return expired


_NORMAL_ENDS = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH,
    RequestStatus.FINISHED_REPETITION,
)


class RequestLifecycle:
    """Adds requests and ends them in any state: waiting, held or running.

    Attributes:
        finished_keys: Keys of requests that have ended, but whose end no step has reported to the workers yet.
    """

    def __init__(
        self,
        state: SchedulerState,
        resources: Sequence[StepResource],
        admission: QueueAdmission,
        kv_loads: KvLoads | None = None,
    ) -> None:
        self._state = state
        self._resources = resources
        self._admission = admission
        self._kv_loads = kv_loads
        self._deadlines = DeadlineQueue()
        self._arrivals = itertools.count()
        self.finished_keys: list[str] = []

    def add(self, request: Request, hold: Hold) -> None:
        """Queue a request. If the output that another engine generated already meets a stop condition, the request ends
        immediately.

        Raises:
            InvalidArgument: The id is in use.
            ResourceExhausted: The queue is full.
        """
        self._state.requests.check_unused(request.client_id, request.request_id)
        if check_stop(request, self._state.context.eos_token_ids):
            self._state.outputs.add_end(request, [])
            return
        request.queued_time = now = self._state.clock()
        self._admission.check(request, now)
        request.arrival = next(self._arrivals)
        request.record_event(EventType.QUEUED, now)
        request.hold = hold
        self._state.waiting.add(request)
        self._state.requests.add(request)
        self._deadlines.add(request)
        for resource in self._resources:
            resource.added(request)

    def abort(self, client_id: str, request_ids: Iterable[str], *, hand_over: bool = False) -> list[str]:
        """End the client's given requests with ABORT outputs, or with HANDOFF outputs if ``hand_over`` is true. Return
        the ids of the requests that this call ended.
        """
        found = self._state.requests.find(client_id, request_ids)
        self.end(found, RequestStatus.HANDED_OVER if hand_over else RequestStatus.FINISHED_ABORTED)
        return [request.request_id for request in found]

    def abort_client(self, client_id: str) -> None:
        self.end(self._state.requests.of_client(client_id), RequestStatus.FINISHED_ABORTED)
        self._state.outputs.forget(client_id)

    def abort_all(self, error: RequestError, *, held: bool = True, keep_blocks: bool = False) -> None:
        """End every request with an ABORT output.

        Args:
            error: The error that clients get as the reason for the ABORT.
            held: Whether to end also the requests that wait for the end of a pause.
            keep_blocks: Whether to lease the KV blocks to the engines that resume the requests.
        """
        requests = [r for r in self._state.requests.by_key.values() if held or not r.hold & Hold.PAUSE]
        self.end(requests, RequestStatus.FINISHED_ABORTED, error, keep_blocks=keep_blocks)

    def abort_expired(self) -> None:
        """End the requests whose deadline has passed, with ABORT outputs."""
        now = self._state.context.wall_clock()
        for request in self._deadlines.pop_expired(now):
            late = now - (request.context.deadline or now)
            message = f"the deadline passed {late:.3f} s ago, after {request.num_output_tokens} output tokens"
            error = RequestError(
                code="DEADLINE_EXCEEDED", message=message, field="deadline", reason="DEADLINE_EXCEEDED"
            )
            self.end([request], RequestStatus.FINISHED_ABORTED, error)

    def fail(self, request: Request, error: RequestError) -> bool:
        """End a request with an ERROR output. If the request has already ended, change nothing and return False."""
        if request.key not in self._state.requests.by_key:
            return False
        self.end([request], RequestStatus.FINISHED_ERROR, error)
        return True

    def fail_too_long(self, request: Request) -> None:
        """End a request that needs more KV blocks than the cache has."""
        pool = self._state.kv_cache.pool
        message = (
            f"the sequence of {request.num_tokens} tokens does not fit into the engine's {pool.num_usable_blocks} "
            f"KV cache blocks of {self._state.kv_cache.block_size} tokens"
        )
        error = RequestError(code="RESOURCE_EXHAUSTED", message=message, reason="KV_CACHE_TOO_SMALL")
        self.end([request], RequestStatus.FINISHED_ERROR, error)

    def end(
        self,
        requests: list[Request],
        status: RequestStatus,
        error: RequestError | None = None,
        *,
        keep_blocks: bool = False,
    ) -> None:
        """End requests with one output each. If ``keep_blocks`` is true, lease their KV blocks to the engines that
        resume the requests.
        """
        was_running = False
        for request in requests:
            if request.status is RequestStatus.RUNNING:
                was_running = True
                self.finished_keys.append(request.key)
            else:
                self._state.waiting.remove(request)
            request.status = status
            source = self._keep_blocks(request, wanted=keep_blocks or status is RequestStatus.HANDED_OVER)
            self._forget(request)
            self._state.outputs.add_end(request, [], error=error)
            if source is not None:
                self._state.outputs.add_source(request, source)
        if was_running:
            self._state.running.drop_finished()

    def ended_by_step(self, requests: list[Request]) -> None:
        """Remove running requests that ended in a step. Their outputs already have the finish reason."""
        for request in requests:
            self.finished_keys.append(request.key)
            handed_over = request.status is RequestStatus.HANDED_OVER
            wanted = handed_over or (request.context.kv.lease and request.status in _NORMAL_ENDS)
            if (source := self._keep_blocks(request, wanted=wanted)) is not None:
                self._state.outputs.add_source(request, source)
            if self._kv_loads is not None and request.status in _NORMAL_ENDS:
                self._state.outputs.add_answer(request, self._kv_loads.answer(request))
            self._forget(request)
        if requests:
            self._state.running.drop_finished()

    def take_finished_keys(self) -> list[str]:
        """Return the keys of the requests that ended since the last call and that the workers know."""
        keys, self.finished_keys = self.finished_keys, []
        return keys

    def next_deadline(self) -> float | None:
        return self._deadlines.next_deadline()

    def _keep_blocks(self, request: Request, *, wanted: bool) -> KvSource | None:
        """Lease the KV blocks of an ended request to another engine, if ``wanted`` is true and this engine can lease
        blocks.
        """
        return self._state.leases.grant(request) if wanted and request.num_processed_tokens else None

    def _forget(self, request: Request) -> None:
        for resource in self._resources:
            resource.ended(request)
        self._state.kv_cache.free(request)
        self._state.requests.remove(request)
        self._deadlines.discard(request)
        if request.grammar is not None:
            request.grammar.close()
        if request.num_charged_tokens or request.num_uncharged_embeds:
            # The request never started, so charge its tenant only for media embeddings.
            if not request.num_charged_tokens:
                request.num_charged_tokens = request.num_tokens
            self._state.waiting.charge(request)

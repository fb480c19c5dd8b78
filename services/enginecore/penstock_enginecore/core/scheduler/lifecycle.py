"""How requests come, and how each ends exactly once."""

import itertools
from collections.abc import Iterable

from penstock_common.types.kv_transfer import KvSource
from penstock_common.types.outputs import EventType, RequestError
from penstock_enginecore.core.hold import Hold
from penstock_enginecore.core.kv_cache.manager import KVCacheManager
from penstock_enginecore.core.request import Request, RequestStatus
from penstock_enginecore.core.scheduler.admission import QueueAdmission
from penstock_enginecore.core.scheduler.base import SchedulerContext
from penstock_enginecore.core.scheduler.client_outputs import ClientOutputs
from penstock_enginecore.core.scheduler.deadlines import DeadlineQueue
from penstock_enginecore.core.scheduler.encoder_work import EncoderWork
from penstock_enginecore.core.scheduler.kv_loads import KvLoads
from penstock_enginecore.core.scheduler.requests import RequestTable
from penstock_enginecore.core.scheduler.running import RunningRequests
from penstock_enginecore.core.scheduler.stops import check_stop
from penstock_enginecore.core.scheduler.waiting import WaitingRequests

_NORMAL_ENDS = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH,
    RequestStatus.FINISHED_REPETITION,
)


class RequestLifecycle:
    """Takes requests in and ends them, wherever they are: waiting, held or running.

    ``finished_keys``: requests that have ended and that the workers have not been told of.
    """

    def __init__(
        self,
        context: SchedulerContext,
        *,
        requests: RequestTable,
        waiting: WaitingRequests,
        running: RunningRequests,
        admission: QueueAdmission,
        kv_cache: KVCacheManager,
        outputs: ClientOutputs,
        encoder: EncoderWork | None = None,
        kv_loads: KvLoads | None = None,
    ) -> None:
        self._encoder = encoder
        self._kv_loads = kv_loads
        self._clock = context.monotonic_clock
        self._wall_clock = context.wall_clock
        self._eos_token_ids = context.eos_token_ids
        self._lora_slots = context.lora_slots
        self._leases = context.leases
        self._requests = requests
        self._waiting = waiting
        self._running = running
        self._admission = admission
        self._kv_cache = kv_cache
        self._outputs = outputs
        self._deadlines = DeadlineQueue()
        self._arrivals = itertools.count()
        self.finished_keys: list[str] = []

    def add(self, request: Request, hold: Hold) -> None:
        """Queue a request; one whose prior output has reached a stop ends at once.

        Raises InvalidArgument for an id in use, ResourceExhausted when the queue is full.
        """
        self._requests.check_unused(request.client_id, request.request_id)
        if check_stop(request, self._eos_token_ids):
            self._outputs.add_end(request, [])
            return
        request.queued_time = now = self._clock()
        self._admission.check(request, now)
        request.arrival = next(self._arrivals)
        request.record_event(EventType.QUEUED, now)
        request.hold = hold
        self._waiting.add(request)
        self._requests.add(request)
        if self._encoder is not None and request.mm_features:
            self._encoder.begin(request)
        if self._kv_loads is not None:
            self._kv_loads.opened(request)
        self._deadlines.add(request)

    def abort(self, client_id: str, request_ids: Iterable[str], *, hand_over: bool = False) -> list[str]:
        """End those of a client's requests that live, with ABORT outputs, or with HANDOFF ones. Returns their ids."""
        found = self._requests.find(client_id, request_ids)
        self.end(found, RequestStatus.HANDED_OVER if hand_over else RequestStatus.FINISHED_ABORTED)
        return [request.request_id for request in found]

    def abort_client(self, client_id: str) -> None:
        """End all requests of a client that has gone, without outputs."""
        self.end(self._requests.of_client(client_id), RequestStatus.FINISHED_ABORTED)
        self._outputs.forget(client_id)

    def abort_all(self, error: RequestError, *, held: bool = True, keep_blocks: bool = False) -> None:
        """End every request with an ABORT output; not ``held``: but for those that wait for a pause to end. ``keep_blocks``: the
        engine keeps their blocks for the engines that go on with them, as of requests that it hands over.
        """
        requests = [r for r in self._requests.by_key.values() if held or not r.hold & Hold.PAUSE]
        self.end(requests, RequestStatus.FINISHED_ABORTED, error, keep_blocks=keep_blocks)

    def abort_expired(self) -> None:
        """End the requests whose deadline has passed, with ABORT outputs."""
        now = self._wall_clock()
        for request in self._deadlines.pop_expired(now):
            late = now - (request.context.deadline or now)
            message = f"the deadline passed {late:.3f} s ago, after {request.num_output_tokens} output tokens"
            error = RequestError(
                code="DEADLINE_EXCEEDED", message=message, field="deadline", reason="DEADLINE_EXCEEDED"
            )
            self.end([request], RequestStatus.FINISHED_ABORTED, error)

    def fail(self, request: Request, error: RequestError) -> bool:
        """End a request that cannot be served, with an ERROR output; one that has ended is left alone, and False returned."""
        if request.key not in self._requests.by_key:
            return False
        self.end([request], RequestStatus.FINISHED_ERROR, error)
        return True

    def fail_too_long(self, request: Request) -> None:
        """End a request whose tokens need more KV blocks than there are."""
        pool = self._kv_cache.pool
        message = (
            f"the sequence of {request.num_tokens} tokens needs more than the {pool.num_usable_blocks} KV cache blocks "
            f"of {self._kv_cache.block_size} tokens there are"
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
        """End living requests with one output each. ``keep_blocks``: for whoever goes on with them."""
        was_running = False
        for request in requests:
            if request.status is RequestStatus.RUNNING:
                was_running = True
                self.finished_keys.append(request.key)
            else:
                self._waiting.remove(request)
            request.status = status
            source = self._keep_blocks(request, wanted=keep_blocks or status is RequestStatus.HANDED_OVER)
            self._forget(request)
            self._outputs.add_end(request, [], error=error)
            if source is not None:
                self._outputs.add_source(request, source)
        if was_running:
            self._running.drop_finished()

    def ended_by_step(self, requests: list[Request]) -> None:
        """Forget running requests that a step's results have ended, and whose output says so."""
        for request in requests:
            self.finished_keys.append(request.key)
            handed_over = request.status is RequestStatus.HANDED_OVER
            wanted = handed_over or (request.lease_kv and request.status in _NORMAL_ENDS)
            if (source := self._keep_blocks(request, wanted=wanted)) is not None:
                self._outputs.add_source(request, source)
            if self._kv_loads is not None and request.status in _NORMAL_ENDS:
                self._outputs.add_answer(request, self._kv_loads.answer(request))
            self._forget(request)
        if requests:
            self._running.drop_finished()

    def take_finished_keys(self) -> list[str]:
        """Requests that have ended since the last call and that the workers know."""
        keys, self.finished_keys = self.finished_keys, []
        return keys

    def next_deadline(self) -> float | None:
        """The earliest deadline of a living request, in seconds since the epoch."""
        return self._deadlines.next_deadline()

    def _keep_blocks(self, request: Request, *, wanted: bool) -> KvSource | None:
        """Let whoever goes on with a request that ends have its blocks, if they are wanted and can be kept."""
        if not wanted or (leases := self._leases()) is None or not request.num_processed_tokens:
            return None
        return leases.grant(request)

    def _forget(self, request: Request) -> None:
        if self._kv_loads is not None:
            self._kv_loads.closed(request)
        self._kv_cache.free(request)
        self._requests.remove(request)
        self._deadlines.discard(request)
        if request.grammar is not None:
            request.grammar.close()
        if self._lora_slots is not None:
            self._lora_slots.leave(request.key)
        if request.lora_use is not None:
            request.lora_use.close()
        if self._encoder is not None:
            self._encoder.leave(request)
        if request.num_charged_tokens or request.num_uncharged_embeds:
            if not request.num_charged_tokens:  # it never started, and was given nothing else
                request.num_charged_tokens = request.num_tokens
            self._waiting.charge(request)

"""The waiting requests that start in a step."""

from collections.abc import Callable, Mapping

from penstock_common.types.outputs import EventType
from penstock_enginecore.core.hold import Hold
from penstock_enginecore.core.kv_cache.manager import KVCacheManager
from penstock_enginecore.core.kv_transfer.lease_seam import KVLeases
from penstock_enginecore.core.lora.request import LoraRequest
from penstock_enginecore.core.lora.slots import LoraSlots
from penstock_enginecore.core.request import Request, RequestStatus
from penstock_enginecore.core.request_log import log_incident
from penstock_enginecore.core.scheduler.admission import QueueAdmission
from penstock_enginecore.core.scheduler.base import Clock
from penstock_enginecore.core.scheduler.budget import StepBudget
from penstock_enginecore.core.scheduler.dealing import decodes
from penstock_enginecore.core.scheduler.encoder_work import EncoderWork
from penstock_enginecore.core.scheduler.kv_loads import KvLoads
from penstock_enginecore.core.scheduler.lifecycle import RequestLifecycle
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.core.scheduler.running import RunningRequests
from penstock_enginecore.core.scheduler.waiting import WaitingRequests


class WaitingScheduler:
    """Starts waiting requests while a step's budget and the KV blocks last.

    ``watermark_blocks`` stay free when a request starts beside others. ``lora_slots``: those of their adapters; a request whose
    adapter has none is held, and waits for that alone. ``encoder``: of their media, likewise. ``kv_loads``: has
    blocks brought that a request need not compute.
    """

    def __init__(
        self,
        *,
        budget: StepBudget,
        waiting: WaitingRequests,
        running: RunningRequests,
        admission: QueueAdmission,
        lifecycle: RequestLifecycle,
        kv_cache: KVCacheManager,
        watermark_blocks: int,
        clock: Clock,
        lora_slots: LoraSlots | None = None,
        encoder: EncoderWork | None = None,
        kv_loads: KvLoads | None = None,
        leases: Callable[[], KVLeases | None] = lambda: None,
    ) -> None:
        self._encoder = encoder
        self._kv_loads = kv_loads
        self._leases = leases
        self._lora_slots = lora_slots
        self._budget = budget
        self._waiting = waiting
        self._running = running
        self._admission = admission
        self._lifecycle = lifecycle
        self._kv_cache = kv_cache
        self._watermark_blocks = watermark_blocks
        self._clock = clock

    def schedule(self, output: SchedulerOutput) -> None:
        """Start requests in the order of the policy until one has no room."""
        if self._encoder is not None:
            self._encoder.serve()
        if self._kv_loads is not None and not self._start_loaded(output, self._kv_loads):
            return
        while self.has_room(output) and (request := self._waiting.head()) is not None:
            if not self.try_start(request, output) and not self._revoke_one(output):
                break

    def begin_step(self, requests: Mapping[str, Request]) -> None:
        """Let those go on whose adapters have got a slot, and whose media are encoded before the step's forward pass.
        ``requests``: the living ones by key.
        """
        self._budget.begin_step(self._encoder, decoding=any(map(decodes, self._running)))
        if self._lora_slots is not None:
            for key in self._lora_slots.settle(self._clock()):
                self._waiting.release(requests[key], Hold.LORA_SLOT)

    def has_room(self, output: SchedulerOutput) -> bool:
        """Whether another request can start in the step, KV blocks aside."""
        num_loading = 0 if self._kv_loads is None else len(self._kv_loads)
        return self._budget.has_room(output, len(self._running) + num_loading)

    def _start_loaded(self, output: SchedulerOutput, loads: KvLoads) -> bool:
        """Start those whose blocks were brought, who have had their turn. Returns False when one of them finds no room now."""
        for request in loads.ready:
            if not self._budget.has_room(output, len(self._running)):
                return False
            while not self.try_start(request, output):
                # Where nothing runs nobody gives up blocks but those who wait as this one does.
                if self._revoke_one(output):
                    continue
                if self._running or output.num_scheduled_tokens or not loads.give_up_one(keep=request):
                    return False
            if request.hold and not request.finished:  # by something else: others may need what it has
                loads.give_up(request)
        return True

    def _revoke_one(self, output: SchedulerOutput) -> bool:
        """Make room for a request where nothing runs that would: end a lease. False where there is none, or no need."""
        if self._running or output.num_scheduled_tokens:
            return False
        leases = self._leases()
        return leases is not None and leases.revoke_one()

    def try_start(self, request: Request, output: SchedulerOutput) -> bool:
        """Start a waiting request while there is room, or end one that can never start. Returns False when its blocks, or its
        prompt, find none now. What goes wrong with it ends that request alone.
        """
        try:
            return self._start_or_end(request, output)
        except Exception as e:
            output.remove(request)
            failure = log_incident(request, e, doing="scheduling the request")
            unknown = request.status is RequestStatus.RUNNING
            self._lifecycle.fail(request, failure)
            if unknown:  # to the workers, who need not forget it
                self._lifecycle.finished_keys.remove(request.key)
            return True

    def _start_or_end(self, request: Request, output: SchedulerOutput) -> bool:
        kv_cache = self._kv_cache
        if kv_cache.num_blocks_for(request.num_tokens) > kv_cache.pool.num_usable_blocks:
            self._lifecycle.fail_too_long(request)
            return True
        if request.lora is not None and not self._has_slot(request, request.lora):
            return True
        computed = kv_cache.get_computed_blocks(request)
        if self._kv_loads is not None:
            held = self._kv_loads.consider(request, computed, lambda count: self._reserved_blocks(request, count))
            if held is not None:
                return held
        num_missing_tokens = request.num_tokens - computed.num_tokens
        if not self._budget.may_join(num_missing_tokens, output):
            return False
        num_new_tokens = self._budget.tokens_for(num_missing_tokens, output)
        if num_new_tokens == 0 or (num_new_tokens < num_missing_tokens and not self._budget.chunked_prefill):
            return False
        if self._encoder is not None and computed.num_tokens < request.media_end:
            num_new_tokens = self._encoder.fit(request, computed.num_tokens, num_new_tokens, output)
            if num_new_tokens == 0:
                return False
            num_new_tokens = self._encoder.admit(request, computed.num_tokens, num_new_tokens)
            if num_new_tokens == 0:  # it waits for that alone
                return True
        beside_others = self._running or (self._kv_loads is not None and self._kv_loads.has_others(request))
        reserve = self._reserved_blocks(request, computed.num_tokens + num_new_tokens) if beside_others else 0
        if not kv_cache.admit(request, computed, num_new_tokens, reserve=reserve):
            return False
        self._waiting.start(request)
        self._start(request, computed.num_tokens, num_new_tokens, output)
        return True

    def _has_slot(self, request: Request, lora: LoraRequest) -> bool:
        """Whether the adapter of a request may be among the running; if not, the request waits for that from now on."""
        if self._lora_slots is None or self._lora_slots.admits(lora.digest):
            return True
        self._lora_slots.wait(request.key, lora.digest, lora.name, self._clock())
        self._waiting.hold(request, Hold.LORA_SLOT)
        return False

    def _reserved_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks that must stay free when a request starts beside others: for its other tokens, and the watermark."""
        rest = self._kv_cache.num_blocks_for(request.num_tokens) - self._kv_cache.num_blocks_for(num_tokens)
        return rest + self._watermark_blocks

    def _start(self, request: Request, num_computed: int, num_new_tokens: int, output: SchedulerOutput) -> None:
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = request.num_processed_tokens = num_computed
        now = self._clock()
        if self._kv_loads is not None:
            self._kv_loads.started(request, num_computed)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed
            self._admission.started(request, now)
        request.record_event(EventType.SCHEDULED, now)
        if self._lora_slots is not None and request.lora is not None:
            self._lora_slots.start(request.key, request.lora.digest, request.lora.name)
        if self._encoder is not None and request.mm_features:
            self._encoder.started(request, num_computed, num_new_tokens)
        self._running.add(request)
        output.add_new(request, num_new_tokens, self._kv_cache.block_ids(request))

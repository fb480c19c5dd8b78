"""Running requests that lose their KV blocks and are computed again."""

from collections.abc import Callable

from penstock_common.types.outputs import EventType
from penstock_enginecore.core.hold import Hold
from penstock_enginecore.core.kv_cache.manager import KVCacheManager
from penstock_enginecore.core.kv_transfer.lease_seam import KVLeases
from penstock_enginecore.core.lora.slots import LoraSlots
from penstock_enginecore.core.request import Request, RequestStatus
from penstock_enginecore.core.scheduler.base import Clock
from penstock_enginecore.core.scheduler.encoder_work import EncoderWork
from penstock_enginecore.core.scheduler.kv_loads import KvLoads
from penstock_enginecore.core.scheduler.lifecycle import RequestLifecycle
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.core.scheduler.running import RunningRequests
from penstock_enginecore.core.scheduler.trial import StepTrial
from penstock_enginecore.core.scheduler.waiting import WaitingRequests


class Preemption:
    """Preemption by recomputation: the request waits again, ahead of those that came later.

    ``preempted_keys``: requests that were preempted between steps, and that the workers have not been told of. ``next_step``: the
    number of the next step that computes something; results of those before it do not count for a request that is preempted.
    """

    def __init__(
        self,
        *,
        running: RunningRequests,
        waiting: WaitingRequests,
        lifecycle: RequestLifecycle,
        kv_cache: KVCacheManager,
        trial: StepTrial,
        clock: Clock,
        lora_slots: LoraSlots | None = None,
        encoder: EncoderWork | None = None,
        kv_loads: KvLoads | None = None,
        leases: Callable[[], KVLeases | None] = lambda: None,
    ) -> None:
        self._lora_slots = lora_slots
        self._kv_loads = kv_loads
        self._leases = leases
        self._encoder = encoder
        self._running = running
        self._waiting = waiting
        self._lifecycle = lifecycle
        self._kv_cache = kv_cache
        self._trial = trial
        self._clock = clock
        self.preempted_keys: list[str] = []
        self.num_preemptions = 0
        """Since the start."""

    def make_room(self, request: Request, num_new_tokens: int, output: SchedulerOutput) -> tuple[list[int], ...] | None:
        """Take blocks from the least urgent until ``request``, which runs, gets those for its next tokens.

        Returns the ids of the blocks added, a list per group, or None when it had to give up its own, or ended because it has all
        blocks already, or because blocks come back soon that are being copied: it gets its own in another step. Those preempted
        are taken out of the step.
        """
        while (new_block_ids := self._kv_cache.allocate_slots(request, num_new_tokens)) is None:
            leases = self._leases()
            if leases is not None and leases.revoke_one():
                continue
            if self._kv_loads is not None:
                if self._kv_loads.give_up_one():
                    continue
                if self._kv_loads.num_returning:
                    return None
            if len(self._running) == 1 and not leases:
                self._lifecycle.fail_too_long(request)
                return None
            victim = self._running.least_urgent()
            self._running.remove(victim)
            self._preempt(victim, output.step)
            output.preempted_request_ids.append(victim.key)
            output.remove(victim)
            if victim is request:
                return None
        return new_block_ids

    def hold_back(self, request: Request, hold: Hold, next_step: int) -> None:
        """Preempt a running request between steps, and hold it. One that does not run is left alone."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            request.hold |= hold
            self._preempt(request, next_step)
            self.preempted_keys.append(request.key)

    def preempt_all(self, next_step: int) -> None:
        """Preempt every running request, between steps."""
        for request in self._running.take_all():
            self._preempt(request, next_step)
            self.preempted_keys.append(request.key)
        if self._kv_loads is not None:
            self._kv_loads.give_up_all()
            self._kv_loads.forget_steps()
        if self._lora_slots is not None:
            self._lora_slots.reset()
            self._waiting.release_all(Hold.LORA_SLOT)

    def take_preempted_keys(self) -> list[str]:
        """Requests that were preempted between steps since the last call."""
        keys, self.preempted_keys = self.preempted_keys, []
        return keys

    def _preempt(self, request: Request, next_step: int) -> None:
        """Take the blocks of a request that is no longer among the running, and let it wait."""
        self._kv_cache.free(request)
        if self._lora_slots is not None:
            self._lora_slots.leave(request.key)
        if self._encoder is not None:
            self._encoder.leave(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_processed_tokens = 0
        request.num_placeholders = 0
        request.spec_token_ids = []
        request.unsettled = False
        request.valid_from_step = next_step
        request.num_preemptions += 1
        request.record_event(EventType.PREEMPTED, self._clock())
        if self._trial and request.key in self._trial:
            request.hold |= Hold.TRIAL
        self._waiting.add(request)
        self.num_preemptions += 1

"""Preemption: running requests lose their KV blocks and are recomputed later."""

from collections.abc import Iterable, Sequence

from penstock_common.types.outputs import EventType
from penstock_enginecore.core.request import Hold, Request, RequestStatus
from penstock_enginecore.core.scheduler.base import StepResource
from penstock_enginecore.core.scheduler.lifecycle import RequestLifecycle
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.core.scheduler.state import SchedulerState


class Preemption:
    """Preemption by recomputation. A preempted request is queued again, ahead of later requests.

    Attributes:
        preempted_keys: Keys of requests that were preempted between steps, and whose preemption no step has reported to
            the workers yet.
        num_preemptions: Number of preemptions since the engine started.
    """

    def __init__(self, state: SchedulerState, resources: Sequence[StepResource], lifecycle: RequestLifecycle) -> None:
        self._state = state
        self._kv_cache = state.kv_cache
        self._resources = resources
        self._lifecycle = lifecycle
        self.preempted_keys: list[str] = []
        self.num_preemptions = 0

    def make_room(self, request: Request, num_new_tokens: int, output: SchedulerOutput) -> tuple[list[int], ...] | None:
        """Allocate blocks for the next tokens of a running request, and preempt the least urgent requests if necessary.

        Preempted requests are removed from the step.

        Returns:
            The ids of the new blocks, one list per group. None if the request was preempted or ended. Also None if
            blocks that are being copied will be free soon. The request then gets its blocks in a later step.
        """
        while (new_block_ids := self._kv_cache.allocate_slots(request, num_new_tokens)) is None:
            running, leases = self._state.running, self._state.leases
            if leases.revoke_one():
                continue
            if any(resource.give_up_one() for resource in self._resources):
                continue
            if any(resource.returns_blocks for resource in self._resources):
                return None
            if len(running) == 1 and not leases:
                self._lifecycle.fail_too_long(request)
                return None
            victim = running.least_urgent()
            running.remove(victim)
            self._preempt(victim)
            output.preempted_request_ids.append(victim.key)
            output.remove(victim)
            if victim is request:
                return None
        return new_block_ids

    def hold_back(self, request: Request, hold: Hold) -> None:
        """Preempt a running request between steps, and add a hold to it. If the request is not running, nothing
        changes.
        """
        if request.status is RequestStatus.RUNNING:
            self._state.running.remove(request)
            request.hold |= hold
            self._preempt(request)
            self.preempted_keys.append(request.key)

    def preempt(self, keys: Iterable[str]) -> None:
        """Preempt the requests with these keys, between steps. Requests that are not running are skipped."""
        keys = set(keys)
        for request in [request for request in self._state.running if request.key in keys]:
            self._state.running.remove(request)
            self._preempt(request)
            self.preempted_keys.append(request.key)

    def preempt_all(self) -> None:
        """Preempt every running request, between steps."""
        for request in self._state.running.take_all():
            self._preempt(request)
            self.preempted_keys.append(request.key)
        for resource in self._resources:
            resource.all_preempted()

    def take_preempted_keys(self) -> list[str]:
        """Return the keys of the requests that were preempted between steps since the last call."""
        keys, self.preempted_keys = self.preempted_keys, []
        return keys

    def _preempt(self, request: Request) -> None:
        """Free the KV blocks of a request that was removed from the running requests, and queue the request. The
        scheduler will ignore the results of steps in flight for this request.
        """
        state = self._state
        self._kv_cache.free(request)
        for resource in self._resources:
            resource.preempted(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_processed_tokens = 0
        request.num_placeholders = 0
        request.spec_token_ids = []
        request.unsettled = False
        request.valid_from_step = state.next_step
        request.num_preemptions += 1
        request.record_event(EventType.PREEMPTED, state.clock())
        if state.trial and request.key in state.trial:
            request.hold |= Hold.TRIAL
        state.waiting.add(request)
        self.num_preemptions += 1

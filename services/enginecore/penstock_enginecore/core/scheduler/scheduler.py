"""The default scheduler: one token budget per step, first-come-first-served (FCFS) or priority order, and fair sharing
between tenants.

There is no prefill phase and no decode phase. In every step, the scheduler assigns tokens to requests until each
request's ``num_computed_tokens`` equals its ``num_tokens``. The same rule handles chunked prefill, prefix cache hits
and resumed requests. The rule is from vLLM V1.

``num_computed_tokens`` advances when a step is scheduled, not when it finishes. The next step can therefore be
scheduled while the current step runs. With asynchronous scheduling, a request can be in the next step before its last
token is known. A placeholder represents the unknown token. Workers run steps in order, so a worker has the token when
it runs the next step.
"""

from collections.abc import Iterable, Iterator

from penstock_common.types.outputs import EngineCoreOutputs, EventType, RequestError, SchedulerStats
from penstock_enginecore.core.request import Hold, Request, RequestStatus, log_incident
from penstock_enginecore.core.scheduler.base import Admission, PauseState, Scheduler, SchedulerContext, StepResource
from penstock_enginecore.core.scheduler.lifecycle import RequestLifecycle
from penstock_enginecore.core.scheduler.output import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.scheduler.preemption import Preemption
from penstock_enginecore.core.scheduler.results import StepResults
from penstock_enginecore.core.scheduler.state import SchedulerState
from penstock_enginecore.core.scheduler.token_budget import (
    DecodeShare,
    count_as_computed,
    count_as_not_computed,
    decodes,
    num_tokens_due,
    sampled_by_grammar,
)
from penstock_enginecore.core.scheduler.waiting_queue import QueueAdmission
from penstock_enginecore.kv_transfer.core.kv_loads import KvLoads
from penstock_enginecore.media.core.encoder_scheduling import EncoderWork
from penstock_enginecore.speculation.core.draft_planner import DraftPlanner


class DefaultScheduler(Scheduler):
    """The default implementation of ``Scheduler``, selected by ``scheduler.scheduler: default``.

    A request that has not ended is either waiting or running. Running requests have KV blocks. A waiting request has KV
    blocks only while they are being loaded. When no block is free, the least urgent running request is preempted. The
    request loses its blocks and is queued before later requests. ``StepResource`` objects manage adapters, media, KV
    loads and drafts. In each step, the loop over running requests and the loop over waiting requests call these
    objects.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self._state = state = SchedulerState(context)
        self.kv_cache = state.kv_cache
        self._requests, self._waiting, self._running = state.requests, state.waiting, state.running
        self._encoder = EncoderWork(state) if context.media else None
        self._drafting = DraftPlanner(state) if context.speculative.enabled else None
        self._kv_loads = None if context.kv_connector is None else KvLoads(state, context.kv_connector)
        optional: tuple[StepResource | None, ...] = (self._kv_loads, *context.resources, self._encoder, self._drafting)
        self._resources = [resource for resource in optional if resource is not None]
        self._admission = QueueAdmission(context.config, state.waiting)
        self._lifecycle = RequestLifecycle(state, self._resources, self._admission, self._kv_loads)
        for resource in context.resources:
            resource.attach(self)
        self._preemption = Preemption(state, self._resources, self._lifecycle)
        self._results = StepResults(state, self._drafting, self._encoder)
        self._num_stages = context.num_stages
        self._watermark_blocks = int(context.config.watermark * state.kv_cache.pool.num_usable_blocks)
        self._async = bool(context.config.async_scheduling)

    # Scheduling a step.

    def schedule(self, *, begin: bool = True) -> SchedulerOutput:
        state = self._state
        self._lifecycle.abort_expired()
        output = SchedulerOutput(step=state.next_step, num_scheduled_tokens={})
        output.preempted_request_ids = self._preemption.take_preempted_keys()
        paused = state.pause_state is PauseState.PAUSED
        for resource in self._resources:
            resource.begin_step(paused=paused)
        if not paused:
            suspects_first, encoder_waits = self._begin_trial_step()
            decoding = any(map(decodes, self._running))
            state.budget.begin_step(self._encoder, decoding=decoding, encoder_waits=encoder_waits)
            for running, waiting in self._turns(output, suspects_first=suspects_first, begin=begin):
                num_preemptions = self._preemption.num_preemptions
                left_out = self._continue_running(running, output)
                if self._preemption.num_preemptions == num_preemptions:
                    self._start_waiting(waiting, output)
                if left_out and not output.num_scheduled_tokens:
                    self._continue_running(running, output, early=True)
                if output.num_scheduled_tokens:
                    state.next_step += 1
                    if self.kv_cache.states is not None:
                        output.states = self.kv_cache.states.plan(output, self._requests.by_key)
                    count_as_computed(output, self._requests.by_key, expect_tokens=self._async)
                    if self._drafting is not None:
                        self._drafting.want(output, self._requests.by_key)
                    break
        output.finished_request_ids = self._lifecycle.take_finished_keys()
        for resource in self._resources:
            resource.end_step(output)
        return output

    def _continue_running(self, requests: list[Request], output: SchedulerOutput, *, early: bool = False) -> bool:
        """Schedule the tokens that each running request can compute, within the budget and the free KV blocks.

        An exception ends only the request for which the exception was raised. The method is a hot path: the loop body
        runs once per request and step.

        Args:
            requests: The running requests that may be in the step.
            output: The step that is being scheduled.
            early: Include requests whose last token is still in the pipeline stages.

        Returns:
            Whether a request was left out because its last token is still in the pipeline stages.
        """
        budget, drafting, encoder = self._state.budget, self._drafting, self._encoder
        if drafting is not None and not early:
            drafting.plan(requests)
        share = DecodeShare(requests, output.step, self._num_stages, early=early)
        max_num_tokens, spread = budget.max_num_tokens, share.is_limited
        for request in share.requests:
            if output.total_num_scheduled_tokens >= max_num_tokens:
                break
            try:
                count = num_tokens_due(request)
                # Skip requests whose next input token is not sampled yet, and requests that were preempted in this
                # loop.
                if count == 0 or request.status is not RequestStatus.RUNNING:
                    continue
                if count > 1:
                    count = budget.tokens_for(count, output)
                elif spread and share.leaves_out(request):
                    continue
                if encoder is not None and count:
                    count = encoder.reach(request, count, output)
                if count == 0:
                    continue
                block_ids = self._preemption.make_room(request, count, output)
                if block_ids is None:  # The request was preempted, has ended, or waits for copies of blocks.
                    continue
                if drafting is not None and count == 1:
                    drafting.add(request, block_ids, output)
                else:
                    output.add_known(request, count, block_ids)
            except Exception as e:
                output.remove(request)
                self._lifecycle.fail(request, log_incident(request, e, doing="scheduling the request"))
        return share.has_early

    def _start_waiting(self, requests: Iterator[Request], output: SchedulerOutput) -> None:
        """Start waiting requests in policy order until a request does not fit."""
        for request in requests:
            while self._try_start(request, output) is Admission.NO_ROOM:
                if not self._free_blocks_for(request, output):
                    return

    def _try_start(self, request: Request, output: SchedulerOutput) -> Admission:
        """Start a waiting request and allocate its blocks, if the request fits into the step and the KV cache. An
        exception ends the request.
        """
        kv_cache, budget = self.kv_cache, self._state.budget
        try:
            if kv_cache.num_blocks_for(request.num_tokens) > kv_cache.pool.num_usable_blocks:
                self._lifecycle.fail_too_long(request)
                return Admission.ENDED
            if hold := next(filter(None, (resource.may_start(request) for resource in self._resources)), None):
                self._waiting.hold(request, hold)
                return Admission.BLOCKED
            computed = kv_cache.get_computed_blocks(request)
            for resource in self._resources:
                admission = resource.load(request, computed, lambda count: self._reserve(request, count))
                if admission is not None:
                    return admission
            start, missing = computed.num_tokens, request.num_tokens - computed.num_tokens
            if not budget.may_join(missing, output):
                return Admission.NO_ROOM
            count = budget.tokens_for(missing, output)
            if count == 0 or (count < missing and not budget.chunked_prefill):
                return Admission.NO_ROOM
            for resource in self._resources:
                if (count := resource.fit(request, start, count, output)) == 0:
                    return Admission.NO_ROOM
                if (count := resource.claim(request, start, count)) == 0:
                    return Admission.BLOCKED
            beside_others = self._running or any(resource.has_others(request) for resource in self._resources)
            reserve = self._reserve(request, start + count) if beside_others else 0
            if not kv_cache.admit(request, computed, count, reserve=reserve):
                return Admission.NO_ROOM
            self._waiting.start(request)
            self._start(request, start, count, output)
        except Exception as e:
            self._end_failed_start(request, e, output)
            return Admission.ENDED
        return Admission.STARTED

    def _reserve(self, request: Request, num_tokens: int) -> int:
        """Return the number of blocks to keep free when a request gets blocks for its first ``num_tokens`` tokens and
        other requests have blocks. The blocks are kept free for the request's remaining tokens, plus the watermark.
        """
        rest = self.kv_cache.num_blocks_for(request.num_tokens) - self.kv_cache.num_blocks_for(num_tokens)
        return rest + self._watermark_blocks

    def _start(self, request: Request, num_computed: int, count: int, output: SchedulerOutput) -> None:
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = request.num_processed_tokens = num_computed
        for resource in self._resources:
            resource.started(request, num_computed, count)
        now = self._state.clock()
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed
            self._admission.started(request, now)
        request.record_event(EventType.SCHEDULED, now)
        self._running.add(request)
        output.add_new(request, count, self.kv_cache.block_ids(request))

    def _end_failed_start(self, request: Request, exception: Exception, output: SchedulerOutput) -> None:
        """End a request whose start raised ``exception``."""
        output.remove(request)
        error = log_incident(request, exception, doing="scheduling the request")
        unknown_to_workers = request.status is RequestStatus.RUNNING
        self._lifecycle.fail(request, error)
        if unknown_to_workers:  # The workers have no state of the request, so no step must tell them to drop it.
            self._lifecycle.finished_keys.remove(request.key)

    def _begin_trial_step(self) -> tuple[bool, bool]:
        """Begin a step of ``StepTrial``, if it searches for the cause of a failed step. Return whether suspects are
        scheduled before other requests, and whether the encoders wait. They wait in steps of suspects without media,
        because ``step_failed`` blames no such suspect for a step that also encoded media.
        """
        trial, requests = self._state.trial, self._requests.by_key
        if trial:
            trial.settle(requests)
        suspects_first = bool(trial) and trial.next_turn()
        return suspects_first, suspects_first and not self._suspects_have_media()

    def _suspects_have_media(self) -> bool:
        requests = self._requests.by_key
        return any(key in requests and requests[key].mm_features for key in self._state.trial.subset)

    def _turns(
        self, output: SchedulerOutput, *, suspects_first: bool, begin: bool
    ) -> Iterator[tuple[list[Request], Iterator[Request]]]:
        """Yield pairs of running and waiting requests for the step, until one pair has tokens to compute.

        Normally there is one pair, which has all requests. While ``StepTrial`` searches for the cause of a failed step,
        there are two pairs: the suspects, and all other requests. The pairs take turns in being first. If the step
        encodes media for the other requests, suspects without media wait for the next step.
        """
        if not self._state.trial:
            yield self._running.requests.copy(), self._heads(output) if begin else iter(())
            return
        suspects = self._state.trial.subset
        for of_suspects in (suspects_first, not suspects_first):
            if of_suspects and self._encoder is not None and self._encoder.computes and not self._suspects_have_media():
                return
            running = [request for request in self._running if (request.key in suspects) is of_suspects]
            yield running, self._suspects(output) if of_suspects else self._others(output)

    def _suspects(self, output: SchedulerOutput) -> Iterator[Request]:
        """Yield the waiting suspects of the current trial, until the step is full."""
        for request in self._waiting_suspects():
            if not self._has_room(output):
                return
            yield request

    def _others(self, output: SchedulerOutput) -> Iterator[Request]:
        """Yield the waiting requests that are not suspects. Yield nothing while a suspect waits, because the suspect
        could otherwise wait forever.
        """
        if not self._waiting_suspects():
            yield from self._heads(output)

    def _heads(self, output: SchedulerOutput) -> Iterator[Request]:
        """Yield waiting requests in queue order until the step is full. Requests whose blocks were loaded come first.

        Before the caller asks for the next request, the current request must have started, ended or been held.
        """
        for resource in self._resources:
            resource.begin_waiting()
        for request in self._kv_loads.ready if self._kv_loads is not None else ():
            if not self._state.budget.has_room(output, len(self._running)):
                return
            yield request
            if self._kv_loads is not None and request.hold and not request.finished:
                # A resource other than KV loads blocks the request. Free its loaded blocks, because other requests may
                # need blocks.
                self._kv_loads.give_up(request)
        while self._has_room(output) and (head := self._waiting.head()) is not None:
            yield head

    def _has_room(self, output: SchedulerOutput) -> bool:
        """Return whether the limits of the step allow one more request to start. The method does not check the number
        of free KV blocks.
        """
        num_loading = 0 if self._kv_loads is None else len(self._kv_loads)
        return self._state.budget.has_room(output, len(self._running) + num_loading)

    def _free_blocks_for(self, request: Request, output: SchedulerOutput) -> bool:
        """Free blocks for a waiting request by ending a lease or another request's load. Return False if there is no
        such lease or load. Also return False if requests are running, because running requests free their blocks when
        they end.
        """
        if self._running or output.num_scheduled_tokens:
            return False
        if self._state.leases.revoke_one():
            return True
        loads = self._kv_loads
        return loads is not None and loads.holds(request) and loads.give_up_one(keep=request)

    def _waiting_suspects(self) -> list[Request]:
        requests = self._requests.by_key
        return [
            requests[key] for key in self._state.trial.subset if key in requests and requests[key].hold == Hold.TRIAL
        ]

    # Adding and ending requests.

    def add_request(self, request: Request, hold: Hold = Hold.NONE) -> None:
        """Queue a request. If the output that another engine generated already meets a stop condition, the request ends
        immediately.
        """
        self._lifecycle.add(request, hold if self._state.pause_state is PauseState.RUNNING else hold | Hold.PAUSE)

    def release(self, request: Request, hold: Hold) -> None:
        """Remove a hold from a request. If the request has no other hold, it joins the queue."""
        if not request.finished:
            self._waiting.release(request, hold)

    def hold_back(self, request: Request, hold: Hold) -> None:
        self._preemption.hold_back(request, hold)

    def fail(self, request: Request, error: RequestError) -> bool:
        """End a request with an ERROR output. If the request has already ended, nothing changes."""
        return self._lifecycle.fail(request, error)

    def abort_requests(self, client_id: str, request_ids: Iterable[str], *, hand_over: bool = False) -> list[str]:
        return self._lifecycle.abort(client_id, request_ids, hand_over=hand_over)

    def abort_client(self, client_id: str) -> None:
        self._lifecycle.abort_client(client_id)

    def abort_all(self, error: RequestError, *, held: bool = True, keep_blocks: bool = False) -> None:
        self._lifecycle.abort_all(error, held=held, keep_blocks=keep_blocks)

    def end_expired(self) -> None:
        self._lifecycle.abort_expired()

    # Results of a step.

    def constrained(self, scheduler_output: SchedulerOutput) -> list[Request]:
        return sampled_by_grammar(scheduler_output, self._requests.by_key) if self._requests.num_constrained else []

    def update_from_output(self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput) -> None:
        self._state.trial.step_done()
        if self._kv_loads is not None:
            self._kv_loads.stepped(scheduler_output)
        if self._encoder is not None and model_output.encoder_failures:
            self._encoder.fail(model_output.encoder_failures, self._requests.by_key, self._lifecycle.fail)
        ended = self._results.take(scheduler_output, model_output, self._requests.by_key)
        if self._drafting is not None:
            self._drafting.stepped(scheduler_output, model_output, self._requests.by_key)
        self._lifecycle.ended_by_step(ended)

    def update_draft_token_ids(self, scheduler_output: SchedulerOutput, drafts: DraftTokenIds) -> None:
        if self._drafting is not None:
            self._drafting.take_drafts(scheduler_output, drafts, self._requests.by_key)

    @property
    def drafter_failure(self) -> str:
        return "" if self._drafting is None else self._drafting.failure

    def roll_back(self, scheduler_output: SchedulerOutput) -> None:
        count_as_not_computed(scheduler_output, self._requests.by_key)
        if self.kv_cache.states is not None:
            # The step may have overwritten the stored inputs of recurrent layers (open rows) that its tokens need. The
            # preempted requests therefore start again from a kept state.
            self._preemption.preempt(scheduler_output.num_scheduled_tokens)
        for resource in self._resources:
            resource.workers_reset()

    def step_failed(self, scheduler_output: SchedulerOutput) -> Request | None:
        """Preempt all requests, and try the requests of the failed step in subsets. If the step also encoded media, no
        request is blamed, because the failure could have come from encoding.
        """
        requests = self._requests.by_key
        targets = {key: count for key, count in scheduler_output.num_tokens_after.items() if key in requests}
        began = {new.request_id for new in scheduler_output.new_requests}
        may_blame = not scheduler_output.encoder_budget or any(requests[key].mm_features for key in targets)
        alone = len(scheduler_output.num_scheduled_tokens) == 1 and may_blame
        culprit = self._state.trial.failed(targets, new=began, alone=alone)
        self.preempt_all()
        for resource in self._resources:
            resource.workers_reset()
        for key in targets:  # The suspects include requests that lost their blocks while the step was in flight.
            if key in self._state.trial:
                self._waiting.hold(requests[key], Hold.TRIAL)
        # The workers have dropped all request state.
        self._lifecycle.take_finished_keys()
        self._preemption.take_preempted_keys()
        return requests[culprit] if culprit else None

    @property
    def num_unexplained_failures(self) -> int:
        return self._state.trial.num_unexplained

    def take_outputs(self) -> dict[str, EngineCoreOutputs]:
        return self._state.outputs.take(self.stats(), self._state.clock()) if self._state.outputs else {}

    # Queries and control.

    @property
    def has_requests(self) -> bool:
        return len(self._requests) > 0

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_held_by_pause(self) -> int:
        if self._state.pause_state is PauseState.RUNNING:
            return 0
        return sum(bool(request.hold & Hold.PAUSE) for request in self._requests.by_key.values())

    @property
    def has_work(self) -> bool:
        if self._requests or self._lifecycle.finished_keys or self._preemption.preempted_keys or self._state.outputs:
            return True
        return self._kv_loads is not None and self._kv_loads.has_news

    def next_deadline(self) -> float | None:
        return self._lifecycle.next_deadline()

    @property
    def pause_state(self) -> PauseState:  # type: ignore[override]
        """Whether requests are scheduled."""
        return self._state.pause_state

    def pause(self, state: PauseState) -> None:
        self._state.pause_state = state
        if state is PauseState.RUNNING:
            self._waiting.release_all(Hold.PAUSE)

    @property
    def drained(self) -> bool:
        return all(request.hold & Hold.PAUSE for request in self._requests.by_key.values())

    def preempt_all(self) -> None:
        self._preemption.preempt_all()

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache, if no request is running. Checking for blocks in use is not enough: a running request
        uses no block if all of its blocks are outside its attention windows.
        """
        if not self._running and self._kv_loads is not None:
            self._kv_loads.settle()
        return not self._running and self.kv_cache.reset_prefix_cache()

    def reset_encoder_cache(self) -> None:
        if self._encoder is not None:
            self._encoder.reset()

    def stats(self) -> SchedulerStats:
        prefix = self.kv_cache.prefix_stats
        return SchedulerStats(
            num_running_reqs=len(self._running),
            num_waiting_reqs=len(self._waiting),
            num_skipped_reqs=self._waiting.num_held,
            kv_cache_usage=self.kv_cache.pool.usage,
            prefix_cache_queries=prefix.queries,
            prefix_cache_hits=prefix.hits,
            num_preemptions=self._preemption.num_preemptions,
            step_counter=self._state.next_step,
            states=None if self.kv_cache.states is None else self.kv_cache.states.stats(),
            **{resource.stats_name: resource.stats() for resource in self._resources if resource.stats_name},
        )

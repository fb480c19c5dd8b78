"""The default scheduler: one token budget, first come first served or by priority, shared fairly between tenants.

There is no prefill phase and no decode phase. Every step hands out tokens so that each request's
``num_computed_tokens`` catches up with its ``num_tokens``. Chunked prefill, prefix hits and resumed requests all
follow from that rule, which is vLLM V1's.

``num_computed_tokens`` moves when a step is scheduled, so that the next step can be scheduled while this one runs. With
asynchronous scheduling a request also gets the step behind a token that is not known yet: a placeholder stands for it, and
the worker, which runs steps in order, has the token by then.
"""

import itertools
from collections.abc import Callable, Iterable

from penstock_common.errors import ConfigError
from penstock_common.types.kv_events import KvCacheEvent
from penstock_common.types.outputs import EngineCoreOutputs, EventType, RequestError, SchedulerStats
from penstock_enginecore.core.kv_cache.manager import KVCacheManager
from penstock_enginecore.core.request import Hold, Request, RequestStatus
from penstock_enginecore.core.request_log import log_incident
from penstock_enginecore.core.scheduler.admission import QueueAdmission
from penstock_enginecore.core.scheduler.base import Scheduler, SchedulerContext
from penstock_enginecore.core.scheduler.deadlines import DeadlineQueue
from penstock_enginecore.core.scheduler.fair_queue import FairQueue
from penstock_enginecore.core.scheduler.held import HeldRequests
from penstock_enginecore.core.scheduler.outbox import Outbox
from penstock_enginecore.core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.scheduler.pause import PauseState
from penstock_enginecore.core.scheduler.requests import RequestTable
from penstock_enginecore.core.scheduler.results import StepResults
from penstock_enginecore.core.scheduler.stops import check_stop
from penstock_enginecore.core.scheduler.trial import StepTrial


class DefaultScheduler(Scheduler):
    """See ``Scheduler`` for the protocol.

    A request is in exactly one of ``_waiting``, ``_held`` and ``_running``. Running requests hold KV blocks, others none.
    When blocks run out, the least urgent of the running gives up its blocks and waits again, ahead of those that came later.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self._config = config = context.config
        self._clock = context.monotonic_clock
        self._wall_clock = context.wall_clock
        self._eos_token_ids = context.eos_token_ids
        self._chunked = config.enable_chunked_prefill and context.supports_chunked_prefill
        _check_limits(self._chunked, config.max_num_batched_tokens, context.kv_cache.max_model_len)
        self.kv_cache = KVCacheManager(
            context.kv_cache,
            enable_prefix_caching=context.enable_prefix_caching,
            enable_kv_events=context.enable_kv_events,
        )
        self._watermark_blocks = int(config.watermark * self.kv_cache.pool.num_usable_blocks)
        # Each running request needs a token of every step's budget.
        self._max_num_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._by_priority = config.policy == "priority"
        self._running: list[Request] = []
        self._waiting = FairQueue(by_priority=self._by_priority, fair=config.fairness)
        self._held = HeldRequests()
        self._admission = QueueAdmission(config, self._waiting, self._held)
        self._requests = RequestTable()
        self._deadlines = DeadlineQueue()
        self._outbox = Outbox()
        self._results = StepResults(self.kv_cache, self._outbox, context.eos_token_ids)
        self._arrivals = itertools.count()
        self._finished_keys: list[str] = []
        self._preempted_keys: list[str] = []
        self._num_preemptions = 0
        self._trial = StepTrial()
        self._step_counter = 0
        self.pause_state = PauseState.RUNNING

    # Requests come and go.

    def hash_prompt(self, request: Request) -> None:
        """Hash the prompt's blocks, on whatever thread."""
        self.kv_cache.hash_prompt(request)

    def add_request(self, request: Request, hold: Hold = Hold.NONE) -> None:
        """Queue a request; one whose prior output has reached a stop ends at once."""
        self._requests.check_unused(request.client_id, request.request_id)
        if check_stop(request, self._eos_token_ids):
            self._outbox.add_end(request, [])
            return
        request.queued_time = now = self._clock()
        self._admission.check(request, now)
        request.arrival = next(self._arrivals)
        request.record_event(EventType.QUEUED, now)
        request.hold = hold if self.pause_state is PauseState.RUNNING else hold | Hold.PAUSE
        if request.hold:
            self._held.add(request)
        else:
            self._waiting.add(request)
        self._requests.add(request)
        self._deadlines.add(request)

    def release(self, request: Request, hold: Hold) -> None:
        """Take a reason to wait away; without another one the request takes its turn."""
        if request.finished or not request.hold & hold:
            return
        request.hold &= ~hold
        if not request.hold:
            self._held.remove(request)
            self._waiting.add(request)

    def hold_back(self, request: Request, hold: Hold) -> None:
        """Preempt a running request and hold it."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            request.hold |= hold
            self._preempt(request)
            self._preempted_keys.append(request.key)

    def fail(self, request: Request, error: RequestError) -> bool:
        """End a request that cannot be served, with an ERROR output; one that has ended is left alone."""
        if request.key not in self._requests.by_key:
            return False
        self._end([request], RequestStatus.FINISHED_ERROR, error)
        return True

    def abort_requests(self, client_id: str, request_ids: Iterable[str]) -> list[str]:
        """End those of the requests that exist, with ABORT outputs."""
        found = self._requests.find(client_id, request_ids)
        self._end(found, RequestStatus.FINISHED_ABORTED, None)
        return [request.request_id for request in found]

    def abort_client(self, client_id: str) -> None:
        """End all requests of a client that has gone, without outputs."""
        self._end(self._requests.of_client(client_id), RequestStatus.FINISHED_ABORTED, None)
        self._outbox.forget(client_id)

    def abort_all(self, error: RequestError) -> None:
        """End every request with an ABORT output."""
        self._end(list(self._requests.by_key.values()), RequestStatus.FINISHED_ABORTED, error)

    def _end(self, requests: list[Request], status: RequestStatus, error: RequestError | None) -> None:
        """End living requests, wherever they are, with one output each."""
        was_running = False
        for request in requests:
            if request.status is RequestStatus.RUNNING:
                was_running = True
                self._finished_keys.append(request.key)
            elif request.hold:
                self._held.remove(request)
            else:
                self._waiting.remove(request)
            request.status = status
            self._release(request)
            self._outbox.add_end(request, [], error=error)
        if was_running:
            self._drop_finished()

    def _release(self, request: Request) -> None:
        """Forget an ended request. The caller takes it out of its queue."""
        self.kv_cache.free(request)
        self._requests.remove(request)
        self._deadlines.discard(request)
        if request.grammar is not None:
            request.grammar.close()
        if request.num_charged_tokens:
            self._waiting.charge(request)

    def _drop_finished(self) -> None:
        self._running = [request for request in self._running if not request.finished]

    # A step.

    def schedule(self) -> SchedulerOutput:
        """Running requests first; waiting ones only if nobody had to give up blocks."""
        self._end_expired()
        output = SchedulerOutput(step=self._step_counter, num_scheduled_tokens={})
        output.preempted_request_ids, self._preempted_keys = self._preempted_keys, []
        if self.pause_state is not PauseState.PAUSED:
            if self._trial:
                self._schedule_in_turns(output)
            else:
                self._schedule_group(output, self._running.copy(), self._schedule_waiting)
            output.num_common_prefix_blocks = self.kv_cache.num_common_prefix_blocks(self._running)
            self._advance(output)
        output.finished_request_ids, self._finished_keys = self._finished_keys, []
        return output

    def _advance(self, output: SchedulerOutput) -> None:
        """What is scheduled counts as computed for the steps behind it, and the tokens it brings as known."""
        if not output.num_scheduled_tokens:
            return
        self._step_counter += 1
        requests = self._requests.by_key
        place = self._config.async_scheduling
        for key, num_tokens in output.num_scheduled_tokens.items():
            request = requests[key]
            request.num_computed_tokens += num_tokens
            if place and request.num_computed_tokens == request.num_tokens + request.num_placeholders:
                request.num_placeholders += 1

    def _end_expired(self) -> None:
        now = self._wall_clock()
        for request in self._deadlines.pop_expired(now):
            late = now - (request.context.deadline or now)
            message = f"the deadline passed {late:.3f} s ago, after {request.num_output_tokens} output tokens"
            error = RequestError(
                code="DEADLINE_EXCEEDED", message=message, field="deadline", reason="DEADLINE_EXCEEDED"
            )
            self._end([request], RequestStatus.FINISHED_ABORTED, error)

    def _schedule_group(
        self, output: SchedulerOutput, running: list[Request], schedule_waiting: Callable[[SchedulerOutput], None]
    ) -> None:
        had_preempted = self._num_preemptions
        self._schedule_running(output, running)
        if self._num_preemptions == had_preempted:
            schedule_waiting(output)

    def _schedule_in_turns(self, output: SchedulerOutput) -> None:
        """While a step's failure is looked into: a step of the suspects that are tried, then one of all others."""
        self._trial.settle(self._requests.by_key)
        suspects = self._trial.group
        suspects_turn = self._trial.next_turn()
        for of_suspects in (suspects_turn, not suspects_turn):
            running = [request for request in self._running if (request.key in suspects) is of_suspects]
            self._schedule_group(output, running, self._start_suspects if of_suspects else self._start_others)
            if output.num_scheduled_tokens:
                return

    def _start_suspects(self, output: SchedulerOutput) -> None:
        for request in self._waiting_suspects():
            if not self._has_room(output) or not self._try_start(request, output):
                return

    def _start_others(self, output: SchedulerOutput) -> None:
        if not self._waiting_suspects():  # or they might wait for ever
            self._schedule_waiting(output)

    def _waiting_suspects(self) -> list[Request]:
        requests = self._requests.by_key
        return [requests[key] for key in self._trial.group if key in requests and requests[key].hold == Hold.TRIAL]

    def _schedule_running(self, output: SchedulerOutput, running: list[Request]) -> None:
        for request in running:
            budget = self._budget_left(output)
            if budget <= 0:
                break
            try:
                # 0: its next token is on its way. Not running: it had to make room.
                num_new_tokens = self._num_schedulable(request)
                if num_new_tokens == 0 or request.status is not RequestStatus.RUNNING:
                    continue
                if num_new_tokens > 1:
                    num_new_tokens = self._chunk(num_new_tokens, budget)
                new_block_ids = self._allocate_or_preempt(request, num_new_tokens, output)
                if new_block_ids is None:  # it gave up its own blocks, or ended
                    continue
                output.add_known(request, num_new_tokens, new_block_ids)
            except Exception as e:
                output.remove(request)
                self.fail(request, log_incident(request, e, doing="scheduling the request"))

    def _budget_left(self, output: SchedulerOutput) -> int:
        return self._config.max_num_batched_tokens - output.total_num_scheduled_tokens

    def _num_schedulable(self, request: Request) -> int:
        if request.grammar is not None and not request.grammar.wanted():
            return 0
        placeholders = request.num_placeholders
        if placeholders and request.num_output_tokens + placeholders >= request.max_tokens:
            return 0
        return len(request.all_token_ids) + placeholders - request.num_computed_tokens

    def _allocate_or_preempt(
        self, request: Request, num_new_tokens: int, output: SchedulerOutput
    ) -> tuple[list[int], ...] | None:
        """New block ids for a running request, or None when it lost its own blocks."""
        while (new_block_ids := self.kv_cache.allocate_slots(request, num_new_tokens)) is None:
            if len(self._running) == 1:
                self._end_too_long(request)
                return None
            victim = max(self._running, key=self._waiting.rank) if self._by_priority else self._running[-1]
            self._running.remove(victim) if self._by_priority else self._running.pop()
            self._preempt(victim)
            output.preempted_request_ids.append(victim.key)
            output.remove(victim)
            if victim is request:
                return None
        return new_block_ids

    def _preempt(self, request: Request) -> None:
        """Take the blocks of a request that is no longer among the running, and let it wait."""
        self.kv_cache.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_processed_tokens = 0
        request.num_placeholders = 0
        request.valid_from_step = self._step_counter
        request.num_preemptions += 1
        request.record_event(EventType.PREEMPTED, self._clock())
        if self._trial and request.key in self._trial:
            request.hold |= Hold.TRIAL
        if request.hold:
            self._held.add(request)
        else:
            self._waiting.add(request)
        self._num_preemptions += 1

    def _schedule_waiting(self, output: SchedulerOutput) -> None:
        while self._waiting and self._has_room(output):
            if not self._try_start(self._waiting.peek(), output):
                break

    def _has_room(self, output: SchedulerOutput) -> bool:
        return len(self._running) < self._max_num_running and self._budget_left(output) > 0

    def _try_start(self, request: Request, output: SchedulerOutput) -> bool:
        """Start a waiting request, or end one that can never start. Returns False when there is no room for it now."""
        try:
            return self._start_or_end(request, output)
        except Exception as e:
            output.remove(request)
            failure = log_incident(request, e, doing="scheduling the request")
            unknown = request.status is RequestStatus.RUNNING
            self.fail(request, failure)
            if unknown:  # to the workers, who need not forget it
                self._finished_keys.remove(request.key)
            return True

    def _start_or_end(self, request: Request, output: SchedulerOutput) -> bool:
        kv_cache = self.kv_cache
        if kv_cache.num_blocks_for(request.num_tokens) > kv_cache.pool.num_usable_blocks:
            self._end_too_long(request)
            return True
        computed = kv_cache.get_computed_blocks(request)
        num_missing_tokens = request.num_tokens - computed.num_tokens
        num_new_tokens = self._chunk(num_missing_tokens, self._budget_left(output))
        if num_new_tokens < num_missing_tokens and not self._chunked:
            return False
        reserve = self._reserved_blocks(request, computed.num_tokens + num_new_tokens) if self._running else 0
        if not kv_cache.admit(request, computed, num_new_tokens, reserve=reserve):
            return False
        if request.hold:
            self._held.remove(request)
            request.hold = Hold.NONE
        else:
            self._waiting.take(request)
        self._start(request, computed.num_tokens, num_new_tokens, output)
        return True

    def _reserved_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks that must stay free when a request starts beside others: for its other tokens, and the watermark."""
        rest = self.kv_cache.num_blocks_for(request.num_tokens) - self.kv_cache.num_blocks_for(num_tokens)
        return rest + self._watermark_blocks

    def _start(self, request: Request, num_computed: int, num_new_tokens: int, output: SchedulerOutput) -> None:
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = request.num_processed_tokens = num_computed
        now = self._clock()
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed
            self._admission.started(request, now)
        request.record_event(EventType.SCHEDULED, now)
        self._running.append(request)
        output.add_new(request, num_new_tokens, self.kv_cache.block_ids(request))

    def _chunk(self, num_tokens: int, budget: int) -> int:
        threshold = self._config.long_prefill_token_threshold
        if 0 < threshold < num_tokens and self._chunked:
            num_tokens = threshold
        return min(num_tokens, budget)

    def _end_too_long(self, request: Request) -> None:
        pool = self.kv_cache.pool
        message = (
            f"the sequence of {request.num_tokens} tokens needs more than the {pool.num_usable_blocks} KV cache blocks "
            f"of {self.kv_cache.block_size} tokens there are"
        )
        error = RequestError(code="RESOURCE_EXHAUSTED", message=message, reason="KV_CACHE_TOO_SMALL")
        self._end([request], RequestStatus.FINISHED_ERROR, error)

    def constrained(self, scheduler_output: SchedulerOutput) -> list[Request]:
        """Requests of a step that get a token which a grammar decides on, in batch order."""
        requests = self._requests.by_key
        found: list[Request] = []
        if not self._requests.num_constrained:
            return found
        for key in scheduler_output.num_scheduled_tokens:
            request = requests.get(key)
            if (
                request is not None
                and request.grammar is not None
                and scheduler_output.step >= request.valid_from_step
                and request.num_computed_tokens >= request.num_tokens
            ):
                found.append(request)
        return found

    def update_from_output(self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput) -> None:
        """Append the sampled tokens, check stops, and make computed blocks findable."""
        self._trial.step_done()
        finished = self._results.take(scheduler_output, model_output, self._requests.by_key)
        for request in finished:
            self._finished_keys.append(request.key)
            self._release(request)
        if finished:
            self._drop_finished()

    def step_failed(self, scheduler_output: SchedulerOutput) -> Request | None:
        """Let every request be computed again, those of the failed step in groups of their own."""
        requests = self._requests.by_key
        targets = {key: count for key, count in scheduler_output.num_tokens_after.items() if key in requests}
        began = {new.request_id for new in scheduler_output.new_requests}
        culprit = self._trial.failed(targets, new=began, alone=len(scheduler_output.num_scheduled_tokens) == 1)
        self.preempt_all()
        for key in targets:  # those that had lost their blocks while the step was in flight
            request = requests[key]
            if key in self._trial and not request.hold:
                self._waiting.remove(request)
                self._held.add(request)
            if key in self._trial:
                request.hold |= Hold.TRIAL
        # The workers know no request any more.
        self._finished_keys.clear()
        self._preempted_keys.clear()
        return requests[culprit] if culprit else None

    @property
    def num_unexplained_failures(self) -> int:
        """Times in a row that a step failed, and then each of its requests passed alone."""
        return self._trial.num_unexplained

    def take_outputs(self) -> dict[str, EngineCoreOutputs]:
        """Outputs since the last call, by client id."""
        return self._outbox.take(self.stats(), self._clock()) if self._outbox else {}

    def take_kv_events(self) -> list[KvCacheEvent]:
        """Changes of the prefix cache since the last call."""
        return self.kv_cache.take_events()

    # What others may ask.

    @property
    def has_requests(self) -> bool:
        """Whether any request is waiting or running."""
        return len(self._requests) > 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._finished_keys or self._preempted_keys or self._outbox)

    def next_deadline(self) -> float | None:
        """The earliest deadline of a living request, in seconds since the epoch."""
        return self._deadlines.next_deadline()

    def pause(self, state: PauseState) -> None:
        """Change to ``state``; see ``PauseState``. RUNNING lets those go on that came meanwhile."""
        self.pause_state = state
        if state is PauseState.RUNNING:
            for request in list(self._held):
                self.release(request, Hold.PAUSE)

    @property
    def drained(self) -> bool:
        """Whether every request that is left came after the pause was asked for."""
        return all(request.hold & Hold.PAUSE for request in self._requests.by_key.values())

    def preempt_all(self) -> None:
        """Take every running request's blocks; all are computed again."""
        running, self._running = self._running, []
        for request in running:
            self._preempt(request)
            self._preempted_keys.append(request.key)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, if no request is running; one may hold no block, when all of them left its windows."""
        return not self._running and self.kv_cache.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        """The load now."""
        prefix = self.kv_cache.prefix_stats
        return SchedulerStats(
            num_running_reqs=len(self._running),
            num_waiting_reqs=len(self._waiting) + len(self._held),
            num_skipped_reqs=len(self._held),
            kv_cache_usage=self.kv_cache.pool.usage,
            prefix_cache_queries=prefix.queries,
            prefix_cache_hits=prefix.hits,
            num_preemptions=self._num_preemptions,
            step_counter=self._step_counter,
        )


def _check_limits(chunked_prefill: bool, max_num_batched_tokens: int, max_model_len: int) -> None:
    if not chunked_prefill and max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens is {max_num_batched_tokens}; without chunked prefill "
            f"it must be at least max_model_len, {max_model_len}"
        )

"""The default scheduler: one token budget, first come first served or by priority, shared fairly between tenants.

There is no prefill phase and no decode phase. Every step hands out tokens so that each request's
``num_computed_tokens`` catches up with its ``num_tokens``. Chunked prefill, prefix hits and resumed requests all
follow from that rule, which is vLLM V1's.

``num_computed_tokens`` moves when a step is scheduled, so that the next step can be scheduled while this one runs. With
asynchronous scheduling a request also gets the step behind a token that is not known yet: a placeholder stands for it, and
the worker, which runs steps in order, has the token by then.
"""

from collections.abc import Iterable

from penstock_common.types.kv_events import KvCacheEvent
from penstock_common.types.kv_transfer import KvMedium
from penstock_common.types.outputs import EngineCoreOutputs, RequestError, SchedulerStats
from penstock_enginecore.core.hold import Hold
from penstock_enginecore.core.kv_cache.manager import KVCacheManager
from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.admission import QueueAdmission
from penstock_enginecore.core.scheduler.base import Scheduler, SchedulerContext
from penstock_enginecore.core.scheduler.budget import budget_of
from penstock_enginecore.core.scheduler.client_outputs import ClientOutputs
from penstock_enginecore.core.scheduler.dealing import DecodeDealer
from penstock_enginecore.core.scheduler.drafting import plan_drafts
from penstock_enginecore.core.scheduler.encoder_work import plan_encoder_work
from penstock_enginecore.core.scheduler.kv_loads import plan_kv_loads
from penstock_enginecore.core.scheduler.lifecycle import RequestLifecycle
from penstock_enginecore.core.scheduler.output import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.scheduler.pause import PauseState
from penstock_enginecore.core.scheduler.preemption import Preemption
from penstock_enginecore.core.scheduler.requests import RequestTable
from penstock_enginecore.core.scheduler.results import StepResults
from penstock_enginecore.core.scheduler.rows import count_as_computed, count_as_not_computed, sampled_by_grammar
from penstock_enginecore.core.scheduler.running import RunningRequests
from penstock_enginecore.core.scheduler.schedule_running import RunningScheduler
from penstock_enginecore.core.scheduler.schedule_step import StepScheduler
from penstock_enginecore.core.scheduler.schedule_waiting import WaitingScheduler
from penstock_enginecore.core.scheduler.trial import StepTrial
from penstock_enginecore.core.scheduler.waiting import WaitingRequests


class DefaultScheduler(Scheduler):
    """What ``scheduler.scheduler: default`` names.

    A living request is among the waiting or among the running. Running requests hold KV blocks, others none. When blocks run
    out, the least urgent of the running gives up its blocks and waits again, ahead of those that came later.
    """

    def __init__(self, context: SchedulerContext) -> None:
        config = context.config
        self._clock = context.monotonic_clock
        self._async = bool(config.async_scheduling)
        budget = budget_of(context)
        self.kv_cache = kv_cache = KVCacheManager(
            context.kv_cache,
            enable_prefix_caching=context.enable_prefix_caching,
            enable_kv_events=context.enable_kv_events,
        )
        by_priority = config.policy == "priority"
        self._requests = RequestTable()
        self._waiting = waiting = WaitingRequests(by_priority=by_priority, fair=config.fairness)
        self._running = running = RunningRequests(waiting.rank if by_priority else None)
        self._trial = StepTrial()
        self._outputs = ClientOutputs()
        self._encoder = encoder = plan_encoder_work(context, budget, waiting)
        self._drafting = drafting = plan_drafts(context, kv_cache, running, waiting, budget)
        self._results = StepResults(kv_cache, self._outputs, context.eos_token_ids, drafting, encoder)
        self._kv_loads = kv_loads = plan_kv_loads(context, kv_cache, waiting, running)
        admission = QueueAdmission(config, waiting)
        self._lifecycle = lifecycle = RequestLifecycle(
            context,
            requests=self._requests,
            waiting=waiting,
            running=running,
            admission=admission,
            kv_cache=kv_cache,
            outputs=self._outputs,
            encoder=encoder,
            kv_loads=kv_loads,
        )
        self._preemption = Preemption(
            running=running,
            waiting=waiting,
            lifecycle=lifecycle,
            kv_cache=kv_cache,
            trial=self._trial,
            clock=self._clock,
            lora_slots=context.lora_slots,
            encoder=encoder,
            kv_loads=kv_loads,
            leases=context.leases,
        )
        continue_running = RunningScheduler(
            budget=budget,
            preemption=self._preemption,
            lifecycle=lifecycle,
            dealer=DecodeDealer(context.num_stages),
            drafting=drafting,
            encoder=encoder,
        )
        start_waiting = WaitingScheduler(
            budget=budget,
            waiting=waiting,
            running=running,
            admission=admission,
            lifecycle=lifecycle,
            kv_cache=kv_cache,
            watermark_blocks=int(config.watermark * kv_cache.pool.num_usable_blocks),
            clock=self._clock,
            lora_slots=context.lora_slots,
            encoder=encoder,
            kv_loads=kv_loads,
            leases=context.leases,
        )
        self._step = StepScheduler(
            requests=self._requests,
            running=running,
            trial=self._trial,
            preemption=self._preemption,
            continue_running=continue_running,
            start_waiting=start_waiting,
            drafting=drafting,
        )
        self._lora_stats = context.lora_stats
        self._leases = context.leases
        self._next_step = 0
        self.pause_state = PauseState.RUNNING

    # Requests come and go.

    def hash_prompt(self, request: Request) -> None:
        """Hash the prompt's blocks, on whatever thread."""
        self.kv_cache.hash_prompt(request)

    def add_request(self, request: Request, hold: Hold = Hold.NONE) -> None:
        """Queue a request; one whose prior output has reached a stop ends at once."""
        if self._drafting is not None:
            self._drafting.begin(request)
        self._lifecycle.add(request, hold if self.pause_state is PauseState.RUNNING else hold | Hold.PAUSE)

    def release(self, request: Request, hold: Hold) -> None:
        """Take a reason to wait away; without another one the request takes its turn."""
        if not request.finished:
            self._waiting.release(request, hold)

    def hold_back(self, request: Request, hold: Hold) -> None:
        """Preempt a running request and hold it."""
        self._preemption.hold_back(request, hold, self._next_step)

    def fail(self, request: Request, error: RequestError) -> bool:
        """End a request that cannot be served, with an ERROR output; one that has ended is left alone."""
        return self._lifecycle.fail(request, error)

    def abort_requests(self, client_id: str, request_ids: Iterable[str], *, hand_over: bool = False) -> list[str]:
        """End those of the requests that exist, with ABORT outputs, or HANDOFF."""
        return self._lifecycle.abort(client_id, request_ids, hand_over=hand_over)

    def abort_client(self, client_id: str) -> None:
        """End all requests of a client that has gone, without outputs."""
        self._lifecycle.abort_client(client_id)

    def abort_all(self, error: RequestError, *, held: bool = True, keep_blocks: bool = False) -> None:
        """End every request with an ABORT output."""
        self._lifecycle.abort_all(error, held=held, keep_blocks=keep_blocks)

    def end_expired(self) -> None:
        """End the requests whose deadline has passed."""
        self._lifecycle.abort_expired()

    # A step.

    def schedule(self, *, begin: bool = True) -> SchedulerOutput:
        """See ``Scheduler``. Who is in the step is told by ``StepScheduler``."""
        self._lifecycle.abort_expired()
        if self._kv_loads is not None:
            self._kv_loads.begin_step()
        output = SchedulerOutput(step=self._next_step, num_scheduled_tokens={})
        output.preempted_request_ids = self._preemption.take_preempted_keys()
        if self.pause_state is not PauseState.PAUSED:
            self._step.schedule(output, begin=begin)
            if output.num_scheduled_tokens:
                self._next_step += 1
                count_as_computed(output, self._requests.by_key, expect_tokens=self._async)
                if self._drafting is not None:
                    self._drafting.want(output, self._requests.by_key)
        output.finished_request_ids = self._lifecycle.take_finished_keys()
        if self._encoder is not None:
            self._encoder.end_step(output)
        if self._kv_loads is not None:
            self._kv_loads.end_step(output)
        return output

    def constrained(self, scheduler_output: SchedulerOutput) -> list[Request]:
        """Requests of a step that get a token which a grammar decides on, in batch order."""
        return sampled_by_grammar(scheduler_output, self._requests.by_key) if self._requests.num_constrained else []

    def update_from_output(self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput) -> None:
        """Append the sampled tokens, check stops, and make computed blocks findable."""
        self._trial.step_done()
        if self._kv_loads is not None:
            self._kv_loads.stepped(scheduler_output)
        if self._encoder is not None and model_output.encoder_failures:
            self._encoder.fail(model_output.encoder_failures, self._requests.by_key, self._lifecycle.fail)
        ended = self._results.take(scheduler_output, model_output, self._requests.by_key)
        if self._drafting is not None:
            self._drafting.stepped(scheduler_output, model_output, self._requests.by_key)
        self._lifecycle.ended_by_step(ended)

    def update_draft_token_ids(self, scheduler_output: SchedulerOutput, drafts: DraftTokenIds) -> None:
        """Remember the drafts until the next step of each request."""
        if self._drafting is not None:
            self._drafting.take_drafts(scheduler_output, drafts, self._requests.by_key)

    @property
    def drafter_failure(self) -> str:
        """What the worker said of it."""
        return "" if self._drafting is None else self._drafting.failure

    def roll_back(self, scheduler_output: SchedulerOutput) -> None:
        """Its tokens count as computed no more."""
        count_as_not_computed(scheduler_output, self._requests.by_key)
        if self._encoder is not None:
            self._encoder.begin_again()

    def step_failed(self, scheduler_output: SchedulerOutput) -> Request | None:
        """All requests are computed again, those of the step in subsets. Text is not to blame for what is encoded beside it."""
        requests = self._requests.by_key
        targets = {key: count for key, count in scheduler_output.num_tokens_after.items() if key in requests}
        began = {new.request_id for new in scheduler_output.new_requests}
        may_blame = not scheduler_output.encoder_budget or any(requests[key].mm_features for key in targets)
        alone = len(scheduler_output.num_scheduled_tokens) == 1 and may_blame
        culprit = self._trial.failed(targets, new=began, alone=alone)
        self.preempt_all()
        if self._encoder is not None:
            self._encoder.begin_again()
        for key in targets:  # also those that had lost their blocks while the step was in flight
            if key in self._trial:
                self._waiting.hold(requests[key], Hold.TRIAL)
        # The workers know no request any more.
        self._lifecycle.take_finished_keys()
        self._preemption.take_preempted_keys()
        return requests[culprit] if culprit else None

    @property
    def num_unexplained_failures(self) -> int:
        """Times in a row that a step failed, and then each of its requests passed alone."""
        return self._trial.num_unexplained

    def take_outputs(self) -> dict[str, EngineCoreOutputs]:
        """Outputs since the last call, by client id."""
        return self._outputs.take(self.stats(), self._clock()) if self._outputs else {}

    def record_kv_events(self, on: bool) -> None:
        """Record changes of the prefix cache from now on, or no more."""
        self.kv_cache.record_events(on)

    def take_kv_events(self) -> list[KvCacheEvent]:
        """Changes of the prefix cache since the last call."""
        return self.kv_cache.take_events()

    def cached_blocks(self, part: int, num_parts: int, medium: KvMedium = KvMedium.DEVICE) -> list[bytes]:
        """Hashes of the blocks that can be found, those of one of so many parts."""
        return self.kv_cache.cached_blocks(part, num_parts, medium)

    def num_cached_blocks(self, medium: KvMedium) -> int:
        """How many can be found in a medium."""
        return self.kv_cache.num_cached_blocks(medium)

    # What others may ask.

    @property
    def has_requests(self) -> bool:
        """Whether any request is waiting or running."""
        return len(self._requests) > 0

    @property
    def num_requests(self) -> int:
        """Requests that are waiting or running."""
        return len(self._requests)

    @property
    def num_held_by_pause(self) -> int:
        """Of these, those that came after a pause was asked for."""
        if self.pause_state is PauseState.RUNNING:
            return 0
        return sum(bool(request.hold & Hold.PAUSE) for request in self._requests.by_key.values())

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        if self._requests or self._lifecycle.finished_keys or self._preemption.preempted_keys or self._outputs:
            return True
        return self._kv_loads is not None and self._kv_loads.has_news

    def next_deadline(self) -> float | None:
        """The earliest deadline of a living request, in seconds since the epoch."""
        return self._lifecycle.next_deadline()

    def pause(self, state: PauseState) -> None:
        """Change to ``state``. RUNNING lets those go on that came meanwhile."""
        self.pause_state = state
        if state is PauseState.RUNNING:
            self._waiting.release_all(Hold.PAUSE)

    @property
    def drained(self) -> bool:
        """Whether every request that is left came after the pause was asked for."""
        return all(request.hold & Hold.PAUSE for request in self._requests.by_key.values())

    def preempt_all(self) -> None:
        """Take every running request's blocks; all are computed again."""
        self._preemption.preempt_all(self._next_step)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, if no request is running; one may hold no block, when all of them left its windows."""
        if not self._running and self._kv_loads is not None:
            self._kv_loads.settle()
        return not self._running and self.kv_cache.reset_prefix_cache()

    def reset_encoder_cache(self) -> None:
        """Forget the embeddings of media that no running request needs."""
        if self._encoder is not None:
            self._encoder.reset()

    def stats(self) -> SchedulerStats:
        """The load now."""
        prefix = self.kv_cache.prefix_stats
        return SchedulerStats(
            num_running_reqs=len(self._running),
            num_waiting_reqs=len(self._waiting),
            num_skipped_reqs=self._waiting.num_held,
            kv_cache_usage=self.kv_cache.pool.usage,
            prefix_cache_queries=prefix.queries,
            prefix_cache_hits=prefix.hits,
            num_preemptions=self._preemption.num_preemptions,
            step_counter=self._next_step,
            spec_decoding_stats=None if self._drafting is None else self._drafting.stats(),
            lora=self._lora_stats(),
            media=None if self._encoder is None else self._encoder.stats(),
            kv_transfer=None if self._kv_loads is None else self._kv_loads.stats(self._leases()),
        )

"""The default scheduler: first come, first served, over one token budget.

There is no prefill phase and no decode phase. Every step hands out tokens so that each request's
``num_computed_tokens`` catches up with its ``num_tokens``. Chunked prefill, prefix hits and resumed requests all
follow from that rule, which is vLLM V1's.
"""

from collections.abc import Iterable

from penstock_common.errors import ConfigError
from penstock_common.types.outputs import EngineCoreOutputs, EventType, RequestError, SchedulerStats
from penstock_common.types.pooling import Vectors
from penstock_enginecore.core.kv_cache.manager import KVCacheManager
from penstock_enginecore.core.request import Request, RequestStatus
from penstock_enginecore.core.scheduler.admission import check_queue_limits
from penstock_enginecore.core.scheduler.base import Scheduler, SchedulerContext
from penstock_enginecore.core.scheduler.deadlines import DeadlineQueue
from penstock_enginecore.core.scheduler.outbox import Outbox
from penstock_enginecore.core.scheduler.output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from penstock_enginecore.core.scheduler.queue import RequestQueue
from penstock_enginecore.core.scheduler.requests import RequestTable
from penstock_enginecore.core.scheduler.stops import append_tokens, check_stop


class DefaultScheduler(Scheduler):
    """See ``Scheduler`` for the protocol.

    A request is in exactly one of ``_waiting`` and ``_running``. Running requests hold KV blocks, waiting ones none.
    When blocks run out, the last of the running gives up its blocks and goes to the head of the waiting.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self._config = config = context.config
        self._clock = context.monotonic_clock
        self._wall_clock = context.wall_clock
        self._eos_token_ids = context.eos_token_ids
        _check_limits(config.enable_chunked_prefill, config.max_num_batched_tokens, context.kv_cache.max_model_len)
        self.kv_cache = KVCacheManager(context.kv_cache, enable_prefix_caching=context.enable_prefix_caching)
        self._watermark_blocks = int(config.watermark * self.kv_cache.pool.num_usable_blocks)
        # Each running request needs a token of every step's budget.
        self._max_num_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._running: list[Request] = []
        self._waiting = RequestQueue()
        self._requests = RequestTable()
        self._deadlines = DeadlineQueue()
        self._outbox = Outbox()
        self._finished_keys: list[str] = []
        self._num_preemptions = 0
        self._step_counter = 0

    # Requests come and go.

    def hash_prompt(self, request: Request) -> None:
        """Hash the prompt's blocks, on whatever thread."""
        self.kv_cache.hash_prompt(request)

    def add_request(self, request: Request) -> None:
        """Queue a request; one whose prior output has reached a stop ends at once."""
        self._requests.check_unused(request.client_id, request.request_id)
        if check_stop(request, self._eos_token_ids):
            self._outbox.add_end(request, [])
            return
        request.queued_time = now = self._clock()
        check_queue_limits(self._config, self._waiting, request, now)
        request.record_event(EventType.QUEUED, now)
        self._requests.add(request)
        self._deadlines.add(request)
        self._waiting.append(request)

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
            else:
                self._waiting.remove(request)
            request.status = status
            self._release(request)
            self._outbox.add_end(request, [], error=error)
        if was_running:
            self._running = [request for request in self._running if not request.finished]

    def _release(self, request: Request) -> None:
        """Forget an ended request. The caller takes it out of its queue."""
        self.kv_cache.free(request)
        self._requests.remove(request)
        self._deadlines.discard(request)

    # A step.

    def schedule(self) -> SchedulerOutput:
        """Running requests first; waiting ones only if nobody had to give up blocks."""
        self._end_expired()
        output = SchedulerOutput(num_scheduled_tokens={})
        self._schedule_running(output)
        if not output.preempted_request_ids:
            self._schedule_waiting(output)
        output.num_common_prefix_blocks = (self.kv_cache.num_common_prefix_blocks(self._running),)
        output.finished_request_ids, self._finished_keys = self._finished_keys, []
        if output.total_num_scheduled_tokens:
            self._step_counter += 1
        return output

    def _end_expired(self) -> None:
        now = self._wall_clock()
        for request in self._deadlines.pop_expired(now):
            late = now - (request.deadline or now)
            message = f"the deadline passed {late:.3f} s ago, after {request.num_output_tokens} output tokens"
            error = RequestError(
                code="DEADLINE_EXCEEDED", message=message, field="deadline", reason="DEADLINE_EXCEEDED"
            )
            self._end([request], RequestStatus.FINISHED_ABORTED, error)

    def _schedule_running(self, output: SchedulerOutput) -> None:
        budget = self._config.max_num_batched_tokens
        scheduled = output.num_scheduled_tokens
        cached = output.cached_requests
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            num_new_tokens = len(request.all_token_ids) - request.num_computed_tokens
            if num_new_tokens > 1:
                num_new_tokens = self._chunk(num_new_tokens, budget)
            new_block_ids = self._allocate_or_preempt(request, num_new_tokens, output)
            if new_block_ids is None:  # it gave up its own blocks, so it was the last
                break
            scheduled[request.key] = num_new_tokens
            budget -= num_new_tokens
            cached.request_ids.append(request.key)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            cached.new_block_ids.append((new_block_ids,) if new_block_ids else None)
            index += 1
        output.total_num_scheduled_tokens = self._config.max_num_batched_tokens - budget

    def _allocate_or_preempt(self, request: Request, num_new_tokens: int, output: SchedulerOutput) -> list[int] | None:
        """New block ids for a running request, or None when it lost its own blocks."""
        while (new_block_ids := self.kv_cache.allocate_slots(request, num_new_tokens)) is None:
            victim = self._running[-1]
            if victim is request and len(self._running) == 1:
                self._end_too_long(request)
                return None
            self._preempt(victim)
            output.preempted_request_ids.append(victim.key)
            if victim is request:
                return None
        return new_block_ids

    def _preempt(self, request: Request) -> None:
        self._running.pop()
        self.kv_cache.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.record_event(EventType.PREEMPTED, self._clock())
        self._waiting.prepend(request)
        self._num_preemptions += 1

    def _schedule_waiting(self, output: SchedulerOutput) -> None:
        kv_cache = self.kv_cache
        budget = self._config.max_num_batched_tokens - output.total_num_scheduled_tokens
        while self._waiting and budget > 0 and len(self._running) < self._max_num_running:
            request = self._waiting.peek()
            if kv_cache.num_blocks_for(request.num_tokens) > kv_cache.pool.num_usable_blocks:
                self._end_too_long(request)
                continue
            computed = kv_cache.get_computed_blocks(request)
            num_missing_tokens = request.num_tokens - computed.num_tokens
            num_new_tokens = self._chunk(num_missing_tokens, budget)
            if num_new_tokens < num_missing_tokens and not self._config.enable_chunked_prefill:
                break
            reserve = self._reserved_blocks(request, computed.num_tokens + num_new_tokens) if self._running else 0
            if not kv_cache.admit(request, computed, num_new_tokens, reserve=reserve):
                break
            self._waiting.remove(request)
            self._start(request, computed.num_tokens, num_new_tokens, output)
            budget -= num_new_tokens
        output.total_num_scheduled_tokens = self._config.max_num_batched_tokens - budget

    def _reserved_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks that must stay free when a request starts beside others: for its other tokens, and the watermark."""
        rest = self.kv_cache.num_blocks_for(request.num_tokens) - self.kv_cache.num_blocks_for(num_tokens)
        return rest + self._watermark_blocks

    def _start(self, request: Request, num_computed: int, num_new_tokens: int, output: SchedulerOutput) -> None:
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed
        request.record_event(EventType.SCHEDULED, self._clock())
        self._running.append(request)
        output.num_scheduled_tokens[request.key] = num_new_tokens
        output.new_requests.append(
            NewRequestData(
                request_id=request.key,
                token_ids=request.all_token_ids.copy(),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=num_computed,
                block_ids=(self.kv_cache.block_ids(request),),
                sampling_params=request.sampling_params,
                pooling_params=request.pooling_params,
                second_text_start=request.second_text_start,
            )
        )

    def _chunk(self, num_tokens: int, budget: int) -> int:
        threshold = self._config.long_prefill_token_threshold
        if 0 < threshold < num_tokens and self._config.enable_chunked_prefill:
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

    def update_from_output(self, scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput) -> None:
        """Append the sampled tokens, check stops, and make computed blocks findable."""
        sampled = dict(zip(model_output.request_ids, model_output.sampled_token_ids, strict=True))
        nans = model_output.num_nans_in_logits
        requests, eos_token_ids, block_size = self._requests.by_key, self._eos_token_ids, self.kv_cache.block_size
        any_finished = False
        for key, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = requests.get(key)
            if request is None:  # ended while the step ran
                continue
            before = request.num_computed_tokens
            request.num_computed_tokens = computed = before + num_tokens
            if computed // block_size != before // block_size:
                self.kv_cache.cache_blocks(request)
            if (vectors := model_output.pooled.get(key)) is not None:
                any_finished = True
                self._finish_pooled(request, vectors)
                continue
            if not (new_token_ids := sampled[key]):
                continue
            new_token_ids, finished = append_tokens(request, new_token_ids, eos_token_ids)
            num_nans = nans.get(key, 0) if nans else 0
            if finished:
                any_finished = True
                self._finished_keys.append(key)
                self._release(request)
                self._outbox.add_end(request, new_token_ids, num_nans_in_logits=num_nans)
            else:
                self._outbox.add_tokens(request, new_token_ids, num_nans)
        if any_finished:
            self._running = [request for request in self._running if not request.finished]

    def _finish_pooled(self, request: Request, vectors: Vectors) -> None:
        """End a request with its vectors. The caller takes it out of the running ones."""
        request.status = RequestStatus.FINISHED_STOPPED
        self._finished_keys.append(request.key)
        self._release(request)
        self._outbox.add_end(request, [], pooling_output=vectors)

    def take_outputs(self) -> dict[str, EngineCoreOutputs]:
        """Outputs since the last call, by client id."""
        return self._outbox.take(self.stats(), self._clock()) if self._outbox else {}

    # What others may ask.

    @property
    def has_requests(self) -> bool:
        """Whether any request is waiting or running."""
        return len(self._requests) > 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._finished_keys or self._outbox)

    def next_deadline(self) -> float | None:
        """The earliest deadline of a living request, in seconds since the epoch."""
        return self._deadlines.next_deadline()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, if no request is running."""
        return self.kv_cache.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        """The load now."""
        prefix = self.kv_cache.prefix_stats
        return SchedulerStats(
            num_running_reqs=len(self._running),
            num_waiting_reqs=len(self._waiting),
            kv_cache_usage=self.kv_cache.pool.usage,
            prefix_cache_queries=prefix.queries,
            prefix_cache_hits=prefix.hits,
            num_preemptions=self._num_preemptions,
            step_counter=self._step_counter,
        )


def _check_limits(enable_chunked_prefill: bool, max_num_batched_tokens: int, max_model_len: int) -> None:
    if not enable_chunked_prefill and max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens is {max_num_batched_tokens}; without scheduler.enable_chunked_prefill "
            f"it must be at least max_model_len, {max_model_len}"
        )

"""The engine core: runs the steps of one scheduler on one executor, in order."""

import logging
import math
import time

import msgspec

from penstock_common.errors import ConfigError
from penstock_common.memory import in_units
from penstock_common.types.outputs import EngineCoreOutputs, SchedulerStats
from penstock_common.types.request import EngineCoreRequest
from penstock_enginecore.config import EngineCoreConfig, SchedulerConfig
from penstock_enginecore.core.collective_errors import CollectiveBroken
from penstock_enginecore.core.executor import Executor, Progress
from penstock_enginecore.core.kv_cache.sizing import MIN_MODEL_LEN, StateDemand, size_kv_cache, size_without_kv_cache
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.queues import InputQueues
from penstock_enginecore.core.request import Hold, Request
from penstock_enginecore.core.scheduler.base import Clock, PauseState, Scheduler, SchedulerContext, create_scheduler
from penstock_enginecore.core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.steps_in_flight import (
    DrainAborts,
    IterationLog,
    KeepFailedStep,
    StepCounts,
    StepRecovery,
    StepsInFlight,
)
from penstock_enginecore.core.validation import RequestLimits, validate_request
from penstock_enginecore.kv_transfer.core.leases import LeasedBlocks
from penstock_enginecore.kv_transfer.core.registry import OpenStore, begin_connector, make_connector
from penstock_enginecore.kv_transfer.core.validation import read_params
from penstock_enginecore.lora.core.adapters import LoraAdapters
from penstock_enginecore.media.core.encoder_cache import MediaControl, encoder_cache_size
from penstock_enginecore.media.core.receiver_cache import MediaInputs
from penstock_enginecore.speculation.core.policy import time_steps
from penstock_enginecore.states.core.refusals import check_states
from penstock_enginecore.states.core.spec import StatePoolConfig
from penstock_enginecore.structured_output.core.base import GrammarBackend, GrammarBackendFactory
from penstock_enginecore.structured_output.core.grammar_requests import GrammarIntake

# Settings whose values the engine derives from the model.


def settled(config: EngineCoreConfig, model: ModelInfo) -> SchedulerConfig:
    """Return the scheduler's settings with model-dependent defaults filled in."""
    scheduling = config.scheduler
    if scheduling.async_scheduling is None:
        runs_ahead = model.runs_ahead and not config.data_parallel.grouped
        scheduling = msgspec.structs.replace(scheduling, async_scheduling=runs_ahead)
    if scheduling.max_num_batched_tokens is None:
        splits = scheduling.enable_chunked_prefill and model.supports_chunked_prefill
        most = scheduling.step_tokens
        together = (info.max_span for info in model.media)
        tokens = max(model.step_tokens, min(scheduling.max_num_seqs, most), *together) if splits else most
        scheduling = msgspec.structs.replace(scheduling, max_num_batched_tokens=tokens)
    if scheduling.max_prompt_batch_tokens is None:
        scheduling = msgspec.structs.replace(scheduling, max_prompt_batch_tokens=model.prompt_batch_tokens)
    return scheduling


def max_steps_of(config: EngineCoreConfig) -> int:
    """Return the maximum number of steps in flight: one step per pipeline stage. With asynchronous scheduling, one more
    step is allowed, so that the first pipeline stage need not wait for the last stage.
    """
    steps = config.executor.pipeline_parallel_size + bool(config.scheduler.async_scheduling)
    return max(config.executor.max_concurrent_batches, steps)


def check_model(config: EngineCoreConfig, model: ModelInfo) -> None:
    """Raise ConfigError if the model does not support a setting."""
    _check_pooling(config, model)
    _check_speculative(config, model)
    check_states(config, model)


def _check_pooling(config: EngineCoreConfig, model: ModelInfo) -> None:
    """Raise ConfigError if a pooling model is in a data-parallel group."""
    if config.data_parallel.grouped and model.pooling is not None:
        raise ConfigError(
            f"data_parallel.size is {config.data_parallel.size}, but the model is a pooling model; data-parallel "
            "groups need a generating model"
        )


def _check_speculative(config: EngineCoreConfig, model: ModelInfo) -> None:
    """Raise ConfigError if speculative decoding does not support the model or a setting."""
    method, stages = config.speculative.method, config.executor.pipeline_parallel_size
    if not method:
        return
    if model.pooling is not None:
        raise ConfigError(
            f"speculative.method is {method}, but the model is a pooling model; only generating models support speculative "
            "decoding"
        )
    if stages > 1:
        raise ConfigError(
            f"speculative.method is {method} and executor.pipeline_parallel_size is {stages}; speculative "
            "decoding supports only 1 pipeline stage"
        )


def size_engine(
    config: EngineCoreConfig, executor: Executor, model: ModelInfo, progress: Progress, *, max_steps: int
) -> KVCacheConfig:
    """Return the KV cache configuration for a loaded model, with up to ``max_steps`` steps in flight.

    The function also prepares the kernels and runs one forward pass. Raises ConfigError if the settings need more
    memory than is available. The message gives the needed and the available size.
    """
    progress("preparing kernels and running a forward pass of one token")
    specs = executor.kv_cache_specs()
    if not specs and model.states is None:
        sized = size_without_kv_cache(
            config.scheduler, requested_max_model_len=config.model.max_model_len, model_max_len=model.max_len
        )
        progress(f"no KV cache; sequences of up to {sized.max_model_len} tokens")
        return sized
    sized = size_kv_cache(
        specs,
        executor.available_kv_cache_memory(),
        config.cache,
        requested_max_model_len=config.model.max_model_len,
        model_max_len=model.max_len,
        max_tokens_in_flight=config.scheduler.step_tokens * max_steps,
        states=_state_demand(config, model),
        min_model_len=model.sound_positions + MIN_MODEL_LEN,
    )
    if sized.states is not None:
        _report_states(sized.states, model, config.scheduler.max_num_seqs, progress)
    tokens = (sized.num_blocks - 1) * sized.block_size
    groups = len(sized.groups)
    token_bytes = sum(spec.page_size_bytes for spec in specs.values()) // sized.block_size
    whole = f"{tokens} tokens in total, {token_bytes} bytes per token"
    use = whole if groups == 1 else f"shared by {groups} KV cache groups"
    progress(
        f"KV cache: {sized.num_blocks} blocks of {sized.block_size} tokens, {use}; "
        f"sequences of up to {sized.max_model_len} tokens"
    )
    return sized


def _state_demand(config: EngineCoreConfig, model: ModelInfo) -> StateDemand | None:
    if model.states is None:
        return None
    return StateDemand(
        needs=model.states,
        max_num_seqs=config.scheduler.max_num_seqs,
        num_drafts=config.speculative.num_speculative_tokens if config.speculative.enabled else 0,
    )


def _within_states(config: EngineCoreConfig, sized: KVCacheConfig) -> EngineCoreConfig:
    """Return the settings with ``max_num_seqs`` lowered to the number of requests for which the state pool has
    space.
    """
    if sized.states is None or sized.states.num_requests >= config.scheduler.max_num_seqs:
        return config
    scheduling = msgspec.structs.replace(config.scheduler, max_num_seqs=sized.states.num_requests)
    return msgspec.structs.replace(config, scheduler=scheduling)


def _report_states(pool: StatePoolConfig, model: ModelInfo, max_num_seqs: int, progress: Progress) -> None:
    """Report the size of the pool of recurrent states, and log a warning if this size limits the number of running
    requests.
    """
    needs = model.states
    if needs is None:
        return
    of_request = needs.request_bytes(pool.rows_per_request)
    progress(
        f"memory for recurrent states: {pool.num_requests} running requests ({in_units(of_request)} per request), "
        f"{pool.num_kept} kept states ({in_units(needs.slot_bytes)} per state), one kept state every {pool.interval} tokens"
    )
    if pool.num_requests < max_num_seqs:
        logger.warning(
            "the engine lowers max_num_seqs, because the memory for states of recurrent layers is too small (to avoid this, "
            "raise cache.kv_cache_memory) configured_max_num_seqs=%d max_num_seqs=%d",
            max_num_seqs,
            pool.num_requests,
        )


logger = logging.getLogger(__name__)

_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of tokens. If speculative decoding is enabled, the engine measures at start-up how long a step with each
number of tokens takes."""


def _keep_nothing(scheduled: SchedulerOutput, error: Exception, stats: SchedulerStats) -> None:
    """Do nothing. The engine uses this function if failed steps are only logged and not saved."""


class EngineCore:
    """Computes the output tokens of requests, one step at a time.

    Creating an instance loads the model, which may take minutes. Raises ModelLoadError or ConfigError if the engine
    cannot start. Only the busy loop's thread may call the methods, except for ``preprocess``.

    When the cause for which a request waits has ended, a thread puts a Wakeup into ``queues``. The busy loop must then
    call ``step``.

    Args:
        config: The engine's settings.
        executor: Runs the model.
        make_grammars: Creates the grammar compiler for structured output. If it is None, constraints are refused.
        keep_failed_step: Saves a failed step for debugging.
        open_store: Opens the disk tier for KV blocks, if a disk tier is configured.
        media_inputs: Cache of media inputs for frontends.
        progress: Function that is called with progress messages for the operator.
        monotonic_clock: Clock for timeouts and event timestamps.
        wall_clock: Clock for deadlines.
    """

    def __init__(
        self,
        config: EngineCoreConfig,
        executor: Executor,
        *,
        make_grammars: GrammarBackendFactory | None = None,
        keep_failed_step: KeepFailedStep = _keep_nothing,
        open_store: OpenStore | None = None,
        media_inputs: MediaInputs = MediaInputs(),  # noqa: B008 - it is immutable
        progress: Progress = logger.info,
        monotonic_clock: Clock = time.monotonic,
        wall_clock: Clock = time.time,
    ) -> None:
        self.executor = executor
        self.queues = InputQueues()
        self.media_inputs = media_inputs
        self.leases = LeasedBlocks(monotonic_clock)
        self.stalled = False
        self._wall_clock = wall_clock
        self.model = model = executor.load_model(progress)
        check_model(config, model)
        self.config = config = msgspec.structs.replace(config, scheduler=settled(config, model))
        max_steps = max_steps_of(config)
        self.kv_cache_config = size_engine(config, executor, model, progress, max_steps=max_steps)
        self.config = config = _within_states(config, self.kv_cache_config)
        grammars: GrammarBackend | None = None
        if make_grammars is not None:
            grammars = make_grammars(config, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids)
        self.loras = LoraAdapters(config.lora, executor, self.queues.wake, monotonic_clock, wall_clock)
        self.connector = make_connector(config, model, self.queues.wake, monotonic_clock)
        self.scheduler: Scheduler = create_scheduler(
            self._scheduler_context(monotonic_clock=monotonic_clock, wall_clock=wall_clock)
        )
        self._grammars = GrammarIntake(
            grammars,
            self.scheduler,
            self.queues.wake,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            enable_in_reasoning=config.structured_output.enable_in_reasoning,
            drafts=config.speculative.enabled,
        )
        self.controls = (self.loras, MediaControl(self.scheduler, self.media_inputs))
        """Objects with further utility methods, in addition to the methods of ``EngineControl``."""
        executor.initialize_kv_cache(self.kv_cache_config)
        if self.connector is not None:
            begin_connector(self.connector, config, executor, model, self.kv_cache_config, open_store)
        self._limits = RequestLimits(
            model=model,
            max_model_len=self.max_model_len,
            max_logprobs=config.model.max_logprobs,
            max_media=config.multimodal.limit_per_prompt,
        )
        self.counts = StepCounts()
        self._log = IterationLog(config.iteration_log_interval)
        self._steps = StepsInFlight(
            executor,
            self.scheduler,
            self._grammars,
            StepRecovery(executor, self.scheduler, keep_failed_step),
            max_steps=max_steps,
            on_done=self._count_step,
        )

    def _scheduler_context(self, *, monotonic_clock: Clock, wall_clock: Clock) -> SchedulerContext:
        """Return the settings and objects that the scheduler needs."""
        config, model = self.config, self.model
        speculative = config.speculative
        return SchedulerContext(
            config=config.scheduler,
            kv_cache=self.kv_cache_config,
            # Pooling needs the hidden state of every token, and the prefix cache stores no hidden states.
            enable_prefix_caching=config.cache.enable_prefix_caching and model.pooling is None,
            enable_kv_events=config.cache.enable_kv_events,
            supports_chunked_prefill=model.supports_chunked_prefill,
            num_stages=config.executor.pipeline_parallel_size,
            speculative=speculative,
            step_seconds=time_steps(self.executor.step_seconds, _ROWS, model.max_len) if speculative.enabled else {},
            resources=(self.loras,) if config.lora.enabled else (),
            media=model.media,
            encoder_cache_size=encoder_cache_size(
                config.multimodal.encoder_cache_size, config.scheduler.step_tokens, model
            ),
            media_inputs=self.media_inputs,
            leases=self.leases,
            kv_connector=self.connector,
            min_load_tokens=config.cache.min_load_tokens,
            eos_token_ids=model.eos_token_ids,
            monotonic_clock=monotonic_clock,
            wall_clock=wall_clock,
        )

    @property
    def max_model_len(self) -> int:
        """Maximum length of a sequence that this engine serves, in tokens."""
        return self.kv_cache_config.max_model_len

    def warm_up(self) -> None:
        """Prepare everything that would make the first request of a kind slower than later requests. Wait until the
        preparation is done.
        """
        self._grammars.warm_up(needed=self.model.pooling is None)

    # Requests.

    def preprocess(self, client_id: str, request: EngineCoreRequest) -> Request:
        """Validate a request and hash its prompt. Thread-safe. Raises InvalidArgument or Unimplemented if the request
        is not valid or needs an unsupported feature.
        """
        validate_request(request, self._limits)
        constraint = request.sampling_params.structured_output
        if constraint is not None:
            self._grammars.check(constraint)
        if request.lora is not None:
            self.loras.check(request.lora)
        prepared = Request(
            request,
            client_id=client_id,
            max_model_len=self.max_model_len,
            kv_params=read_params(request.context.kv.params, self.connector),
        )
        # If the adapter's digest is unknown, the prompt is hashed after the adapter has been read.
        if prepared.lora is None or prepared.lora.digest:
            self.scheduler.kv_cache.hash_prompt(prepared)
        return prepared

    def add(self, request: Request) -> None:
        """Queue a preprocessed request.

        Raises:
            InvalidArgument: The id is in use.
            ResourceExhausted: The queue is full.
        """
        constraint = request.sampling_params.structured_output
        hold = Hold.NONE if constraint is None else Hold.GRAMMAR
        self.scheduler.add_request(request, hold if request.lora is None else hold | Hold.LORA)
        if constraint is not None and not request.finished:
            self._grammars.start(request, constraint)

    @property
    def has_requests(self) -> bool:
        """Whether the engine has a request that has not ended."""
        return self.scheduler.has_requests

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._steps) or self.scheduler.has_work or self.loras.has_news

    def time_to_next_deadline(self) -> float | None:
        """Return the seconds until the next deadline of a request or of a lease on KV blocks. The result is negative if
        this deadline has passed, and None if no request and no lease has a deadline.
        """
        deadline = self.scheduler.next_deadline()
        left = self.leases.seconds_to_expiry()
        left = left if deadline is None else min(left, deadline - self._wall_clock())
        return left if left < math.inf else None

    # Running steps.

    def step(self, drain_aborts: DrainAborts) -> dict[str, EngineCoreOutputs]:
        """Start steps until the maximum number is in flight, then process the results of the oldest step. Return the
        outputs by client id.

        If another step may be in flight and there is work, the engine starts a step before it waits for results. The
        engine calls ``drain_aborts`` before it processes the results of a step, to end requests that were cancelled
        meanwhile. After the call, ``stalled`` is true if there was nothing to do. Calling ``step`` again is then
        useless until a message or an event changes the engine's state.

        Raises EngineDeadError if a step failed and the engine cannot recover.
        """
        self._log.begin()
        steps = self._steps
        steps.take_drafts(wait=not steps)
        self._grammars.take()
        self.loras.take()
        started = steps.has_room and self._start_step(drain_aborts)
        if steps and not (started and steps.has_room and not steps.oldest_is_done):
            steps.finish_oldest(drain_aborts)
            started = True
        self._log.tick(self.scheduler.stats)
        outputs = self.scheduler.take_outputs()
        self.stalled = not started and not outputs
        return outputs

    def step_together(self, drain_aborts: DrainAborts, *, begin: bool = True) -> None:
        """Run one forward pass together with all ranks of the group, even if there is nothing to compute.

        ``begin`` says whether waiting requests may start in this pass. Raises EngineDeadError if a step failed and the
        engine cannot recover. Raises CollectiveBroken if the connection to other ranks is lost or the step failed on
        this rank.
        """
        self._log.begin()
        self._steps.take_drafts(wait=True)
        self._grammars.take()
        self.loras.take()
        self._grammars.await_masks()
        scheduled = self.scheduler.schedule(begin=begin)
        passed = True
        if scheduled.concerns_workers:
            passed = self._steps.start(scheduled, drain_aborts) and self._steps.finish_all(drain_aborts)
        if not scheduled.num_scheduled_tokens:
            self.executor.execute_dummy_batch()
        self._log.tick(self.scheduler.stats)
        if (experts := self.executor.experts) is not None:
            if not passed:
                raise CollectiveBroken("a step failed on this rank, and the other ranks need the experts of this rank")
            experts.after_step()

    def _start_step(self, drain_aborts: DrainAborts) -> bool:
        """Schedule a step and hand it to the executor. Return whether there was anything to compute."""
        self._grammars.await_masks()
        scheduled = self.scheduler.schedule()
        if not scheduled.concerns_workers:
            return False
        self._steps.start(scheduled, drain_aborts)
        return True

    def finish_steps(self, drain_aborts: DrainAborts = lambda: None) -> bool:
        """Process the results of all steps in flight. If a step failed, drop the results of later steps and return
        False.

        Raises EngineDeadError if the engine cannot recover from the failure.
        """
        return self._steps.finish_all(drain_aborts)

    def _count_step(self, scheduled: SchedulerOutput, results: ModelRunnerOutput) -> None:
        self._log.count(scheduled, results)
        self.counts.count(scheduled, results)

    @property
    def seconds_to_log_line(self) -> float | None:
        """Seconds until the next log line about steps is due, or None if all steps have been logged."""
        return self._log.seconds_to_line

    def log_steps(self) -> None:
        """Write the periodic log line about steps if the line is due."""
        self._log.tick_idle(self.scheduler.stats)

    @property
    def paused(self) -> bool:
        """Whether the engine is paused: no request is scheduled until ``resume``."""
        return self.scheduler.pause_state is PauseState.PAUSED

    def shutdown(self) -> None:
        """Shut down the executor, which releases the device."""
        self._grammars.shutdown()
        if self.connector is not None:
            self.connector.shutdown()
        self.executor.shutdown()

"""The engine core: one scheduler, one executor, steps in order."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any

from penstock_common.errors import PenstockError
from penstock_common.observability.incidents import STEP_FAILED
from penstock_common.types.kv_events import KvCacheEvent
from penstock_common.types.outputs import EngineCoreOutputs, RequestError
from penstock_common.types.request import EngineCoreRequest
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.error_dump import dump_step, keep_step
from penstock_enginecore.core.executor import Executor, Progress
from penstock_enginecore.core.extensions import extend
from penstock_enginecore.core.grammar_intake import GrammarIntake
from penstock_enginecore.core.hold import Hold
from penstock_enginecore.core.kv_cache.no_cache import size_without_kv_cache
from penstock_enginecore.core.kv_cache.sizing import size_kv_cache
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig
from penstock_enginecore.core.request import Request
from penstock_enginecore.core.request_log import log_incident
from penstock_enginecore.core.scheduler.base import Clock, Scheduler, SchedulerContext, create_scheduler
from penstock_enginecore.core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.scheduler.pause import PauseState
from penstock_enginecore.core.structured_output.base import GrammarBackend, GrammarBackendFactory
from penstock_enginecore.core.utility import UtilityRegistry
from penstock_enginecore.core.validation import RequestLimits, validate_request

logger = logging.getLogger(__name__)

MAX_UNEXPLAINED_FAILURES = 3
"""So often in a row a step may fail although each of its requests passes alone; then the engine ends."""


class EngineDeadError(PenstockError):
    """A step failed in a way the engine cannot go on from. The message is for operators and frontends."""


class EngineCore:
    """Turns requests into tokens, a step at a time.

    All methods belong to the busy loop's thread, except ``preprocess``. Building one loads the model: it may take
    minutes. Raises ModelLoadError or ConfigError when the engine cannot start.

    ``make_grammars`` makes what compiles the constraints of structured output; without it they are refused. ``wake`` is
    called, on any thread, when a compiled constraint lets a waiting request go on: whoever waits for work should call
    ``step``.
    """

    def __init__(
        self,
        config: EngineCoreConfig,
        executor: Executor,
        *,
        make_grammars: GrammarBackendFactory | None = None,
        progress: Progress = logger.info,
        monotonic_clock: Clock = time.monotonic,
        wall_clock: Clock = time.time,
    ) -> None:
        self.config = config
        self.executor = executor
        self.wake: Callable[[], None] = lambda: None
        self._wall_clock = wall_clock
        self._batches: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()
        self._max_batches = max(config.executor.max_concurrent_batches, 2 if config.scheduler.async_scheduling else 1)
        self.stalled = False
        self.model = executor.load_model(progress)
        self.kv_cache_config = self._size_kv_cache(progress)
        grammars: GrammarBackend | None = None
        if make_grammars is not None:
            grammars = make_grammars(config, vocab_size=self.model.vocab_size, eos_token_ids=self.model.eos_token_ids)
        self.scheduler: Scheduler = create_scheduler(
            SchedulerContext(
                config=config.scheduler,
                kv_cache=self.kv_cache_config,
                # Pooling needs every token's hidden state, which the cache does not hold.
                enable_prefix_caching=config.cache.enable_prefix_caching and self.model.pooling is None,
                enable_kv_events=config.cache.enable_kv_events,
                supports_chunked_prefill=self.model.supports_chunked_prefill,
                eos_token_ids=self.model.eos_token_ids,
                monotonic_clock=monotonic_clock,
                wall_clock=wall_clock,
            )
        )
        self._grammars = GrammarIntake(
            grammars,
            self.scheduler,
            lambda: self.wake(),
            vocab_size=self.model.vocab_size,
            eos_token_ids=self.model.eos_token_ids,
            enable_in_reasoning=config.structured_output.enable_in_reasoning,
        )
        executor.initialize_kv_cache(self.kv_cache_config)
        self._limits = RequestLimits(
            model=self.model, max_model_len=self.max_model_len, max_logprobs=config.model.max_logprobs
        )
        self.control = EngineControl(self)
        self.utilities = extend(UtilityRegistry(self.control), "engine")

    def _size_kv_cache(self, progress: Progress) -> KVCacheConfig:
        executor, config = self.executor, self.config
        progress("preparing the kernels, and a forward pass of one token")
        specs = executor.kv_cache_specs()
        if not specs:
            sized = size_without_kv_cache(
                config.scheduler,
                requested_max_model_len=config.model.max_model_len,
                model_max_len=self.model.max_len,
            )
            progress(f"no KV cache; sequences of up to {sized.max_model_len} tokens")
            return sized
        sized = size_kv_cache(
            specs,
            executor.available_kv_cache_memory(),
            config.cache,
            requested_max_model_len=config.model.max_model_len,
            model_max_len=self.model.max_len,
            max_tokens_in_flight=config.scheduler.max_num_batched_tokens * self._max_batches,
        )
        tokens = (sized.num_blocks - 1) * sized.block_size
        groups = len(sized.groups)
        use = f"{tokens} tokens in all" if groups == 1 else f"shared by {groups} groups of layers"
        progress(
            f"KV cache: {sized.num_blocks} blocks of {sized.block_size} tokens, {use}; "
            f"sequences of up to {sized.max_model_len} tokens"
        )
        return sized

    @property
    def max_model_len(self) -> int:
        """Longest sequence this engine serves, in tokens."""
        return self.kv_cache_config.max_model_len

    def warm_up(self) -> None:
        """Wait until the first request of any kind is as fast as those that follow."""
        self._grammars.warm_up(needed=self.model.pooling is None)

    # Requests.

    def preprocess(self, client_id: str, request: EngineCoreRequest) -> Request:
        """Validate a request and hash its prompt. Any thread may call it. Raises InvalidArgument or Unimplemented."""
        validate_request(request, self._limits)
        constraint = request.sampling_params.structured_output
        if constraint is not None:
            self._grammars.check(constraint)
        prepared = Request(request, client_id=client_id, max_model_len=self.max_model_len)
        self.scheduler.hash_prompt(prepared)
        return prepared

    def add(self, request: Request) -> None:
        """Queue a preprocessed request.

        Raises InvalidArgument for an id in use, ResourceExhausted when the queue is full.
        """
        constraint = request.sampling_params.structured_output
        if constraint is None:
            self.scheduler.add_request(request)
            return
        self.scheduler.add_request(request, Hold.GRAMMAR)
        if not request.finished:
            self._grammars.start(request, constraint)

    def abort(self, client_id: str, request_ids: Iterable[str]) -> list[str]:
        """End those of a client's requests that exist, with ABORT outputs. Returns their ids."""
        return self.scheduler.abort_requests(client_id, request_ids)

    def abort_client(self, client_id: str) -> None:
        """End all requests of a client that has gone, without outputs."""
        self.scheduler.abort_client(client_id)

    def abort_all(self, error: RequestError) -> None:
        """End every request with an ABORT output that carries ``error``."""
        self.scheduler.abort_all(error)

    @property
    def has_requests(self) -> bool:
        """Whether any request has not ended."""
        return self.scheduler.has_requests

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        return bool(self._batches) or self.scheduler.has_work

    def time_to_next_deadline(self) -> float | None:
        """Seconds until the next request expires, negative if it has; None when no request has a deadline."""
        deadline = self.scheduler.next_deadline()
        return None if deadline is None else deadline - self._wall_clock()

    # A step.

    def step(self, drain_aborts: Callable[[], None]) -> dict[str, EngineCoreOutputs]:
        """Keep the executor busy, then take in the oldest step's results. Returns what to tell each client, by client id.

        While there is room for another step in the executor, and something to do in one, it is started before anything is
        waited for. ``drain_aborts`` is called between sampling and update, to end what was cancelled meanwhile. Afterwards
        ``stalled`` says whether there was nothing to do: another step is of use only once something has changed.
        Raises EngineDeadError.
        """
        self._grammars.take()
        started = len(self._batches) < self._max_batches and self._start_batch(drain_aborts)
        room = len(self._batches) < self._max_batches
        if self._batches and not (started and room and not self._batches[0][1].done()):
            self._finish_batch(drain_aborts)
            started = True
        self.control.after_step()
        outputs = self.scheduler.take_outputs()
        self.stalled = not started and not outputs
        return outputs

    def _start_batch(self, drain_aborts: Callable[[], None]) -> bool:
        """Schedule a step and hand it to the executor. Returns whether there was anything to hand over."""
        scheduled = self.scheduler.schedule()
        if not (scheduled.num_scheduled_tokens or scheduled.finished_request_ids or scheduled.preempted_request_ids):
            return False
        try:
            self.executor.execute_model(scheduled)
            # The forward pass runs; which tokens a grammar allows depends on the tokens of the steps before.
            if self._batches and self.scheduler.constrained(scheduled) and not self.finish_batches(drain_aborts):
                return True
            future = self.executor.sample_tokens(self._grammars.bitmask(scheduled))
        except EngineDeadError:
            raise
        except Exception as e:
            if self.finish_batches(drain_aborts):  # those before it are not concerned
                self._recover(scheduled, e)
            return True
        self._batches.append((scheduled, future))
        return True

    def _finish_batch(self, drain_aborts: Callable[[], None]) -> bool:
        """Wait for the oldest step and take its results in. Returns False when it failed; no step is in flight then."""
        scheduled, future = self._batches.popleft()
        try:
            results = future.result()
        except Exception as e:
            del future  # it knows the error, which knows this frame
            self._recover(scheduled, e)
            return False
        drain_aborts()
        self.scheduler.update_from_output(scheduled, results)
        self.control.count_step(scheduled, results)
        return True

    def finish_batches(self, drain_aborts: Callable[[], None] = lambda: None) -> bool:
        """Take in the results of every step that was started. Returns False when one failed: those behind it are lost."""
        while self._batches:
            if not self._finish_batch(drain_aborts):
                return False
        return True

    def _recover(self, scheduled: SchedulerOutput, error: Exception) -> None:
        """Go on after a failed step, the oldest in flight, without the request that failed it.

        Every request is computed again, and the scheduler tries those of the step in ever smaller groups until one fails alone:
        that one ends. Raises EngineDeadError when a step without requests failed, when the executor cannot compute any more,
        and when a step fails again and again of no single request.
        """
        behind = [future for _, future in self._batches]
        self._batches.clear()
        wait(behind)
        if not scheduled.num_scheduled_tokens:
            raise self._dead(scheduled, error) from error
        try:
            self.executor.recover()
        except Exception as e:
            logger.warning("the executor does not compute any more: %s: %s", type(e).__name__, e)
            raise self._dead(scheduled, error) from error
        stats = self.scheduler.stats()
        culprit = self.scheduler.step_failed(scheduled)
        if culprit is not None:
            keep_step(scheduled, error, stats, self.config.error_dump)
            doing = "a step with this request alone"
            self.scheduler.fail(culprit, log_incident(culprit, error, doing=doing, reason=STEP_FAILED))
        elif self.scheduler.num_unexplained_failures >= MAX_UNEXPLAINED_FAILURES:
            raise self._dead(scheduled, error) from error
        else:
            num_requests, name = len(scheduled.num_scheduled_tokens), type(error).__name__
            logger.warning("a step of %d requests failed (%s); they are tried in smaller groups", num_requests, name)

    def _dead(self, scheduled: SchedulerOutput, error: Exception) -> EngineDeadError:
        dump_step(scheduled, error, self.scheduler.stats(), self.config.error_dump)
        return EngineDeadError(f"a step failed: {type(error).__name__}: {error}")

    def take_kv_events(self) -> list[KvCacheEvent]:
        """Changes of the prefix cache since the last call; for every client."""
        return self.scheduler.take_kv_events()

    @property
    def paused(self) -> bool:
        """Whether nothing is scheduled until ``resume``."""
        return self.scheduler.pause_state is PauseState.PAUSED

    def shutdown(self) -> None:
        """Release the device."""
        self._grammars.shutdown()
        self.executor.shutdown()

    def call_utility(self, method: str, arguments: bytes) -> Any:
        """Call a utility with a msgpack array. Returns its result, or a Future of it. Raises RequestFailed."""
        return self.utilities.call(method, arguments)

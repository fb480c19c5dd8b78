"""The engine core: one scheduler, one executor, one step at a time."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from penstock_common.errors import PenstockError
from penstock_common.types.outputs import EngineCoreOutputs, RequestError
from penstock_common.types.request import EngineCoreRequest
from penstock_enginecore.config import EngineCoreConfig, SchedulerConfig
from penstock_enginecore.core.kv_cache.no_cache import size_without_kv_cache
from penstock_enginecore.core.kv_cache.sizing import size_kv_cache
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig
from penstock_enginecore.core.pooling_validation import PoolingLimits
from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.base import Clock, Scheduler, SchedulerContext, create_scheduler
from penstock_enginecore.core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.utility import UtilityRegistry, utility
from penstock_enginecore.core.validation import RequestLimits, validate_request
from penstock_enginecore.executor.base import Executor, Progress

logger = logging.getLogger(__name__)


class EngineDeadError(PenstockError):
    """A step failed in a way the engine cannot go on from. The message is for operators and frontends."""


class EngineCore:
    """Turns requests into tokens, a step at a time.

    All methods belong to the busy loop's thread, except ``preprocess``. Building one loads the model: it may take
    minutes. Raises ModelLoadError or ConfigError when the engine cannot start.
    """

    def __init__(
        self,
        config: EngineCoreConfig,
        executor: Executor,
        *,
        progress: Progress = logger.info,
        monotonic_clock: Clock = time.monotonic,
        wall_clock: Clock = time.time,
    ) -> None:
        self.config = config
        self._executor = executor
        self._wall_clock = wall_clock
        self.stalled = False
        executor.load_model(progress)
        self.kv_cache_config = self._size_kv_cache(progress)
        self.vocab_size = executor.vocab_size
        self.scheduler: Scheduler = create_scheduler(
            SchedulerContext(
                config=self._scheduler_config(),
                kv_cache=self.kv_cache_config,
                # Pooling needs every token's hidden state, which the cache does not hold.
                enable_prefix_caching=config.cache.enable_prefix_caching and executor.pooling is None,
                eos_token_ids=executor.eos_token_ids,
                monotonic_clock=monotonic_clock,
                wall_clock=wall_clock,
            )
        )
        executor.initialize_kv_cache(self.kv_cache_config)
        self._limits = RequestLimits(
            max_model_len=self.max_model_len, vocab_size=self.vocab_size, pooling=executor.pooling
        )
        self._utilities = UtilityRegistry(self)

    def _size_kv_cache(self, progress: Progress) -> KVCacheConfig:
        executor, config = self._executor, self.config
        specs = executor.kv_cache_specs()
        if not specs:
            sized = size_without_kv_cache(
                config.scheduler,
                requested_max_model_len=config.model.max_model_len,
                model_max_len=executor.model_max_len,
            )
            progress(f"no KV cache; sequences of up to {sized.max_model_len} tokens")
            return sized
        sized = size_kv_cache(
            specs,
            executor.available_kv_cache_memory(),
            config.cache,
            requested_max_model_len=config.model.max_model_len,
            model_max_len=executor.model_max_len,
        )
        tokens = (sized.num_blocks - 1) * sized.block_size
        progress(
            f"KV cache: {sized.num_blocks} blocks of {sized.block_size} tokens, {tokens} tokens in all; "
            f"sequences of up to {sized.max_model_len} tokens"
        )
        return sized

    def _scheduler_config(self) -> SchedulerConfig:
        if self._executor.supports_chunked_prefill:
            return self.config.scheduler
        return msgspec.structs.replace(self.config.scheduler, enable_chunked_prefill=False)

    @property
    def pooling(self) -> PoolingLimits | None:
        """What the engine does instead of generating; None when it generates."""
        return self._limits.pooling

    @property
    def max_model_len(self) -> int:
        """Longest sequence this engine serves, in tokens."""
        return self.kv_cache_config.max_model_len

    def preprocess(self, client_id: str, request: EngineCoreRequest) -> Request:
        """Validate a request and hash its prompt. Any thread may call it. Raises InvalidArgument or Unimplemented."""
        validate_request(request, self._limits)
        prepared = Request(request, client_id=client_id, max_model_len=self.max_model_len)
        self.scheduler.hash_prompt(prepared)
        return prepared

    def add(self, request: Request) -> None:
        """Queue a preprocessed request.

        Raises InvalidArgument for an id in use, ResourceExhausted when the queue is full.
        """
        self.scheduler.add_request(request)

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
        return self.scheduler.has_work

    def time_to_next_deadline(self) -> float | None:
        """Seconds until the next request expires, negative if it has; None when no request has a deadline."""
        deadline = self.scheduler.next_deadline()
        return None if deadline is None else deadline - self._wall_clock()

    def step(self, drain_aborts: Callable[[], None]) -> dict[str, EngineCoreOutputs]:
        """Schedule, execute, sample, update. Returns what to tell each client, by client id.

        ``drain_aborts`` is called between sampling and update, to end what was cancelled meanwhile. Afterwards
        ``stalled`` says whether there was nothing to do: another step is of use only once something has changed.
        Raises EngineDeadError.
        """
        scheduled = self.scheduler.schedule()
        has_news = scheduled.num_scheduled_tokens or scheduled.finished_request_ids or scheduled.preempted_request_ids
        if has_news:
            sampled = self._execute(scheduled)
            drain_aborts()
            self.scheduler.update_from_output(scheduled, sampled)
        outputs = self.scheduler.take_outputs()
        self.stalled = not has_news and not outputs
        return outputs

    def _execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        try:
            self._executor.execute_model(scheduled)
            return self._executor.sample_tokens().result()
        except Exception as e:
            logger.exception("the step failed; scheduler output, without its tokens: %s", describe(scheduled))
            raise EngineDeadError(f"a step failed: {type(e).__name__}: {e}") from e

    def shutdown(self) -> None:
        """Release the device."""
        self._executor.shutdown()

    # What frontends may call by name.

    def call_utility(self, method: str, arguments: bytes) -> bytes:
        """Call a ``@utility`` method with a msgpack array. Returns its result in msgpack. Raises RequestFailed."""
        return self._utilities.call(method, arguments)

    @property
    def utility_names(self) -> tuple[str, ...]:
        """What ``call_utility`` can call."""
        return self._utilities.names

    @utility
    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing done, while a request is running."""
        return self.scheduler.reset_prefix_cache()

    @utility
    def engine_info(self) -> dict[str, Any]:
        """The engine's limits: lengths in tokens, the KV pool in blocks (the reserved one included)."""
        return {
            "engine_id": self.config.engine_id,
            "model": self.config.model.name,
            "revision": self.config.model.revision,
            "max_model_len": self.max_model_len,
            "num_kv_blocks": self.kv_cache_config.num_blocks,
            "block_size": self.kv_cache_config.block_size,
            "vocab_size": self.vocab_size,
            "utilities": list(self.utility_names),
        }


def describe(scheduled: SchedulerOutput) -> str:
    """A scheduler output for the log: ids, counts and blocks, no token of any user."""
    new = [
        f"{r.request_id}: {len(r.token_ids)} tokens ({r.num_prompt_tokens} prompt, {r.num_computed_tokens} computed), "
        f"blocks {r.block_ids}"
        for r in scheduled.new_requests
    ]
    cached = scheduled.cached_requests
    known = [
        f"{key}: {num_computed} computed, new blocks {blocks}"
        for key, num_computed, blocks in zip(
            cached.request_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        )
    ]
    return (
        f"new {new}; known {known}; scheduled {scheduled.num_scheduled_tokens}; finished "
        f"{scheduled.finished_request_ids}; preempted {scheduled.preempted_request_ids}"
    )

"""The executor of one device: its worker lives in the busy loop's own thread."""

from concurrent.futures import Future

from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.pooling_validation import PoolingLimits
from penstock_enginecore.core.scheduler.output import GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.executor.base import Progress
from penstock_enginecore.executor.worker import Worker


class UniprocExecutor:
    """See ``Executor``. Futures are complete when they are returned; errors of a step are raised at once."""

    def __init__(self, config: EngineCoreConfig) -> None:
        self._worker = Worker(config)

    def load_model(self, progress: Progress) -> None:
        """See ``Executor.load_model``."""
        self._worker.load_model(progress)

    @property
    def model_max_len(self) -> int:
        """See ``Executor.model_max_len``."""
        return self._worker.model.max_len

    @property
    def vocab_size(self) -> int:
        """See ``Executor.vocab_size``."""
        return self._worker.model.vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """See ``Executor.eos_token_ids``."""
        return self._worker.model.eos_token_ids

    @property
    def pooling(self) -> PoolingLimits | None:
        """See ``Executor.pooling``."""
        return self._worker.pooling

    @property
    def supports_chunked_prefill(self) -> bool:
        """See ``Executor.supports_chunked_prefill``."""
        return self._worker.supports_chunked_prefill

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """See ``Executor.kv_cache_specs``."""
        return self._worker.kv_cache_specs()

    def available_kv_cache_memory(self) -> int:
        """See ``Executor.available_kv_cache_memory``."""
        return self._worker.available_kv_cache_memory()

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """See ``Executor.initialize_kv_cache``."""
        self._worker.initialize_kv_cache(config)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """See ``Executor.execute_model``."""
        self._worker.runner.execute(scheduler_output)

    def sample_tokens(self, grammar: GrammarBitmask | None = None) -> "Future[ModelRunnerOutput]":
        """See ``Executor.sample_tokens``."""
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(self._worker.runner.sample(grammar))
        return future

    def shutdown(self) -> None:
        """See ``Executor.shutdown``."""
        self._worker.shutdown()

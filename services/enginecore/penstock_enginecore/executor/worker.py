"""One device: the model on it, its memory, its threads."""

import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.pooling_validation import PoolingLimits
from penstock_enginecore.executor.base import Progress
from penstock_enginecore.executor.memory import cpu_pool_bytes, cuda_pool_bytes
from penstock_enginecore.executor.model_runner import ModelRunner
from penstock_enginecore.executor.pool_runner import PoolRunner
from penstock_enginecore.models.embedder import PoolingModel, load_pooling_model, resolve_task
from penstock_enginecore.models.loader import LoadedModel, load_model


class Worker:
    """Loads the model onto the configured device and sizes its KV cache. Steps go to ``runner``."""

    def __init__(self, config: EngineCoreConfig) -> None:
        self._config = config
        self._device = resolve_device(config.model.device)
        if config.executor.num_threads:
            torch.set_num_threads(config.executor.num_threads)
        self._model: LoadedModel | PoolingModel | None = None
        self._runner: ModelRunner | PoolRunner | None = None

    @property
    def model(self) -> LoadedModel | PoolingModel:
        """The loaded model. RuntimeError before ``load_model``."""
        if self._model is None:
            raise RuntimeError("load_model has not been called")
        return self._model

    @property
    def runner(self) -> ModelRunner | PoolRunner:
        """Executes the steps. RuntimeError before ``load_model``."""
        if self._runner is None:
            raise RuntimeError("load_model has not been called")
        return self._runner

    def load_model(self, progress: Progress) -> None:
        """See ``Executor.load_model``."""
        config = self._config.model
        task = resolve_task(config)
        if task == "generate":
            self._model = loaded = load_model(config, self._device, progress)
            self._runner = ModelRunner(loaded, self._device, config.attention_backend)
        else:
            self._model = pooled = load_pooling_model(config, task, self._device, progress)
            self._runner = PoolRunner(pooled, self._device, config.attention_backend)

    @property
    def pooling(self) -> PoolingLimits | None:
        """See ``Executor.pooling``."""
        return self.runner.limits if isinstance(self.runner, PoolRunner) else None

    @property
    def supports_chunked_prefill(self) -> bool:
        """See ``Executor.supports_chunked_prefill``."""
        return not (isinstance(self.model, PoolingModel) and self.model.is_encoder)

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """See ``Executor.kv_cache_specs``."""
        return self.runner.kv_cache_specs(self._config.cache.block_size)

    def available_kv_cache_memory(self) -> int:
        """See ``Executor.available_kv_cache_memory``. A CPU skips the profiling step: its peak is small beside the
        default pool.
        """
        if self._config.cache.kv_cache_memory is not None:
            return self._config.cache.kv_cache_memory
        if self._device.type == "cpu":
            return cpu_pool_bytes()
        torch.cuda.reset_peak_memory_stats(self._device)
        limits = self._config.scheduler
        if isinstance(self.runner, PoolRunner):
            self.runner.profile(limits.max_num_batched_tokens)
        else:
            self.runner.profile(limits.max_num_batched_tokens, limits.max_num_seqs)
        torch.cuda.empty_cache()
        return cuda_pool_bytes(self._config.cache, self._device)

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """See ``Executor.initialize_kv_cache``."""
        self.runner.initialize_kv_cache(config)

    def shutdown(self) -> None:
        """Let go of the model and the cache."""
        self._model = None
        self._runner = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def resolve_device(name: str) -> torch.device:
    """The torch device for ``model.device``; ``auto`` is the GPU where there is one. Raises ConfigError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device is 'cuda' but torch finds no CUDA device here; use 'auto' or 'cpu'")
    return torch.device(name)

"""One device: the model on it, its memory, its threads."""

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch

from penstock_common.cores import usable_cores
from penstock_common.errors import ConfigError, Internal, InvalidArgument
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.executor import Progress
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.utility import utility
from penstock_enginecore.executor.memory import check_pool, cpu_pool_bytes, cuda_pool_bytes
from penstock_enginecore.executor.model_runner import ModelRunner
from penstock_enginecore.executor.pool_runner import PoolRunner
from penstock_enginecore.models.loader import LoadedModel, load_model
from penstock_enginecore.pooling.embedder import PoolingModel, load_pooling_model, resolve_task

logger = logging.getLogger(__name__)


class Worker:
    """Loads the model onto the configured device and sizes its KV cache. Steps go to ``runner``."""

    def __init__(self, config: EngineCoreConfig) -> None:
        self._config = config
        self._device = resolve_device(config.model.device)
        check_pool(config.cache, self._device)
        torch.set_num_threads(config.executor.num_threads or min(torch.get_num_threads(), usable_cores()))
        self._model: LoadedModel | PoolingModel | None = None
        self._runner: ModelRunner | PoolRunner | None = None
        self._kv_cache: KVCacheConfig | None = None
        self._kv_cache_asleep = False
        self._profiler: torch.profiler.profile | None = None

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

    def load_model(self, progress: Progress) -> ModelInfo:
        """See ``Executor.load_model``. Models that pool take token ids alone."""
        config = self._config.model
        task = resolve_task(config)
        computing = (self._device, config.attention_backend, self._config.kernels, torch.get_num_threads())
        if task == "generate":
            self._model = loaded = load_model(config, self._device, progress)
            self._runner = runner = ModelRunner(loaded, *computing)
            return ModelInfo(
                max_len=loaded.max_len,
                vocab_size=loaded.vocab_size,
                eos_token_ids=loaded.eos_token_ids,
                hidden_size=runner.hidden_size,
                dtype=_name(loaded.dtype),
            )
        self._model = pooled = load_pooling_model(config, task, self._device, progress)
        self._runner = pool_runner = PoolRunner(pooled, *computing)
        return ModelInfo(
            max_len=pooled.max_len,
            vocab_size=pooled.vocab_size,
            eos_token_ids=pooled.eos_token_ids,
            dtype=_name(pooled.dtype),
            pooling=pool_runner.limits,
            supports_chunked_prefill=not pooled.is_encoder,
        )

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """See ``Executor.kv_cache_specs``."""
        specs = self.runner.kv_cache_specs(self._config.cache.block_size)
        logger.info("computing with %s", self.runner.acceleration)
        return specs

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
        self._kv_cache = config
        self.runner.initialize_kv_cache(config)

    def recover(self) -> None:
        """See ``Executor.recover``. Memory that a step could not get is given back first; what a device has failed at is told
        when it has finished.
        """
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.runner.recover()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # What operators may call; see EngineControl.

    @utility
    def sleep(self, level: int) -> None:
        """Drop the KV cache, and move the weights to host memory (level 1) or drop them too (level 2)."""
        self.runner.drop_kv_cache()
        self._kv_cache_asleep = True
        if level == 1:
            _move(self.model, torch.device("cpu"))
        else:
            self._model = self._runner = None
        self._free_memory()

    @utility
    def wake_up(self, tags: list[str]) -> None:
        """Take back what ``tags`` name: weights, kv_cache. The cache of dropped weights comes with them, or after."""
        if "weights" in tags:
            if self._model is None:
                self.load_model(logger.info)
                self.kv_cache_specs()
            else:
                _move(self._model, self._device)
        if "kv_cache" in tags:
            self._kv_cache_asleep = False
        if not self._kv_cache_asleep and self._kv_cache is not None and self._runner is not None:
            self._runner.initialize_kv_cache(self._kv_cache)

    @utility
    def start_profile(self) -> None:
        """Start the torch profiler."""
        if not self._config.profiler.directory:
            raise InvalidArgument("profiler.directory is not configured: there is nowhere to write a trace")
        if self._profiler is not None:
            raise InvalidArgument("a profile is being taken already; stop it first", reason="PROFILING")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    @utility
    def stop_profile(self) -> str:
        """Stop the profiler. Returns the path of its trace, for chrome://tracing or Perfetto."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            raise InvalidArgument("no profile is being taken", reason="NOT_PROFILING")
        profiler.stop()
        path = Path(self._config.profiler.directory) / f"trace-{os.getpid()}-{time.time_ns()}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except OSError as e:
            raise Internal(f"profiler.directory: {path} cannot be written: {e}") from e
        return str(path)

    @utility
    def worker_info(self) -> dict[str, Any]:
        """Where the worker computes: device, dtype, threads, kernels, and bytes of weights and KV cache."""
        parameters = self._model.module.parameters() if self._model else ()
        return {
            "device": str(self._device),
            "dtype": _name(self._model.dtype) if self._model else "",
            "num_threads": torch.get_num_threads(),
            "computing": self._runner.acceleration if self._runner else "",
            "weight_bytes": sum(p.numel() * p.element_size() for p in parameters)
            + (self._runner.packed_bytes if self._runner else 0),
            "kv_cache_bytes": self._runner.kv_cache_bytes if self._runner else 0,
        }

    def _free_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def shutdown(self) -> None:
        """Let go of the model and the cache."""
        self._model = None
        self._runner = None
        self._free_memory()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _move(model: LoadedModel | PoolingModel, device: torch.device) -> None:
    modules: list[torch.nn.Module] = [model.module]
    if isinstance(model, PoolingModel):
        modules += [dense.linear for dense in model.dense]
        modules += [model.head.classifier] if model.head else []
    for module in modules:
        module.to(device)


def resolve_device(name: str) -> torch.device:
    """The torch device for ``model.device``; ``auto`` is the GPU where there is one. Raises ConfigError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device is 'cuda' but torch finds no CUDA device here; use 'auto' or 'cpu'")
    return torch.device(name)

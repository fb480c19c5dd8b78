"""One device: the model on it, its memory, its threads."""

import os
import time
from pathlib import Path
from typing import Any

import torch

from penstock_common.errors import ConfigError, Internal, InvalidArgument
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.utility import utility
from penstock_enginecore.executor.base import Progress
from penstock_enginecore.executor.memory import cpu_pool_bytes, cuda_pool_bytes
from penstock_enginecore.executor.model_runner import ModelRunner
from penstock_enginecore.models.loader import LoadedModel, load_model
from penstock_enginecore.models.weights import drop_weights, reload_weights


class Worker:
    """Loads the model onto the configured device and sizes its KV cache. Steps go to ``runner``."""

    def __init__(self, config: EngineCoreConfig) -> None:
        self._config = config
        self._device = resolve_device(config.model.device)
        if config.executor.num_threads:
            torch.set_num_threads(config.executor.num_threads)
        self._model: LoadedModel | None = None
        self._runner: ModelRunner | None = None
        self._kv_cache: KVCacheConfig | None = None
        self._profiler: torch.profiler.profile | None = None

    @property
    def model(self) -> LoadedModel:
        """The loaded model. RuntimeError before ``load_model``."""
        if self._model is None:
            raise RuntimeError("load_model has not been called")
        return self._model

    @property
    def runner(self) -> ModelRunner:
        """Executes the steps. RuntimeError before ``load_model``."""
        if self._runner is None:
            raise RuntimeError("load_model has not been called")
        return self._runner

    def load_model(self, progress: Progress) -> None:
        """See ``Executor.load_model``."""
        self._model = load_model(self._config.model, self._device, progress)
        self._runner = ModelRunner(self._model, self._device, self._config.model.attention_backend)

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
        self.runner.profile(self._config.scheduler.max_num_batched_tokens, self._config.scheduler.max_num_seqs)
        torch.cuda.empty_cache()
        return cuda_pool_bytes(self._config.cache, self._device)

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """See ``Executor.initialize_kv_cache``."""
        self._kv_cache = config
        self.runner.initialize_kv_cache(config)

    # What operators may call; see EngineControl.

    @utility
    def sleep(self, level: int) -> None:
        """Drop the KV cache, and move the weights to host memory (level 1) or drop them too (level 2)."""
        self.runner.drop_kv_cache()
        if level == 1:
            _move(self.model.module, torch.device("cpu"))
        else:
            drop_weights(self.model.module)
        self._free_memory()

    @utility
    def wake_up(self, tags: list[str]) -> None:
        """Take back what ``tags`` name: weights, kv_cache."""
        module = self.model.module
        if "weights" in tags:
            if any(parameter.is_meta for parameter in module.parameters()):
                reload_weights(self.model, self._config.model, self._device)
            else:
                _move(module, self._device)
        if "kv_cache" in tags and self._kv_cache is not None:
            self.runner.initialize_kv_cache(self._kv_cache)

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
        """Where the worker computes: device, dtype, torch threads, and bytes of weights and KV cache."""
        parameters = self.model.module.parameters()
        return {
            "device": str(self._device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "num_threads": torch.get_num_threads(),
            "weight_bytes": sum(p.numel() * p.element_size() for p in parameters if not p.is_meta),
            "kv_cache_bytes": self.runner.kv_cache_bytes,
        }

    def _free_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def shutdown(self) -> None:
        """Let go of the model and the cache."""
        self._model = None
        self._runner = None
        self._free_memory()


def _move(module: torch.nn.Module, device: torch.device) -> None:
    module.to(device)


def resolve_device(name: str) -> torch.device:
    """The torch device for ``model.device``; ``auto`` is the GPU where there is one. Raises ConfigError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device is 'cuda' but torch finds no CUDA device here; use 'auto' or 'cpu'")
    return torch.device(name)

"""How much memory may become KV cache."""

import torch

from penstock_common.memory import Memory, check_fits, host_memory
from penstock_enginecore.config import CacheConfig, EngineCoreConfig
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.media.core.encoder_cache import encoder_cache_size
from penstock_enginecore.models.errors import ModelLoadError

_CPU_FRACTION = 4
_CPU_LIMIT = 4 * 2**30


def cpu_kv_cache_bytes(others: int = 0) -> int:
    """A quarter of the memory that is free for this process beside ``others`` bytes that it will take, at most 4 GiB."""
    return min(max(available_host_memory() - others, 0) // _CPU_FRACTION, _CPU_LIMIT)


def available_host_memory() -> int:
    """Bytes this process may still use. Raises ModelLoadError where the kernel does not tell."""
    memory = host_memory()
    if memory is None:
        raise ModelLoadError("free memory cannot be read from /proc/meminfo; set cache.kv_cache_memory")
    return memory.available


def check_kv_cache_memory(config: CacheConfig, device: torch.device) -> None:
    """Raise ConfigError, before anything is on the device, when the KV cache that was asked for is larger than what is left, or
    what is kept beside it.
    """
    host = host_memory()
    if config.host_memory and host is not None:
        check_fits("cache.host_memory", config.host_memory, host)
    memory = host if device.type == "cpu" else _device_memory(device)
    if config.kv_cache_memory is not None and memory is not None:
        check_fits("cache.kv_cache_memory", config.kv_cache_memory, memory)


def _device_memory(device: torch.device) -> Memory:
    free, total = torch.cuda.mem_get_info(device)
    return Memory(torch.cuda.get_device_name(device), total, free)


def cuda_kv_cache_bytes(config: CacheConfig, device: torch.device) -> int:
    """What ``memory_utilization`` of the device leaves beside the peak since ``reset_peak_memory_stats``, all processes
    counted.
    """
    free, total = torch.cuda.mem_get_info(device)
    outside_torch = total - free - torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    return max(int(total * config.memory_utilization) - outside_torch - peak, 0)


def encoder_cache_bytes(config: EngineCoreConfig, model: ModelInfo) -> int:
    """What embeddings of media take on the device of each worker, at most: 0 for a model that reads text alone."""
    together = [info.max_tokens for info in model.media if info.attends_both_ways]
    step_tokens = max([config.scheduler.step_tokens, *together])
    return encoder_cache_size(config.multimodal.encoder_cache_size, step_tokens, model) * model.embed_bytes

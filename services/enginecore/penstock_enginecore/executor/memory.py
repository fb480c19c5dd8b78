"""How much memory may become KV cache."""

from pathlib import Path

import torch

from penstock_enginecore.config import CacheConfig
from penstock_enginecore.models.errors import ModelLoadError

_CPU_FRACTION = 4
_CPU_LIMIT = 4 * 2**30


def cpu_pool_bytes() -> int:
    """A quarter of the memory that is free for this process, at most 4 GiB."""
    return min(available_host_memory() // _CPU_FRACTION, _CPU_LIMIT)


def available_host_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process may still use: the kernel's estimate, or what the container's limit leaves if that is less."""
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError) as e:
        raise ModelLoadError(f"free memory cannot be read from {meminfo} ({e}); set cache.kv_cache_memory") from e
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            available = min(available, int(limit) - int((cgroup / "memory.current").read_text()))
    except OSError:
        pass  # no cgroup v2 here: nothing limits the process further
    return max(available, 0)


def cuda_pool_bytes(config: CacheConfig, device: torch.device) -> int:
    """What ``memory_utilization`` of the device leaves beside the peak since ``reset_peak_memory_stats``, all processes
    counted.
    """
    free, total = torch.cuda.mem_get_info(device)
    outside_torch = total - free - torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    return max(int(total * config.memory_utilization) - outside_torch - peak, 0)

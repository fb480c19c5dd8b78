"""Selection of a worker's device, of the CPU cores near it (NUMA), and of the memory for its KV cache."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock_common.errors import ConfigError
from penstock_common.memory import Memory, check_fits, host_memory
from penstock_enginecore.config import CacheConfig, EngineCoreConfig
from penstock_enginecore.config.scheduler import STEP_TOKENS
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.media.core.encoder_cache import encoder_cache_size
from penstock_enginecore.models.errors import ModelLoadError

logger = logging.getLogger(__name__)

_CPU_STEP_TOKENS = 512
"""Tokens of a step on a CPU. Products of more rows are no faster, and activations of this many stay in its caches."""
_CPU_PROMPT_BATCH_TOKENS = 256
"""Prompt tokens of a step on a CPU. Products of this many rows are nearly as efficient as larger ones."""
CAPABILITY = (8, 0)
"""Minimum compute capability for which kernels are compiled. bfloat16 and asynchronous copies need Ampere."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEV = Path("/dev")


def resolve_device(name: str, worker: int, devices: Sequence[int] = (), dev: Path = _DEV) -> torch.device:
    """Return the torch device for ``model.device``. ``auto`` selects a usable GPU if there is one.

    With several GPUs, each worker has its own: the one with its number, or the one that ``devices`` assigns. ``dev`` is
    the directory of the driver's device files. Raises ConfigError.
    """
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    rank = devices[worker] if devices else worker
    if count and rank >= count:
        which = f"executor.devices gives worker {worker} device {rank}" if devices else f"worker {worker} has no device"
        raise ConfigError(f"{which}: torch finds {count} CUDA devices here, from 0 on")
    reason = _too_old(rank) if count else f"torch finds no CUDA device here: {_why_none()}"
    if not reason:
        return torch.device("cuda", rank)
    if name == "cuda":
        raise ConfigError(f"model.device is 'cuda' but {reason}; use 'auto' or 'cpu'")
    if count or any(dev.glob("nvidia[0-9]*")):
        logger.warning("computing on the CPU, although there is a GPU: %s", reason)
    return torch.device("cpu")


def step_tokens(device: torch.device) -> int:
    """Return the largest useful number of tokens in a step on ``device``. Larger steps do not compute more per second."""
    return _CPU_STEP_TOKENS if device.type == "cpu" else STEP_TOKENS


def prompt_batch_tokens(device: torch.device) -> int:
    """Return the largest useful number of prompt tokens in a step on ``device``, or 0 for no limit.

    Beyond it, more prompts in a step only delay their first tokens.
    """
    return _CPU_PROMPT_BATCH_TOKENS if device.type == "cpu" else 0


def _too_old(rank: int) -> str:
    """Return why the GPU cannot be used, or '' if it can."""
    found = torch.cuda.get_device_capability(rank)
    if found >= CAPABILITY:
        return ""
    have, need = (".".join(map(str, capability)) for capability in (found, CAPABILITY))
    return f"{torch.cuda.get_device_name(rank)} has compute capability {have}, and {need} is needed"


def _why_none() -> str:
    """Return the reason of torch or the driver, as a sentence without its period."""
    if torch.version.cuda is None:
        return "it was built without CUDA"
    if os.environ.get(_VISIBLE, "0").strip() in ("", "-1"):
        return f"{_VISIBLE} is {os.environ[_VISIBLE]!r}"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as e:
        return str(e).split("\n")[0].split(". ")[0].rstrip(".")
    return "the driver shows none"


# NUMA: memory is allocated on the node of the thread that first writes it.

_SYS = Path("/sys")


@dataclass(frozen=True, slots=True)
class Home:
    """NUMA placement of a worker.

    Attributes:
        node: Its NUMA node.
        cores: Cores of the node that the process may use.
        sharers: Number of workers that share these cores, including this one.
    """

    node: int
    cores: frozenset[int]
    sharers: int


def settle(device: torch.device, rank: int, world_size: int, devices: Sequence[int] = ()) -> Home | None:
    """Bind this thread, and those that it starts, to the cores near its device. Returns None if nothing changed.

    ``devices``: see ``nodes_near``.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    home = find_home(rank, nodes_near(device, world_size, devices), read_nodes(), os.sched_getaffinity(0))
    if home is not None:
        os.sched_setaffinity(0, home.cores)
    return home


def find_home(
    rank: int, near: Sequence[int | None], nodes: Mapping[int, frozenset[int]], allowed: set[int]
) -> Home | None:
    """Return where worker ``rank`` should run, or None if no placement is needed or possible.

    No placement is needed on a machine with one node, or if the process is already bound to the cores of one node.

    Args:
        rank: Rank of the worker.
        near: Node of each worker's device, None if unknown.
        nodes: Cores of each node.
        allowed: Cores that this process may use.
    """
    node = near[rank]
    if node is None or sum(bool(cores & allowed) for cores in nodes.values()) < 2:
        return None
    cores = nodes.get(node, frozenset()) & allowed
    return Home(node, cores, near.count(node)) if cores else None


def nodes_near(
    device: torch.device, world_size: int, devices: Sequence[int] = (), sys: Path = _SYS
) -> list[int | None]:
    """Return the node of each worker's device.

    CPU workers are distributed over the nodes, but a single CPU worker is not placed. ``devices`` has the GPU of each
    worker; if it is empty, worker r has the r-th GPU.
    """
    if device.type == "cuda":
        return [_node_of(_pci_address(index), sys) for index in devices or range(world_size)]
    nodes = sorted(read_nodes(sys))
    if world_size == 1 or not nodes:
        return [None] * world_size
    return [nodes[rank * len(nodes) // world_size] for rank in range(world_size)]


def read_nodes(sys: Path = _SYS) -> dict[int, frozenset[int]]:
    """Return the cores of each node that has some, or nothing if the system does not tell. ``sys`` is the sysfs
    directory.
    """
    found = {}
    for directory in (sys / "devices/system/node").glob("node[0-9]*"):
        if cores := _parse_list((directory / "cpulist").read_text()):
            found[int(directory.name.removeprefix("node"))] = cores
    return found


def _node_of(address: str, sys: Path) -> int | None:
    """Return the node of a PCI device, or None if unknown. The system reports unknown as -1."""
    try:
        node = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
    except OSError:
        return None
    return node if node >= 0 else None


def _pci_address(index: int) -> str:
    """Return the PCI address as sysfs writes it: domain, bus, device and function."""
    found: Any = torch.cuda.get_device_properties(index)  # torch's stubs lack these fields
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _parse_list(text: str) -> frozenset[int]:
    """Parse a list of cores: ``0-3,8`` → 0, 1, 2, 3, 8."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


# Memory for the KV cache.

_CPU_FRACTION = 4
_CPU_LIMIT = 4 * 2**30


def cpu_kv_cache_bytes(others: int = 0) -> int:
    """Return a quarter of this process's free memory after ``others`` bytes are used, at most 4 GiB."""
    return min(max(available_host_memory() - others, 0) // _CPU_FRACTION, _CPU_LIMIT)


def available_host_memory() -> int:
    """Return the bytes that this process may still use. Raises ModelLoadError if the kernel does not tell."""
    memory = host_memory()
    if memory is None:
        raise ModelLoadError("free memory cannot be read from /proc/meminfo; set cache.kv_cache_memory")
    return memory.available


def check_kv_cache_memory(config: CacheConfig, device: torch.device) -> None:
    """Raise ConfigError, before anything is on the device, if the configured KV cache or host cache does not fit into
    memory.
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
    """Return the bytes that ``memory_utilization`` of the device leaves after the peak since
    ``reset_peak_memory_stats``.

    Memory of all processes is counted.
    """
    free, total = torch.cuda.mem_get_info(device)
    outside_torch = total - free - torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    return max(int(total * config.memory_utilization) - outside_torch - peak, 0)


def encoder_cache_bytes(config: EngineCoreConfig, model: ModelInfo) -> int:
    """Return the maximum bytes of media embeddings on the device of each worker, or 0 for a model that reads only text."""
    together = [info.max_tokens for info in model.media if info.attends_both_ways]
    step_tokens = max([config.scheduler.step_tokens, *together])
    return encoder_cache_size(config.multimodal.encoder_cache_size, step_tokens, model) * model.embed_bytes

"""Which device a worker computes on, and which CPU cores are near it (NUMA)."""

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
"""Products of more rows are no faster on a CPU, and activations of so many stay in its caches."""
_CPU_PROMPT_BATCH_TOKENS = 256
"""Products of so many rows are nearly as fast as of more."""
CAPABILITY = (8, 0)
"""The least that kernels are compiled for: bfloat16 and asynchronous copies, from Ampere on."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEV = Path("/dev")


def resolve_device(name: str, worker: int, devices: Sequence[int] = (), dev: Path = _DEV) -> torch.device:
    """The torch device for ``model.device``; ``auto`` is the GPU where there is one that can be used. Of several GPUs each worker
    has its own: that of its number, or what ``devices`` says of it. ``dev``: where the driver's files are. Raises ConfigError.
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
    """Tokens of a step on ``device``, beyond which a step takes longer and computes no more in its time."""
    return _CPU_STEP_TOKENS if device.type == "cpu" else STEP_TOKENS


def prompt_batch_tokens(device: torch.device) -> int:
    """Tokens of prompts, beyond which more of them in a step on ``device`` have their first tokens later and none sooner; 0: any
    number.
    """
    return _CPU_PROMPT_BATCH_TOKENS if device.type == "cpu" else 0


def _too_old(rank: int) -> str:
    """Why the GPU cannot be used; empty where it can."""
    found = torch.cuda.get_device_capability(rank)
    if found >= CAPABILITY:
        return ""
    have, need = (".".join(map(str, capability)) for capability in (found, CAPABILITY))
    return f"{torch.cuda.get_device_name(rank)} has compute capability {have}, and {need} is needed"


def _why_none() -> str:
    """As torch or the driver says it, in a sentence without its end."""
    if torch.version.cuda is None:
        return "it was built without CUDA"
    if os.environ.get(_VISIBLE, "0").strip() in ("", "-1"):
        return f"{_VISIBLE} is {os.environ[_VISIBLE]!r}"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as e:
        return str(e).split("\n")[0].split(". ")[0].rstrip(".")
    return "the driver shows none"


# NUMA: memory follows the cores, for it is of the node of the thread that first writes it.

_SYS = Path("/sys")


@dataclass(frozen=True, slots=True)
class Home:
    """A worker's NUMA node and the ``cores`` of it that the process may use, which ``sharers`` workers have, this one counted."""

    node: int
    cores: frozenset[int]
    sharers: int


def settle(device: torch.device, rank: int, world_size: int, devices: Sequence[int] = ()) -> Home | None:
    """Keep this thread, and those that it starts, to the cores near its device. None where it stays as it was. ``devices``: see
    ``nodes_near``.
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
    """Where worker ``rank`` should run; None where it makes no difference, is not known, or has been decided: on a machine of one
    node, and where the process is kept to cores of one already.

    ``near``: the node of each worker's device, None where it is not known. ``nodes``: the cores of each node. ``allowed``: the
    cores that this process may use.
    """
    node = near[rank]
    if node is None or sum(bool(cores & allowed) for cores in nodes.values()) < 2:
        return None
    cores = nodes.get(node, frozenset()) & allowed
    return Home(node, cores, near.count(node)) if cores else None


def nodes_near(
    device: torch.device, world_size: int, devices: Sequence[int] = (), sys: Path = _SYS
) -> list[int | None]:
    """The node of each worker's device; workers that compute on cores are dealt over the nodes, a single one is not. ``devices``:
    the GPU of each worker, empty where worker r has the r-th.
    """
    if device.type == "cuda":
        return [_node_of(_pci_address(index), sys) for index in devices or range(world_size)]
    nodes = sorted(read_nodes(sys))
    if world_size == 1 or not nodes:
        return [None] * world_size
    return [nodes[rank * len(nodes) // world_size] for rank in range(world_size)]


def read_nodes(sys: Path = _SYS) -> dict[int, frozenset[int]]:
    """The cores of each node that has some; empty where the system does not tell. ``sys``: where sysfs is."""
    found = {}
    for directory in (sys / "devices/system/node").glob("node[0-9]*"):
        if cores := _parse_list((directory / "cpulist").read_text()):
            found[int(directory.name.removeprefix("node"))] = cores
    return found


def _node_of(address: str, sys: Path) -> int | None:
    """Of a PCI device; the system says -1 where it does not know."""
    try:
        node = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
    except OSError:
        return None
    return node if node >= 0 else None


def _pci_address(index: int) -> str:
    """As sysfs writes it: domain, bus, device and function."""
    found: Any = torch.cuda.get_device_properties(index)  # torch's stubs lack these fields
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _parse_list(text: str) -> frozenset[int]:
    """``0-3,8`` → 0, 1, 2, 3, 8."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


# How much memory may become KV cache.

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

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
from penstock_enginecore.kv_transfer.staged_blocks import PIECE_BYTES
from penstock_enginecore.media.core.encoder_cache import encoder_cache_size
from penstock_enginecore.models.errors import ModelLoadError

logger = logging.getLogger(__name__)

_CPU_STEP_TOKENS = 512
"""Maximum number of tokens in a step on a CPU.

Matrix products with more rows take as much time per row. The activations of 512 rows fit into the CPU's caches.
"""
_CPU_PROMPT_BATCH_TOKENS = 256
"""Maximum number of prompt tokens in a step on a CPU.

Matrix products with 256 rows are nearly as efficient as larger products.
"""
CAPABILITY = (8, 0)
"""Minimum compute capability of a GPU for which kernels are compiled. The kernels use bfloat16 and asynchronous copies,
which GPUs before Ampere do not have.
"""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEV = Path("/dev")


def resolve_device(name: str, worker: int, devices: Sequence[int] = (), dev: Path = _DEV) -> torch.device:
    """Return the torch device for ``model.device``. ``auto`` selects a GPU that the kernels support, or the CPU if
    there is no such GPU.

    With several GPUs, each worker uses a separate GPU. By default, a worker uses the GPU whose index is the worker's
    number. ``devices`` can assign other GPUs. ``dev`` is the directory of the driver's device files. Raises ConfigError
    if the device cannot be used.
    """
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    rank = devices[worker] if devices else worker
    if count and rank >= count:
        which = (
            f"executor.devices assigns worker {worker} to device {rank}"
            if devices
            else f"worker {worker} has no device"
        )
        raise ConfigError(f"{which}, but torch finds only {count} CUDA devices, numbered from 0")
    reason = _too_old(rank) if count else f"torch finds no CUDA device: {_why_none()}"
    if not reason:
        return torch.device("cuda", rank)
    if name == "cuda":
        raise ConfigError(f"model.device is 'cuda' but {reason}; set model.device to 'auto' or 'cpu'")
    if count or any(dev.glob("nvidia[0-9]*")):
        logger.warning("computing on the CPU, although the machine has a GPU reason=%s", reason)
    return torch.device("cpu")


def step_tokens(device: torch.device, sound_positions: int = 0) -> int:
    """Return the largest useful number of tokens in a step on ``device``. With more tokens in a step, the device does
    not compute more tokens per second. If prompts begin with ``sound_positions`` positions for a sound, which take far
    less time than other tokens, the number is larger on CPUs.
    """
    return _CPU_STEP_TOKENS if device.type == "cpu" and not sound_positions else STEP_TOKENS


def prompt_batch_tokens(device: torch.device, sound_positions: int = 0) -> int:
    """Return the largest useful number of prompt tokens in a step on ``device``, or 0 for no limit. A prompt begins
    with ``sound_positions`` positions for a sound.

    More prompt tokens in a step only delay the first output tokens of their requests.
    """
    return _CPU_PROMPT_BATCH_TOKENS + 2 * sound_positions if device.type == "cpu" else 0


def _too_old(rank: int) -> str:
    """Return the reason why GPU ``rank`` cannot be used, or an empty text if the GPU can be used."""
    found = torch.cuda.get_device_capability(rank)
    if found >= CAPABILITY:
        return ""
    have, need = (".".join(map(str, capability)) for capability in (found, CAPABILITY))
    return f"{torch.cuda.get_device_name(rank)} has compute capability {have}, but at least {need} is required"


def _why_none() -> str:
    """Return the reason why torch finds no CUDA device, without a final period."""
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    if os.environ.get(_VISIBLE, "0").strip() in ("", "-1"):
        return f"{_VISIBLE} is {os.environ[_VISIBLE]!r}"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as e:
        return str(e).split("\n")[0].split(". ")[0].rstrip(".")
    return "the driver reports no device"


# NUMA: memory is allocated on the NUMA node of the thread that first writes to the memory.

_SYS = Path("/sys")


@dataclass(frozen=True, slots=True)
class Home:
    """NUMA placement of a worker.

    Attributes:
        node: NUMA node of the worker.
        cores: CPU cores of this node that the process may use.
        sharers: Number of workers on these cores, including this worker.
    """

    node: int
    cores: frozenset[int]
    sharers: int


def settle(device: torch.device, rank: int, world_size: int, devices: Sequence[int] = ()) -> Home | None:
    """Bind this thread, and the threads that it starts later, to the CPU cores near the device.

    Returns the NUMA placement, or None if the thread was not bound.

    For ``devices``, see ``nodes_near``.
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
    """Return the NUMA placement of worker ``rank``, or None if no placement is needed or possible.

    No placement is needed on a machine with one NUMA node, or if the process is already bound to the cores of one node.

    Args:
        rank: Rank of the worker.
        near: NUMA node of each worker's device, or None for a device whose node is unknown.
        nodes: CPU cores of each NUMA node.
        allowed: CPU cores that this process may use.
    """
    node = near[rank]
    if node is None or sum(bool(cores & allowed) for cores in nodes.values()) < 2:
        return None
    cores = nodes.get(node, frozenset()) & allowed
    return Home(node, cores, near.count(node)) if cores else None


def nodes_near(
    device: torch.device, world_size: int, devices: Sequence[int] = (), sys: Path = _SYS
) -> list[int | None]:
    """Return the NUMA node of each worker's device, or None for a worker whose node is unknown.

    CPU workers are distributed over the nodes, but a single CPU worker is not bound to a node. ``devices`` lists the
    GPU index of each worker. If ``devices`` is empty, worker r uses the GPU with index r.
    """
    if device.type == "cuda":
        return [_node_of(_pci_address(index), sys) for index in devices or range(world_size)]
    nodes = sorted(read_nodes(sys))
    if world_size == 1 or not nodes:
        return [None] * world_size
    return [nodes[rank * len(nodes) // world_size] for rank in range(world_size)]


def read_nodes(sys: Path = _SYS) -> dict[int, frozenset[int]]:
    """Return the CPU cores of each NUMA node that has cores, or an empty dict if the system reports no NUMA nodes.

    ``sys`` is the sysfs directory.
    """
    found = {}
    for directory in (sys / "devices/system/node").glob("node[0-9]*"):
        if cores := _parse_list((directory / "cpulist").read_text()):
            found[int(directory.name.removeprefix("node"))] = cores
    return found


def _node_of(address: str, sys: Path) -> int | None:
    """Return the NUMA node of a PCI device, or None if the node is unknown. For an unknown node, the system reports -1."""
    try:
        node = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
    except OSError:
        return None
    return node if node >= 0 else None


def _pci_address(index: int) -> str:
    """Return the PCI address of a GPU in the format of sysfs: domain, bus, device and function."""
    found: Any = torch.cuda.get_device_properties(index)  # torch's type stubs do not declare these fields
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _parse_list(text: str) -> frozenset[int]:
    """Parse a list of cores: ``0-3,8`` → 0, 1, 2, 3, 8."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


# Size of the memory for the KV cache.

_CPU_FRACTION = 4
_CPU_LIMIT = 4 * 2**30


def cpu_kv_cache_bytes(others: int = 0) -> int:
    """Return the default size in bytes of the KV cache on a CPU. The size is a quarter of the host memory minus
    ``others`` bytes for other uses, at most 4 GiB.
    """
    return min(max(available_host_memory() - others, 0) // _CPU_FRACTION, _CPU_LIMIT)


def available_host_memory() -> int:
    """Return how many bytes of host memory this process may still use. Raises ModelLoadError if the operating system
    does not report this number.
    """
    memory = host_memory()
    if memory is None:
        raise ModelLoadError(
            "the size of the free host memory cannot be read from /proc/meminfo; set cache.kv_cache_memory"
        )
    return memory.available


def check_kv_cache_memory(config: CacheConfig, device: torch.device) -> None:
    """Raise ConfigError if the configured KV cache, or the configured host memory for offloaded KV blocks, does not fit
    into memory.

    Call this function before anything is allocated on the device.
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
    """Return the number of bytes that remain for the KV cache on the device. Call ``torch.cuda.empty_cache`` first.

    The result is the fraction ``memory_utilization`` of the device's memory, minus the used memory of all processes,
    minus the memory that steps need in addition: the peak since ``reset_peak_memory_stats``. Used memory includes free
    memory in segments of torch's allocator that contain other tensors. Such holes are too small for the KV cache, which
    is one allocation.
    """
    free, total = torch.cuda.mem_get_info(device)
    of_steps = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return max(int(total * config.memory_utilization) - (total - free) - of_steps, 0)


def staging_bytes(config: EngineCoreConfig) -> int:
    """Return the size in bytes of the GPU memory through which blocks and states of recurrent layers are copied to and
    from other engines, a disk or a connector. The result is 0 if the engine makes no such copies.
    """
    copied = config.kv_transfer.enabled or config.kv_transfer.connector or config.cache.disk
    return 2 * PIECE_BYTES if copied else 0


def encoder_cache_bytes(config: EngineCoreConfig, model: ModelInfo) -> int:
    """Return the maximum size in bytes of the media embeddings that each worker keeps on its device, or 0 for a model
    that reads only text.
    """
    together = [info.max_span for info in model.media]
    step_tokens = max([config.scheduler.step_tokens, *together])
    return encoder_cache_size(config.multimodal.encoder_cache_size, step_tokens, model) * model.embed_bytes

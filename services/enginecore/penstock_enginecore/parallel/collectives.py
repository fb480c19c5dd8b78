"""Collective operations (all_reduce, all_gather) between the tensor-parallel ranks of one host during a step, over
gloo, NCCL or shared memory.
"""

import ctypes
import functools
import importlib
import mmap
import os
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from penstock_common.errors import ConfigError
from penstock_common.observability.metrics import BucketCounts, Buckets
from penstock_enginecore.parallel.meeting import Meeting

# Gloo groups of processes of one host, over the loopback interface. Gloo is not used between hosts, because gloo's
# ports accept any client without authentication. torch's default group is not used, because other code could call
# operations of this group between the operations of a step. The processes find each other through shared memory, not
# through a port.

_GLOO_INTERFACE = "lo"
_TIMEOUT = timedelta(days=1)
"""Timeout of gloo groups, so long that it never ends an operation. The engine itself ends a step that hangs, and names
the worker.
"""


def host_store(meeting: Meeting) -> Store:
    """Return a torch store in shared memory, for processes of one host. Raises ValueError if ``meeting`` is for
    processes of several hosts.
    """
    if not isinstance(meeting.at, int):
        raise ValueError(
            f"torch groups are only for processes of one host, but the processes meet at the address {meeting.at}"
        )
    # torch opens the path again when it destroys the store. If the descriptor had been closed, its number could belong
    # to a pipe or a socket, and torch would end or block the process. So a copy stays open until the process ends.
    own = os.dup(meeting.at)
    store = FileStore(f"/proc/{os.getpid()}/fd/{own}", -1)
    store.set_timeout(_TIMEOUT)
    return store


def gloo_group(meeting: Meeting, name: str, rank: int, size: int) -> Any:
    """Wait until all ``size`` processes have called this function for the group ``name`` on this host. Return the
    group.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(interface=_GLOO_INTERFACE)]
    options._timeout = _TIMEOUT
    options._threads = 1
    return dist.ProcessGroupGloo(PrefixStore(name, host_store(meeting)), rank, size, options)


class Collectives(Protocol):
    """Collective operations of a group of ranks. All ranks call the same methods in the same order."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace ``tensor`` on every rank by the sum of the tensors of all ranks. The sums on all ranks are
        bit-identical.
        """

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in rank order. All tensors must have the same shape and dtype."""


class GlooCollectives:
    """``Collectives`` over sockets of the loopback interface, with gloo."""

    def __init__(self, meeting: Meeting, rank: int, size: int, name: str = "tensor") -> None:
        """Wait until all ranks have joined the group; see ``gloo_group``."""
        self.rank, self.size = rank, size
        self._group: Any = gloo_group(meeting, name, rank, size)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._group.allgather([gathered], [tensor]).wait()
        return gathered


# NCCL groups of processes on one host, with one GPU each.

_NCCL_INTERFACE = "=lo"
"""Network interface on which NCCL listens while its ranks connect. NCCL does not authenticate clients, so NCCL must use
the loopback interface.
"""


def nccl_group(meeting: Meeting, name: str, rank: int, size: int, device: torch.device) -> Any:
    """Wait until all ``size`` processes have called this function for the group ``name``. Return the group. Each
    process must use a different ``device``.

    Raises ConfigError if torch was built without NCCL.
    """
    distributed: Any = importlib.import_module("torch.distributed")
    if not distributed.is_nccl_available():
        raise ConfigError(
            f"executor.tensor_parallel_size is {size}; workers on GPUs need NCCL, but this torch was built without NCCL; "
            "install a torch with NCCL, or set model.device to 'cpu'"
        )
    os.environ.setdefault("NCCL_SOCKET_IFNAME", _NCCL_INTERFACE)
    torch.cuda.set_device(device)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    group = distributed.ProcessGroupNCCL(PrefixStore(name, host_store(meeting)), rank, size, options)
    group.eager_connect_single_device(device)
    return group


class NcclCollectives:
    """``Collectives`` for GPU tensors, on the current stream of the tensors' device. Methods return before the results
    are computed.

    In NCCL, the order of additions depends on the size of the tensor and on the links between GPUs. The results on all
    ranks are bit-identical.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        """Use ``group``, which ``nccl_group`` returned."""
        self.rank, self.size = rank, size
        self._group = group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        own = tensor.flatten()
        gathered = own.new_empty(self.size * len(own))
        self._group._allgather_base(gathered, own).wait()
        return list(gathered.view(self.size, *tensor.shape).unbind())


class DeviceCollectives:
    """``Collectives`` of ranks with one GPU each. ``device`` handles tensors on the GPU. ``host`` handles tensors on
    the host, for example while the model is loaded.
    """

    def __init__(self, host: Collectives, device: Collectives) -> None:
        if (host.rank, host.size) != (device.rank, device.size):
            raise ValueError(
                f"rank {host.rank} of {host.size} of the CPU group must have the same rank in the GPU group, not "
                f"{device.rank} of {device.size}"
            )
        self.rank, self.size = host.rank, host.size
        self._host, self._device = host, device

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._of(tensor).all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._of(tensor).all_gather(tensor)

    def _of(self, tensor: torch.Tensor) -> Collectives:
        return self._host if tensor.device.type == "cpu" else self._device


# Collectives in shared memory: ``csrc/exchange.cpp``.

PIECE = 128 * 1024
"""Number of bytes that ranks exchange in one round. The hidden states of 16 tokens fit into this size, and the slots of
all ranks fit into the CPU caches.
"""
_LINE = 128
_LIBRARY = Path(__file__).parents[1] / "native" / "kernels_baseline.so"
_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_NUMBER, _POINTER = ctypes.c_int64, ctypes.c_void_p


def create(size: int) -> int:
    """Return the descriptor of shared memory for ``size`` ranks. A child process inherits the descriptor only if the
    descriptor is passed explicitly.
    """
    descriptor = os.memfd_create("penstock-exchange", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _num_bytes(size))
    return descriptor


@functools.cache
def available() -> bool:
    """Return whether the package was built with a compiler, and the operating system and processor support the C++
    library.
    """
    try:
        _functions()
    except (OSError, AttributeError):
        return False
    return True


class SharedMemoryCollectives:
    """``Collectives`` in shared memory, for float32 and bfloat16. Sums add the ranks in rank order, and bfloat16 sums
    are rounded once.

    A waiting rank spins for 50 microseconds, then sleeps. A rank that waits for a dead rank waits until the engine
    kills it. ``base`` is the address of the memory.
    """

    def __init__(self, memory: int, rank: int, size: int) -> None:
        """Map ``memory``, a descriptor that ``create`` returned for ``size`` ranks.

        Raises ConfigError if the C++ library is missing, and ValueError if the memory has another size than ``size``
        ranks need.
        """
        if not available():
            raise ConfigError(
                "executor.collectives is 'shm', but the CPU kernels are missing; install a C++ compiler and this package again, "
                "or set executor.collectives to 'gloo'"
            )
        if os.fstat(memory).st_size != _num_bytes(size):
            raise ValueError(
                f"the shared memory of descriptor {memory} has {os.fstat(memory).st_size} bytes, but {size} ranks need "
                f"{_num_bytes(size)} bytes"
            )
        self.rank, self.size = rank, size
        self._map = mmap.mmap(memory, _num_bytes(size))
        self._pinned = ctypes.c_char.from_buffer(self._map)  # This reference keeps the mapping alive.
        self.base = ctypes.addressof(self._pinned)
        self._sum, self._gather = _functions()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum the tensors of all ranks, see ``Collectives.all_reduce``. Raises TypeError for a tensor that is not
        contiguous or has another dtype.
        """
        if tensor.dtype not in _KINDS or not tensor.is_contiguous():
            raise TypeError(
                f"all_reduce needs a contiguous tensor with dtype {' or '.join(map(str, _KINDS))}; the tensor has dtype "
                f"{tensor.dtype}, and is {'contiguous' if tensor.is_contiguous() else 'not contiguous'}"
            )
        own = self.base, self.rank, self.size, PIECE
        self._sum(*own, tensor.data_ptr(), tensor.numel(), _KINDS[tensor.dtype])
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        tensor = tensor.contiguous()
        gathered = tensor.new_empty((self.size, *tensor.shape))
        self._gather(self.base, self.rank, self.size, PIECE, tensor.data_ptr(), gathered.data_ptr(), tensor.nbytes)
        return list(gathered.unbind())


def _num_bytes(size: int) -> int:
    return size * (_LINE + 2 * PIECE)


@functools.cache
def _functions() -> "tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer]":
    """Return the C++ library's functions for collectives, which release Python's global interpreter lock.

    Raises OSError if the library is missing, and AttributeError if an older library lacks a function.
    """
    library = ctypes.CDLL(str(_LIBRARY))
    add_up, gather = library.penstock_all_reduce, library.penstock_all_gather
    own = (_POINTER, _NUMBER, _NUMBER, _NUMBER)
    add_up.argtypes, add_up.restype = (*own, _POINTER, _NUMBER, _NUMBER), None
    gather.argtypes, gather.restype = (*own, _POINTER, _POINTER, _NUMBER), None
    return add_up, gather


# Measurement of the time that collective operations take.

_SECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)


class TimedCollectives:
    """``Collectives`` that pass each operation to ``inner`` and record its duration in seconds, including the wait for
    other ranks.
    """

    def __init__(self, inner: Collectives) -> None:
        self.rank, self.size = inner.rank, inner.size
        self.inner = inner
        self._all_reduce, self._all_gather = Buckets(_SECONDS), Buckets(_SECONDS)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        began = time.perf_counter()
        reduced = self.inner.all_reduce(tensor)
        self._all_reduce.observe(time.perf_counter() - began)
        return reduced

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        began = time.perf_counter()
        gathered = self.inner.all_gather(tensor)
        self._all_gather.observe(time.perf_counter() - began)
        return gathered

    def have_reduced(self, seconds: Iterable[float]) -> None:
        """Record the durations, in seconds, of sums over ranks that kernels have computed without this object."""
        for each in seconds:
            self._all_reduce.observe(each)

    def times(self) -> dict[str, BucketCounts]:
        """Return the recorded durations in seconds by operation. Thread-safe."""
        return {"all_reduce": self._all_reduce.counts(), "all_gather": self._all_gather.counts()}

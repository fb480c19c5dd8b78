"""What ranks of one host exchange in a step: by gloo, NCCL or shared memory."""

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

# Gloo's groups of processes of one host, over the loopback interface.
#
# Not of several hosts: gloo listens at ports that obey everybody, and has no way to recognize anybody.
# Not torch's default group: nothing else gets between the calls of a step. The processes find each other in memory that
# they share, not at a port.

_GLOO_INTERFACE = "lo"
_TIMEOUT = timedelta(days=1)
"""A step that hangs is ended by the engine, which knows which worker it waits for."""


def host_store(meeting: Meeting) -> Store:
    """Return torch's store in the memory that processes of one host share. Raises ValueError for a meeting of several hosts."""
    if not isinstance(meeting.at, int):
        raise ValueError(f"torch's groups are of one host, and not of those that meet at {meeting.at}")
    store = FileStore(f"/proc/{os.getpid()}/fd/{meeting.at}", -1)
    store.set_timeout(_TIMEOUT)
    return store


def gloo_group(meeting: Meeting, name: str, rank: int, size: int) -> Any:
    """Waits for all ``size`` processes of this host that ask for the group ``name``."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(interface=_GLOO_INTERFACE)]
    options._timeout = _TIMEOUT
    options._threads = 1
    return dist.ProcessGroupGloo(PrefixStore(name, host_store(meeting)), rank, size, options)


class Collectives(Protocol):
    """All ranks call the same methods in the same order."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place; every rank gets the same bits."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, which are of one shape and dtype, by rank."""


class GlooCollectives:
    """Over sockets."""

    def __init__(self, meeting: Meeting, rank: int, size: int, name: str = "tensor") -> None:
        """Waits for all ranks. See ``gloo_group``."""
        self.rank, self.size = rank, size
        self._group: Any = gloo_group(meeting, name, rank, size)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._group.allgather([gathered], [tensor]).wait()
        return gathered


# NCCL's groups of processes: each has a GPU of one host.

_NCCL_INTERFACE = "=lo"
"""Where NCCL listens while its ranks meet, at ports that recognize nobody: all are on this host."""
"""A step that hangs is ended by the engine, which knows which worker it waits for."""


def nccl_group(meeting: Meeting, name: str, rank: int, size: int, device: torch.device) -> Any:
    """Waits for all ``size`` processes that ask for the group ``name``, each on a ``device`` of its own. Raises ConfigError
    where torch was built without NCCL.
    """
    distributed: Any = importlib.import_module("torch.distributed")
    if not distributed.is_nccl_available():
        raise ConfigError(
            f"executor.tensor_parallel_size is {size}; workers on GPUs exchange by NCCL, which this torch was built without; "
            "install one that has it, or set model.device to 'cpu'"
        )
    os.environ.setdefault("NCCL_SOCKET_IFNAME", _NCCL_INTERFACE)
    torch.cuda.set_device(device)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    group = distributed.ProcessGroupNCCL(PrefixStore(name, host_store(meeting)), rank, size, options)
    group.eager_connect_single_device(device)
    return group


class NcclCollectives:
    """``Collectives`` of tensors on GPUs, behind what their current stream has to do and before what it gets to do next: the
    methods return before anything is computed. Sums are in an order that NCCL chooses by the size and the links; every rank
    gets the same bits.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        """``group``: see ``nccl_group``."""
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
    """``Collectives`` of ranks that each have a GPU: tensors that are there go by ``device``, those on the host, as while a model
    is read and split, by ``host``.
    """

    def __init__(self, host: Collectives, device: Collectives) -> None:
        if (host.rank, host.size) != (device.rank, device.size):
            raise ValueError(
                f"rank {host.rank} of {host.size} on the host is rank {device.rank} of {device.size} on GPUs"
            )
        self.rank, self.size = host.rank, host.size
        self._host, self._device = host, device

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._of(tensor).all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._of(tensor).all_gather(tensor)

    def _of(self, tensor: torch.Tensor) -> Collectives:
        return self._host if tensor.device.type == "cpu" else self._device


# In memory that the ranks share: ``csrc/exchange.cpp``.

PIECE = 128 * 1024
"""Bytes that are exchanged at once: a step's hidden states of 16 tokens fit, and the slots stay in the caches."""
_LINE = 128
_LIBRARY = Path(__file__).parents[1] / "native" / "kernels_baseline.so"
_KINDS = {torch.float32: 0, torch.bfloat16: 1}
_NUMBER, _POINTER = ctypes.c_int64, ctypes.c_void_p


def create(size: int) -> int:
    """A descriptor of memory for ``size`` ranks, not inherited unless it is passed on."""
    descriptor = os.memfd_create("penstock-exchange", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _num_bytes(size))
    return descriptor


@functools.cache
def available() -> bool:
    """Whether the package was built with a compiler, for a system that has what this needs."""
    try:
        _functions()
    except (OSError, AttributeError):
        return False
    return True


class SharedMemoryCollectives:
    """``Collectives`` of float32 and bfloat16 sums, in rank order; bfloat16 ones are rounded once. A rank that waits looks for 50
    microseconds and then sleeps. One whose neighbour has ended waits until it is killed. ``base``: the address of the memory.
    """

    def __init__(self, memory: int, rank: int, size: int) -> None:
        """``memory``: a descriptor that ``create`` made for ``size`` ranks. Raises ConfigError where there is no library,
        ValueError for other memory.
        """
        if not available():
            raise ConfigError(
                "executor.collectives is 'shm', which needs the CPU kernels; install a C++ compiler and this package again, or "
                "use 'gloo'"
            )
        if os.fstat(memory).st_size != _num_bytes(size):
            raise ValueError(f"descriptor {memory} is no memory of {size} ranks")
        self.rank, self.size = rank, size
        self._map = mmap.mmap(memory, _num_bytes(size))
        self._pinned = ctypes.c_char.from_buffer(self._map)  # the mapping stays as long as this
        self.base = ctypes.addressof(self._pinned)
        self._sum, self._gather = _functions()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Collectives``. TypeError for other dtypes; the tensor is contiguous."""
        if tensor.dtype not in _KINDS or not tensor.is_contiguous():
            raise TypeError(f"sums are of contiguous {', '.join(map(str, _KINDS))}, and not of {tensor.dtype}")
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
    """They release the interpreter's lock. Raises OSError without the library, AttributeError for an older one."""
    library = ctypes.CDLL(str(_LIBRARY))
    add_up, gather = library.penstock_all_reduce, library.penstock_all_gather
    own = (_POINTER, _NUMBER, _NUMBER, _NUMBER)
    add_up.argtypes, add_up.restype = (*own, _POINTER, _NUMBER, _NUMBER), None
    gather.argtypes, gather.restype = (*own, _POINTER, _POINTER, _NUMBER), None
    return add_up, gather


# How long the ranks' exchanges take.

_SECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)


class TimedCollectives:
    """``Collectives``, ``inner``, that keep the seconds of each operation: those of waiting for the other ranks among them."""

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
        """Sums of the same ranks that kernels have made, without this object."""
        for each in seconds:
            self._all_reduce.observe(each)

    def times(self) -> dict[str, BucketCounts]:
        """Seconds by operation. Any thread may ask."""
        return {"all_reduce": self._all_reduce.counts(), "all_gather": self._all_gather.counts()}

"""What ranks of one host exchange in a step."""

import os
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

_INTERFACE = "lo"
_TIMEOUT = timedelta(days=1)
"""A step that hangs is ended by the engine, which knows which worker it waits for."""


class Collectives(Protocol):
    """All ranks call the same methods in the same order."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place; every rank gets the same bits."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, which are of one shape and dtype, by rank."""


class GlooCollectives:
    """Over sockets of the loopback interface. Not torch's default group: nothing else gets between the calls of a step."""

    def __init__(self, store: int, rank: int, size: int) -> None:
        """Waits for all ranks. ``store``: a descriptor of memory that they share, empty at first, to find each other."""
        self.rank, self.size = rank, size
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(interface=_INTERFACE)]
        options._timeout = _TIMEOUT
        options._threads = 1
        self._store = FileStore(f"/proc/{os.getpid()}/fd/{store}", -1)
        self._group: Any = dist.ProcessGroupGloo(self._store, rank, size, options)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See ``Collectives``."""
        self._group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See ``Collectives``."""
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._group.allgather([gathered], [tensor]).wait()
        return gathered

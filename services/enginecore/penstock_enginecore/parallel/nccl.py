"""NCCL's groups of processes: each has a GPU of one host."""

import importlib
import os
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from penstock_common.errors import ConfigError
from penstock_enginecore.parallel.collectives import Collectives
from penstock_enginecore.parallel.gloo import host_store
from penstock_enginecore.parallel.meeting import Meeting

_INTERFACE = "=lo"
"""Where NCCL listens while its ranks meet, at ports that recognize nobody: all are on this host."""
_TIMEOUT = timedelta(days=1)
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
    os.environ.setdefault("NCCL_SOCKET_IFNAME", _INTERFACE)
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

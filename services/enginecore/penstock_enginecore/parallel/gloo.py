"""Gloo's groups of processes of one host, over the loopback interface.

Not torch's default group: nothing else gets between the calls of a step. The processes find each other in memory that they share,
not at a port that others reach.
"""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

_INTERFACE = "lo"
_TIMEOUT = timedelta(days=1)
"""A step that hangs is ended by the engine, which knows which worker it waits for."""


def gloo_group(store: int, name: str, rank: int, size: int) -> Any:
    """Waits for all ``size`` processes that ask for the group ``name``. ``store``: a descriptor of memory that they share, empty
    at first; several groups may use it.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(interface=_INTERFACE)]
    options._timeout = _TIMEOUT
    options._threads = 1
    shared = PrefixStore(name, FileStore(f"/proc/{os.getpid()}/fd/{store}", -1))
    return dist.ProcessGroupGloo(shared, rank, size, options)

"""Gloo's groups of processes of one host, over the loopback interface.

Not of several hosts: gloo listens at ports that obey everybody, and has no way to recognize anybody.

Not torch's default group: nothing else gets between the calls of a step. The processes find each other in memory that they share,
not at a port.
"""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from penstock_enginecore.parallel.meeting import Meeting

_INTERFACE = "lo"
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
    options._devices = [dist.ProcessGroupGloo.create_device(interface=_INTERFACE)]
    options._timeout = _TIMEOUT
    options._threads = 1
    return dist.ProcessGroupGloo(PrefixStore(name, host_store(meeting)), rank, size, options)

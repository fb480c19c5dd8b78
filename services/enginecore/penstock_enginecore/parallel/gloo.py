"""Gloo's groups of processes: of one host over the loopback interface, of several over what lies between them.

Not torch's default group: nothing else gets between the calls of a step. The processes of one host find each other in memory that
they share, not at a port that others reach.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from penstock_common import addresses
from penstock_enginecore.parallel.dead_peers import give_up_after
from penstock_enginecore.parallel.meeting_store import MeetingStore

_INTERFACE = "lo"
_TIMEOUT = timedelta(days=1)
"""A step that hangs is ended by the engine, which knows which worker it waits for."""
_REACHED = 60.0
"""Seconds in which the store of a meeting is reached, and after which its host is gone where it does not answer any more."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where processes find each other. ``at``: a descriptor of memory that they share, empty at first; those of several hosts an
    address, host:port, of a ``MeetingServer``. ``address``: the IP address at which others reach this process, where they are on
    other hosts. Several groups may meet there.
    """

    at: int | str
    address: str = ""

    @contextlib.contextmanager
    def store(self) -> Iterator[Store]:
        """For torch, until a group has met. OSError where it is not reached within a minute."""
        if isinstance(self.at, int):
            yield FileStore(f"/proc/{os.getpid()}/fd/{self.at}", -1)
            return
        connection = socket.create_connection(addresses.split(self.at), _REACHED)
        give_up_after(connection, _REACHED)
        with contextlib.closing(MeetingStore(connection, _REACHED)) as store:
            yield store

    def device(self) -> Any:
        """gloo's: what the group's sockets are bound to."""
        if self.address:
            return dist.ProcessGroupGloo.create_device(hostname=self.address)
        return dist.ProcessGroupGloo.create_device(interface=_INTERFACE)


def gloo_group(meeting: Meeting, name: str, rank: int, size: int) -> Any:
    """Waits for all ``size`` processes that ask for the group ``name``."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [meeting.device()]
    options._timeout = _TIMEOUT
    options._threads = 1
    with meeting.store() as store:
        store.set_timeout(_TIMEOUT)
        return dist.ProcessGroupGloo(PrefixStore(name, store), rank, size, options)

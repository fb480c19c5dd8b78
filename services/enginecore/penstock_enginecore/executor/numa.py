"""Which cores are near a worker's device. Memory follows: it is of the node of the thread that first writes it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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

"""How much memory there is for this process, as the kernel tells it."""

from pathlib import Path

import msgspec

from penstock_common.errors import ConfigError

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class Memory(msgspec.Struct, frozen=True):
    """Bytes of ``place`` ("this machine", "this container"): in all, and those that may still be taken."""

    place: str
    total: int
    available: int


def host_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> Memory | None:
    """The machine's memory by the kernel's estimate, or the container's where its limit (control groups, version 2) leaves
    less; None where the kernel does not tell.

    What a container's processes have in the page cache counts as available: the kernel gives it back before it refuses memory.
    """
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return None
    machine = Memory("this machine", total, available)
    container = _container(cgroup)
    return container if container is not None and container.available < available else machine


def _container(cgroup: Path) -> Memory | None:
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((cgroup / "memory.current").read_text())
    except OSError:
        return None  # no cgroup v2 here: nothing limits the process further
    return Memory("this container", int(limit), max(int(limit) - used + _page_cache(cgroup), 0))


def _page_cache(cgroup: Path) -> int:
    try:
        counts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))


def in_units(num_bytes: int) -> str:
    """A number of bytes for people: ``372.5 GiB``."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 // 10 else f"{num_bytes / 2**20:.1f} MiB"


def check_fits(key: str, num_bytes: int, memory: Memory, *, count: int = 1) -> None:
    """Raise ConfigError when ``count`` times the value of ``key`` is more than can still be taken."""
    if count * num_bytes <= memory.available:
        return
    each = f" for each of {count} engines" if count > 1 else ""
    raise ConfigError(
        f"{key} is {num_bytes} bytes ({in_units(num_bytes)}){each}; {memory.place} has {in_units(memory.available)} of "
        f"{in_units(memory.total)} left"
    )

"""Memory that is available to this process, and control over the memory that glibc keeps after ``free``."""

import ctypes
import os
from pathlib import Path

import msgspec

from penstock_common.errors import ConfigError

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class Memory(msgspec.Struct, frozen=True):
    """Total and available memory, in bytes, of ``place`` ("this machine" or "this container")."""

    place: str
    total: int
    available: int


def host_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> Memory | None:
    """Return the machine's memory as the kernel estimates it, or the container's memory if the container has less
    memory available.

    The container's limit comes from control groups (version 2). Returns None if the kernel does not report memory. The
    page cache of a container counts as available, because the kernel reclaims the page cache before it refuses memory
    to a process.
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
        return None  # without cgroup v2, only the machine's memory limits the process
    return Memory("this container", int(limit), max(int(limit) - used + _page_cache(cgroup), 0))


def _page_cache(cgroup: Path) -> int:
    try:
        counts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))


def in_units(num_bytes: int) -> str:
    """Return a number of bytes as a readable text, for example ``372.5 GiB``."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 // 10 else f"{num_bytes / 2**20:.1f} MiB"


def check_fits(key: str, num_bytes: int, memory: Memory, *, count: int = 1) -> None:
    """Raise ConfigError if ``count`` times the value of ``key`` exceeds the available memory."""
    if count * num_bytes <= memory.available:
        return
    each = f" for each of {count} engines" if count > 1 else ""
    raise ConfigError(
        f"{key} is {num_bytes} bytes ({in_units(num_bytes)}){each}; {memory.place} has only {in_units(memory.available)} of "
        f"{in_units(memory.total)} available"
    )


# Control of freed memory. By default, glibc keeps freed memory in up to eight heaps per core. A frontend that once
# handled a few large messages would keep two or three times as much memory as the frontend needs.

MIB = 1024 * 1024
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_ARENAS = 2
_TRIM_THRESHOLD = 4 * MIB


def use_few_arenas() -> None:
    """Let all threads share two heaps. Does nothing without glibc, or if the environment (``MALLOC_*``,
    ``GLIBC_TUNABLES``) configures the allocator.
    """
    _set(_M_ARENA_MAX, _ARENAS)


def give_back_large_blocks(at_least: int = MIB) -> None:
    """Make glibc return blocks of at least ``at_least`` bytes to the system as soon as they are freed.

    The cost is one page fault per 4 KiB when such a block is used. By default, glibc keeps blocks of up to 32 MiB once
    the first such block has been freed. Does nothing if ``use_few_arenas`` does nothing.
    """
    _set(_M_MMAP_THRESHOLD, at_least)
    _set(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)


class _MallInfo(ctypes.Structure):
    """Layout of ``struct mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def free_bytes() -> int:
    """Return the number of freed bytes that glibc keeps in its heaps, or 0 if the number is unknown."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _MallInfo
    return int(mallinfo().fordblks)


def give_back_free() -> None:
    """Return all unused pages to the system. Does nothing if ``use_few_arenas`` does nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and not _said_by_the_environment():
        trim(0)


def _set(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not _said_by_the_environment():
        mallopt(parameter, value)


def _said_by_the_environment() -> bool:
    return any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")

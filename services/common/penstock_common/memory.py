"""How much memory there is for this process, and what the C library does with memory that was freed."""

import ctypes
import os
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


# What the C library does with memory that was freed: glibc keeps it, in up to eight heaps per core, unless it is told otherwise.
#
# A frontend that has once held a few large messages would go on holding two or three times what it needs.

MIB = 1024 * 1024
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_ARENAS = 2
_TRIM_THRESHOLD = 4 * MIB


def use_few_arenas() -> None:
    """Let all threads allocate from two heaps. Does nothing where the C library is another one than glibc, or where the
    environment (``MALLOC_*``, ``GLIBC_TUNABLES``) says how to allocate.
    """
    _set(_M_ARENA_MAX, _ARENAS)


def give_back_large_blocks(at_least: int = MIB) -> None:
    """Let blocks of ``at_least`` bytes go back to the system as soon as they are freed, for a page fault per 4 KiB of each.
    By default the C library keeps blocks of up to 32 MiB once one of them has been freed. Does nothing where ``use_few_arenas``
    does nothing.
    """
    _set(_M_MMAP_THRESHOLD, at_least)
    _set(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2``."""

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
    """Bytes that were freed and that the C library keeps in its heaps; 0 where it does not say."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _MallInfo
    return int(mallinfo().fordblks)


def give_back_free() -> None:
    """Give all pages back to the system that hold nothing. Does nothing where ``use_few_arenas`` does nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and not _said_by_the_environment():
        trim(0)


def _set(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not _said_by_the_environment():
        mallopt(parameter, value)


def _said_by_the_environment() -> bool:
    return any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")

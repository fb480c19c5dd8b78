"""Resources of running workers, and resources that remain after their end."""

import contextlib
import gc
from collections.abc import Iterable
from pathlib import Path

from tests.fakes.processes import children

_LISTENS = "0A"


class Remains:
    """Resources of an engine's workers. Create it before the engine, and call ``see`` while the workers run."""

    def __init__(self) -> None:
        gc.collect()  # collect leftovers of an earlier engine
        self._children = children()
        self._memory = _memory_here()
        self._pids: set[int] = set()
        self._sockets: set[str] = set()

    def see(self, pids: Iterable[int]) -> None:
        """Record the resources of running processes. AssertionError if one has files under ``/dev/shm``."""
        for pid in pids:
            self._pids.add(pid)
            self._sockets |= _sockets(pid)
            with contextlib.suppress(OSError):  # the process has ended
                maps = Path(f"/proc/{pid}/maps").read_text()
                assert "/dev/shm/" not in maps, maps

    def left(self) -> list[str]:
        """Return the processes, memory and ports that still exist."""
        gc.unfreeze()  # the busy loop has excluded its engine from garbage collection
        gc.collect()
        found = [
            f"process {pid}" for pid in self._pids | (children() - self._children) if Path(f"/proc/{pid}").exists()
        ]
        found += [f"listening socket {inode}" for inode in self._sockets & _listening()]
        found += [f"{_memory_here() - self._memory} memory files"] if _memory_here() > self._memory else []
        return found


def _memory_here() -> int:
    """Return the number of memory files that this process has mapped or open."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(descriptor.readlink()))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:penstock" in each for each in [*links, *maps])


def _sockets(pid: int) -> set[str]:
    """Return the inodes of a process's sockets."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                link = str(descriptor.readlink())
                if link.startswith("socket:["):
                    found.add(link[8:-1])
    return found


def _listening() -> set[str]:
    """Return the inodes of all listening sockets of this machine."""
    rows = [
        line.split()
        for family in ("tcp", "tcp6")
        if Path(f"/proc/net/{family}").exists()
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]
    ]
    return {row[9] for row in rows if row[3] == _LISTENS}

"""Resident memory of a server's engine process."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path


class EngineMemory:
    """Samples the resident memory of the engine process every 20 ms. The process is a descendant of this process."""

    def __init__(self) -> None:
        (self._pid,) = (pid for pid in _descendants() if _command(pid).startswith(b"penstock-enginecore "))
        self._stopped = threading.Event()

    @property
    def now(self) -> int:
        """Return the current resident memory in bytes."""
        pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @contextlib.contextmanager
    def peak(self) -> Iterator[list[int]]:
        """Record the peak while the ``with`` block runs. The list gets the peak when the block ends."""
        seen: list[int] = []
        self._stopped.clear()

        def look() -> None:
            most = self.now
            while not self._stopped.wait(0.02):
                most = max(most, self.now)
            seen.append(most)

        looking = threading.Thread(target=look)
        looking.start()
        try:
            yield seen
        finally:
            self._stopped.set()
            looking.join()


def _descendants() -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found, known = [], {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in known} - known:
        found += sorted(new)
        known |= new
    return found


def _command(pid: int) -> bytes:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""

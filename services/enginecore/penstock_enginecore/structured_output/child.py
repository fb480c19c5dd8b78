"""How the processes that compile and follow behave towards the machine that they share with the engine."""

import os
import resource
import signal
from pathlib import Path

from penstock_common.child_process import end_with_parent

NICENESS = 10
"""Of a child: it takes no core that the engine's steps could have."""
_OUT_OF_MEMORY = ("bad_alloc", "std::length_error", "cannot allocate")


def detach(niceness: int) -> None:
    """Die with the process that started this one, leave Ctrl-C to the engine, and keep its terminal clean."""
    os.nice(niceness)
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def limit_memory(headroom: int) -> None:
    """Let this process's address space grow by ``headroom`` bytes and no more."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + headroom
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def out_of_memory(error: Exception) -> bool:
    """Whether the library, or Python, could not allocate."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY)

"""The engine's child processes: how they are started, and how they behave towards the machine they share with it."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NICENESS = 10
"""Of a child: it takes no core that the engine's steps could have."""
_PR_SET_PDEATHSIG = 1
_OUT_OF_MEMORY = ("bad_alloc", "std::length_error", "cannot allocate")


def start_python(module: str, arguments: Sequence[str], descriptors: Sequence[int]) -> "subprocess.Popen[bytes]":
    """Run ``module`` with this interpreter's packages. The thread that calls must outlive the process."""
    # Not a multiprocessing.Process: that would import the main module again, which may be anybody's script.
    return subprocess.Popen(  # noqa: S603 - nothing in it comes from a request
        [sys.executable, "-P", "-m", module, *arguments],
        pass_fds=list(descriptors),
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def detach(niceness: int) -> None:
    """Die with the process that started this one, leave Ctrl-C to the engine, and keep its terminal clean."""
    os.nice(niceness)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
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

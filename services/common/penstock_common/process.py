"""Process utilities: names in ``ps`` and ``top``, CPU cores, and child processes that end when their service ends."""

import ctypes
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import setproctitle


def name_process(service: str, name: str = "") -> None:
    """Show the process as ``penstock-<service> <name>`` in ``ps`` and ``top``."""
    setproctitle.setproctitle(f"penstock-{service} {name}".rstrip())


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process in seconds, or 0 if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    fields = text.rpartition(")")[2].split()  # skip the process name, because it may contain spaces
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(cpu_max: Path = _CPU_MAX) -> int:
    """Return the number of CPU cores that the process may use. In a container, its CPU limit applies, rounded up.

    Args:
        cpu_max: File with the CPU limit of the control group (version 2). Its two words are the allowed microseconds
            per period, or ``max``, and the period. Without this file, there is no limit.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


# Child processes of services. A child process ends when its service ends.

_PR_SET_PDEATHSIG = 1


def start_python(
    module: str, arguments: Sequence[str], descriptors: Sequence[int], environ: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Run ``module`` in a child process with this interpreter's packages. The process ends when the calling thread
    ends.

    ``environ`` is the environment of the process, or None for the environment of this process.
    """
    # Not multiprocessing.Process: it would import the main module again, which may be any user script.
    return subprocess.Popen(  # noqa: S603 - no argument comes from a request
        [sys.executable, "-P", "-m", module, *arguments],
        pass_fds=list(descriptors),
        stdin=subprocess.DEVNULL,
        env={**(os.environ if environ is None else environ), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def run_script(file: Path, given: bytes, timeout: float) -> "subprocess.CompletedProcess[bytes]":
    """Run a Python program that needs only the standard library. Return its exit code and standard output.

    The program starts several times faster than with ``start_python``, because Python ignores site-packages and its
    environment variables. Ctrl-C does not reach the program. The program may outlive this process, so the program must
    limit its own run time.

    Args:
        file: The program.
        given: Standard input of the program.
        timeout: Seconds after which the program is killed.

    Raises:
        OSError: The program could not be started.
        subprocess.TimeoutExpired: The program was killed after ``timeout``.
    """
    return subprocess.run(  # noqa: S603 - request data is passed only on standard input
        [sys.executable, "-I", "-S", "-W", "ignore", str(file)],
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=timeout,
        process_group=0,
        check=False,
    )


def end_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_memory(beyond: int) -> None:
    """Allow this process only ``beyond`` bytes of memory more than it uses now. Forbid writing files and core dumps."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:
        limit_resource(resource.RLIMIT_AS, pages * resource.getpagesize() + beyond)
    limit_resource(resource.RLIMIT_CORE, 0)
    limit_resource(resource.RLIMIT_FSIZE, 0)


def limit_resource(kind: int, soft: int) -> None:
    """Set a soft resource limit of this process, at most to the hard limit. ``kind`` is one of ``resource.RLIMIT_*``."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))

"""Processes of services: names in ``ps`` and ``top``, cores they may use, and child processes that end with their service."""

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
    """Show the process as ``penstock-<service> <name>``: an engine among a dozen python processes is hard to find."""
    setproctitle.setproctitle(f"penstock-{service} {name}".rstrip())


def cpu_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process, in seconds; 0 once it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    fields = text.rpartition(")")[2].split()  # behind its name, which may hold spaces
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# How many cores this process may use.

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(cpu_max: Path = _CPU_MAX) -> int:
    """Cores that the process may run on, and no more than a container's CPU limit allows, rounded up.

    ``cpu_max``: the limit as control groups (version 2) tell it, ``"max 100000"`` or microseconds per period; where it is not
    there, nothing limits.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


# Child processes of services: how they are started, and that they end with their service.

_PR_SET_PDEATHSIG = 1


def start_python(
    module: str, arguments: Sequence[str], descriptors: Sequence[int], environ: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Run ``module`` with this interpreter's packages. The thread that calls must outlive the process. ``environ``: its
    environment; None: this process's.
    """
    # Not a multiprocessing.Process: that would import the main module again, which may be anybody's script.
    return subprocess.Popen(  # noqa: S603 - nothing in it comes from a request
        [sys.executable, "-P", "-m", module, *arguments],
        pass_fds=list(descriptors),
        stdin=subprocess.DEVNULL,
        env={**(os.environ if environ is None else environ), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def run_script(file: Path, given: bytes, timeout: float) -> "subprocess.CompletedProcess[bytes]":
    """Run a Python program that needs only the standard library, and return its exit code and standard output.

    It starts several times faster than a module of ``start_python``, since neither site-packages nor the environment's settings
    of Python are read. Ctrl-C does not reach it. The program must bound the time that it runs: it does not end with this process.

    Args:
        file: The program.
        given: Its standard input.
        timeout: Seconds after which it is killed.

    Raises:
        OSError: It could not be started.
        subprocess.TimeoutExpired: It was killed.
    """
    return subprocess.run(  # noqa: S603 - what comes from a request is data on standard input
        [sys.executable, "-I", "-S", "-W", "ignore", str(file)],
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=timeout,
        process_group=0,
        check=False,
    )


def end_with_parent() -> None:
    """Be killed when the thread that started this process ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_memory(beyond: int) -> None:
    """Let this process ask for ``beyond`` bytes more than it has, and write no file and no core dump."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    if pages:
        limit_resource(resource.RLIMIT_AS, pages * resource.getpagesize() + beyond)
    limit_resource(resource.RLIMIT_CORE, 0)
    limit_resource(resource.RLIMIT_FSIZE, 0)


def limit_resource(kind: int, soft: int) -> None:
    """Set a limit of this process, at most to its hard limit. ``kind``: one of ``resource.RLIMIT_*``."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))

"""Child processes of services: how they are started, and that they end with their service."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

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

"""Child processes of services: how they are started, and that they end with their service."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

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


def end_with_parent() -> None:
    """Be killed when the thread that started this process ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

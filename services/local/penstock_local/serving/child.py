"""Wrapper that starts every child process: it ties the process to its parent, then runs the service.

``python -m penstock_local.serving.child PARENT_PID MODULE [ARGUMENT ...]`` runs MODULE like ``python -m MODULE``. A
parent that is killed with SIGKILL cannot stop its children. So on Linux the kernel kills the children
(``prctl(PR_SET_PDEATHSIG)``). The wrapper calls prctl in the child, so that no code runs between fork and exec in a
copy of a threaded process.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies. Does nothing on systems other than Linux."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit("the parent process is gone")


def main() -> None:
    """Bind this process to its parent and run the module."""
    parent_pid, module, *arguments = sys.argv[1:]
    end_with_parent(int(parent_pid))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

"""Ports for the services of tests, which may run concurrently."""

import fcntl
import os
import random
import tempfile
from pathlib import Path

from penstock_local.serving.machine_resources import LOOPBACK, why_taken

_PORTS = range(10_000, 20_000)
"""Ports outside the range that Linux uses for outgoing connections, which could take the port of a stopped service, and
outside the range of ``penstock serve``.
"""
_taken = os.open(Path(tempfile.gettempdir(), f"penstock-test-ports-{os.getuid()}"), os.O_WRONLY | os.O_CREAT, 0o600)
_untried = iter(random.sample(_PORTS, len(_PORTS)))


def free_port() -> int:
    """Return a free port of the loopback interface. No other test on this machine gets it before this process ends,
    even while its service is stopped.
    """
    return next(port for port in _untried if take(port) and why_taken(LOOPBACK, port) is None)


def take(port: int) -> bool:
    """Reserve the port for this process until it ends, and return whether that succeeded. The reservation is a lock on
    one byte of a file that all tests share.
    """
    try:
        fcntl.lockf(_taken, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except (BlockingIOError, PermissionError):
        return False
    return True

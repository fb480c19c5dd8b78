"""Ports for the services of tests, of which several run at once."""

import fcntl
import os
import random
import tempfile
from pathlib import Path

from penstock_local.serving.machine_resources import LOOPBACK, why_taken

_PORTS = range(10_000, 20_000)
"""Neither those that Linux gives to connections, any of which could take the port of a service that is down for a moment, nor
those that ``penstock serve`` chooses from.
"""
_taken = os.open(Path(tempfile.gettempdir(), f"penstock-test-ports-{os.getuid()}"), os.O_WRONLY | os.O_CREAT, 0o600)
_untried = iter(random.sample(_PORTS, len(_PORTS)))


def free_port() -> int:
    """A port of the loopback interface that nobody listens on. No other test on this machine gets it before this process has
    ended: not while the service that it is for is down either.
    """
    return next(port for port in _untried if take(port) and why_taken(LOOPBACK, port) is None)


def take(port: int) -> bool:
    """Whether no other process has taken the port; this one has it then until it ends: a lock on the byte of that number, in a
    file that all share.
    """
    try:
        fcntl.lockf(_taken, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except (BlockingIOError, PermissionError):
        return False
    return True

"""Ports for the services of tests, of which several run at once."""

import itertools
import os
import random

from penstock_local.ports import LOOPBACK, why_taken

_PORTS = range(10_000, 20_000)
"""Neither those that Linux gives to connections, any of which could take the port of a service that is down for a moment, nor
those that ``penstock serve`` chooses from.
"""
_LANES = 16


def lane(worker: str) -> list[int]:
    """The ports of one process that runs tests: no other one has them. ``worker``: as pytest names it, empty for the only one."""
    number = int(worker.removeprefix("gw") or 0) % _LANES
    return [*_PORTS[number::_LANES]]


def _shuffled() -> list[int]:
    ports = lane(os.environ.get("PYTEST_XDIST_WORKER", ""))
    random.Random(os.getpid()).shuffle(ports)  # for those who run tests twice on one machine
    return ports


_ours = itertools.cycle(_shuffled())


def free_port() -> int:
    """A port of the loopback interface that nobody listens on, and that no other test will get for a long time."""
    return next(port for port in _ours if why_taken(LOOPBACK, port) is None)

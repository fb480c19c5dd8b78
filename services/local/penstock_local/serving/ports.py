"""TCP ports of this machine: which are free, and whether one can be listened on."""

import contextlib
import os
import random
import socket
from collections.abc import Collection

from penstock_common.errors import ConfigError

LOOPBACK = "127.0.0.1"
_INTERNAL_PORTS = range(20_000, 32_000)


def free_ports(count: int, *, but: Collection[int] = ()) -> list[int]:
    """``count`` different ports of the loopback interface that nothing listens on, none of them in ``but``.

    They come from below the range that Linux gives to outgoing connections (32768 and up), any of which could otherwise
    take one before the service it is meant for listens on it.
    """
    ports: list[int] = []
    for port in random.sample(_INTERNAL_PORTS, len(_INTERNAL_PORTS)):
        if len(ports) == count:
            break
        if port not in but and why_taken(LOOPBACK, port) is None:
            ports.append(port)
    return ports


def check_host(host: str) -> None:
    """Raise ConfigError if nothing on this machine can listen on ``host``."""
    if (problem := why_taken(host, 0)) is not None:
        raise ConfigError(
            f"--host is {host!r}, on which nothing can listen here: {problem}; give an address of this machine, 127.0.0.1 for "
            "this machine's programs alone or 0.0.0.0 for every network"
        )


def check_free(host: str, port: int, *, flag: str) -> None:
    """Raise ConfigError, with ``flag`` as the way out, when ``host:port`` cannot be listened on."""
    if (problem := why_taken(host, port)) is not None:
        raise ConfigError(
            f"port {port} on {host} cannot be used: {problem}; "
            f"stop the program that has it, or choose another with {flag} PORT"
        )


def why_taken(host: str, port: int) -> str | None:
    """Why nothing can listen on ``host:port``; None when something can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as e:
        return (e.strerror or str(e)).lower()
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        # As a server does it: a port that is only waiting out the end of old connections counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as e:
            return os.strerror(e.errno or 0).lower()
    return None

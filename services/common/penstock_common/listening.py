"""What every listener binds to, and says at its start."""

import ipaddress
import socket
from typing import Any

from penstock_common.observability.logging import get_logger


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on ``host``."""
    if host == "localhost" or host.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """The family and the address of a socket that listens on ``host``. ``::`` is every address of IPv4 and IPv6, and of IPv4
    alone where the kernel has no IPv6. Raises OSError when ``host`` is no interface of this machine.
    """
    bare = host.removeprefix("[").removesuffix("]")
    if bare == "::" and not _has_ipv6():
        bare = "0.0.0.0"
    family, _, _, _, address = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0]
    return family, address


def take_both_families(listener: socket.socket) -> None:
    """Have a socket on ``::`` take connections of IPv4 as well, whatever the system's default is. Before it is bound."""
    if listener.family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)


def _has_ipv6() -> bool:
    try:
        socket.socket(socket.AF_INET6, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True


def warn_of_plaintext(host: str, *, field: str, reads: bool = False) -> None:
    """Say that a listener without TLS can be reached from elsewhere. ``field``: what the configuration calls it; ``reads``: it is
    for reading alone.
    """
    if is_loopback(host):
        return
    can = "read" if reads else "read, change and send"
    get_logger().warning(
        f"{field} listens without TLS: whoever reaches {host} can {can} what it serves; "
        f"set {field}.tls.certificate, {field}.tls.key and {field}.tls.ca, or {field}.host to 127.0.0.1",
        host=host,
    )

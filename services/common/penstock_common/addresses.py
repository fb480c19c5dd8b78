"""Addresses as ``host:port``, and helpers for the sockets of listeners."""

import ipaddress
import socket
from typing import Any

from penstock_common.observability.logging import get_logger

MAX_PORT = 65_535


def with_port(host: str, port: int) -> str:
    """Return ``host`` and ``port`` joined to one address. ``host`` is a name, or an IP address with or without
    brackets.
    """
    return f"[{host}]:{port}" if _is_ipv6(host) else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """Return the host of ``address``, without brackets, and the port. Raises ValueError, whose text states the required
    form of an address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= MAX_PORT:
        raise ValueError(f"must be host:port, with a port from 1 to {MAX_PORT}")
    if host.startswith("[") and host.endswith("]") and _is_ipv6(host[1:-1]):
        return host[1:-1], int(port)
    if ":" in host or "[" in host or "]" in host:
        raise ValueError(f"must have an IPv6 host in brackets, such as [fd00::7]:{port}")
    return host, int(port)


def with_default_port(address: str, port: int) -> str:
    """Return ``address``, with ``port`` added if ``address`` is only a host. The host may be an IPv6 address without
    brackets. Raises ValueError, whose text states the required form of an address.
    """
    bare = address[1:-1] if address.startswith("[") and address.endswith("]") else address
    if _is_ipv6(bare):
        return with_port(bare, port)
    if ":" not in address:
        address = with_port(address, port)
    split(address)
    return address


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a listener on ``host``."""
    if host == "localhost" or host.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Return the family and address of a listening socket on ``host``.

    ``::`` means all IPv4 and IPv6 addresses, or all IPv4 addresses if the kernel has no IPv6. Raises OSError if
    ``host`` is not an address of this machine.
    """
    bare = host.removeprefix("[").removesuffix("]")
    if bare == "::" and not _has_ipv6():
        bare = "0.0.0.0"
    family, _, _, _, address = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0]
    return family, address


def take_both_families(listener: socket.socket) -> None:
    """Make a socket on ``::`` also accept IPv4 connections, regardless of the system's default. Call this function
    before the socket is bound.
    """
    if listener.family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)


def _has_ipv6() -> bool:
    try:
        socket.socket(socket.AF_INET6, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True


def warn_of_plaintext(host: str, *, field: str, reads: bool = False) -> None:
    """Log a warning if other machines can reach a listener without TLS.

    ``field`` is the listener's settings section. ``reads`` is True if clients of the listener can only read data.
    """
    if is_loopback(host):
        return
    can = "read" if reads else "read, change and send"
    get_logger().warning(
        f"{field} listens without TLS, so anyone who can reach {host} can {can} the data; "
        f"set {field}.tls.certificate, {field}.tls.key and {field}.tls.ca, or {field}.host to 127.0.0.1",
        host=host,
    )

"""Addresses as ``host:port``, in which an IPv6 host stands in brackets: ``[fd00::7]:50052``."""

import ipaddress

MAX_PORT = 65_535


def with_port(host: str, port: int) -> str:
    """``host`` and ``port`` as one address. ``host`` may be a name or an IP address, in brackets or not."""
    return f"[{host}]:{port}" if _is_ipv6(host) else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """The host of ``address``, without brackets, and its port. Raises ValueError, which says what an address must be."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= MAX_PORT:
        raise ValueError(f"must be host:port, with a port from 1 to {MAX_PORT}")
    if host.startswith("[") and host.endswith("]") and _is_ipv6(host[1:-1]):
        return host[1:-1], int(port)
    if ":" in host or "[" in host or "]" in host:
        raise ValueError(f"must have an IPv6 host in brackets, as [fd00::7]:{port}")
    return host, int(port)


def with_default_port(address: str, port: int) -> str:
    """``address`` with ``port`` where it names a host alone, an IPv6 address without brackets among them. Raises ValueError,
    which says what an address must be.
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

"""What every listener says at its start."""

import ipaddress

from penstock_common.observability.logging import get_logger


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener on ``host``."""
    if host == "localhost" or host.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


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

"""Where the workers of several nodes find each other, and at which addresses."""

import socket

from penstock_common import addresses
from penstock_common.errors import ConfigError
from penstock_common.security.shared_secret import SharedSecret, check_internal_port, load_secret
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.parallel.meeting_server import MeetingServer

_ANYWHERE = ("", "0.0.0.0", "::")


def meeting_place(address: str, secret: SharedSecret | None) -> MeetingServer:
    """A store at a free port of that IP address, which processes of other hosts that know the secret reach until it is closed.
    Raises ConfigError where this host has no such address.
    """
    try:
        return MeetingServer(address, secret)
    except OSError as e:
        raise ConfigError(f"cannot bind to executor.nodes.address {address!r}: {e}") from None


def secret_of(config: EngineCoreConfig, address: str) -> SharedSecret | None:
    """Return the secret by which the stages of all nodes recognize each other. ``address``: where those of this one listen.
    Raises ConfigError where there is none and others can reach the address, and where its file is wrong.
    """
    secret = load_secret(config.parallel.secret_file)
    check_internal_port(address, field="executor.nodes.address", has_secret=secret is not None)
    return secret


def own_address(configured: str, host: str) -> str:
    """The IP address at which other nodes reach the engine's. ``host``: what its server listens on. Raises ConfigError."""
    if configured or host not in _ANYWHERE:
        return configured or host
    name = socket.getfqdn()
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as e:
        raise ConfigError(
            f"executor.nodes.address is empty, and this host's name, {name}, stands for no address: {e}; set it to the IP "
            "address at which the other nodes reach this one"
        ) from None


def address_towards(leader: str, port: int) -> str:
    """The IP address from which this host reaches the engine's. Raises ConfigError."""
    host, number = addresses.split(addresses.with_default_port(leader, port))
    try:
        family, _, _, _, there = socket.getaddrinfo(host, number, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(there)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as e:
        raise ConfigError(f"executor.nodes.leader is {leader!r}, which cannot be reached: {e}") from None

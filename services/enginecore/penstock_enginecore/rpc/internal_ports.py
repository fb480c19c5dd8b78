"""The shared secret of an engine's internal gRPC ports: the port of its nodes, and the port of blocks."""

from penstock_common.rpc.port_secret import PortSecret
from penstock_common.security.shared_secret import check_internal_port, load_secret
from penstock_enginecore.config import EngineCoreConfig


def own_secret(config: EngineCoreConfig, purpose: str) -> PortSecret | None:
    """Return the secret of the port ``purpose``, or None if there is none. Raises ConfigError if it cannot be read."""
    secret = load_secret(config.parallel.secret_file)
    return None if secret is None else PortSecret(secret, purpose)


def checked_secret(config: EngineCoreConfig, purpose: str) -> PortSecret | None:
    """Return the secret of the port ``purpose``, which is about to listen on ``server.host``, or None if there is none.

    Raises ConfigError if the secret cannot be read, or if other machines can reach the port and neither the secret nor
    certificates of clients tell who calls.
    """
    secret = own_secret(config, purpose)
    check_internal_port(
        config.server.host,
        field="server.host",
        has_secret=secret is not None,
        tls=bool(config.server.tls.ca),
        tls_field="server.tls.ca",
    )
    return secret

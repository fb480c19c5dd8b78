"""A channel to a Penstock server: balancing, health, retries, keepalive, TLS, and a key in the metadata."""

from importlib import resources
from pathlib import Path

import grpc

SERVICE_CONFIG = resources.files("penstock").joinpath("service_config.json").read_text()
"""Calls go in turn to all addresses that the name has, but not to a frontend that leaves. One that failed before anything of
its answer came is tried again, on the next address."""
OPTIONS = [
    ("grpc.service_config", SERVICE_CONFIG),
    ("grpc.keepalive_time_ms", 30_000),  # a server that vanished is noticed after 40 s, also in a silent stream
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # and one that hangs, which is a minute otherwise
    ("grpc.http2.max_pings_without_data", 0),  # however long it is silent
    ("grpc.dns_min_time_between_resolutions_ms", 5_000),  # new addresses are found sooner than after 30 s
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),  # 4 MiB are too few for long log-probabilities
]


def credentials(ca: str = "") -> grpc.ChannelCredentials:
    """TLS that trusts the certificates in the file ``ca``, or those that gRPC brings along."""
    return grpc.ssl_channel_credentials(Path(ca).read_bytes() if ca else None)


def connect(address: str, tls: grpc.ChannelCredentials | None = None) -> grpc.Channel:
    """A channel to host:port, or to ``dns:///host:port``; not encrypted without ``tls``."""
    if tls is None:
        return grpc.insecure_channel(address, options=OPTIONS)
    return grpc.secure_channel(address, tls, options=OPTIONS)


def connect_aio(address: str, tls: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """The same for asyncio."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=OPTIONS)
    return grpc.aio.secure_channel(address, tls, options=OPTIONS)


def authorization(key: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call with an API key."""
    return (("authorization", f"Bearer {key}"),) if key else ()

"""The sections that the configurations of several services have."""

import re
from typing import Literal

import msgspec

from penstock_common.config.checks import ByteSize, check_range, check_reuse_port, require
from penstock_common.errors import ConfigError


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of a listener; off while ``certificate`` is empty. Paths of PEM files, which are read anew when they change.

    ``certificate``: the listener's own, with the intermediate ones after it, and its ``key``. ``ca``: clients must show a
    certificate that one of these authorities issued; empty: clients need none.
    """

    certificate: str = ""
    key: str = ""
    ca: str = ""

    def __post_init__(self) -> None:
        _check_pair(self.certificate, self.key)
        if self.ca and not self.certificate:
            raise ConfigError(f"tls.ca is {self.ca!r}; it asks clients for certificates, which needs tls.certificate")

    @property
    def enabled(self) -> bool:
        """Whether the listener speaks TLS, and nothing else."""
        return bool(self.certificate)


class ClientTlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of connections to another service; off while ``ca`` is empty. Paths of PEM files, which are read anew when they
    change.

    ``ca``: authorities that may have issued the server's certificate. ``certificate`` and ``key``: what this service shows of
    itself. ``server_name``: the name that the server's certificate must have; empty: the host that is connected to.
    """

    ca: str = ""
    certificate: str = ""
    key: str = ""
    server_name: str = ""

    def __post_init__(self) -> None:
        _check_pair(self.certificate, self.key)
        if (self.certificate or self.server_name) and not self.ca:
            raise ConfigError("tls.ca is required: without it the server's certificate cannot be checked")

    @property
    def enabled(self) -> bool:
        """Whether to connect with TLS."""
        return bool(self.ca)


def _check_pair(certificate: str, key: str) -> None:
    if certificate and not key:
        raise ConfigError("tls.key is required: tls.certificate is set")
    if key and not certificate:
        raise ConfigError("tls.certificate is required: tls.key is set")


class PeersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is who, where listeners ask for certificates: the DNS names and URIs of subjects (SAN) that make a peer a frontend, an
    engine or an operator. Certificates' other names and their common names count for nothing.
    """

    frontends: tuple[str, ...] = ("penstock-frontend",)
    engines: tuple[str, ...] = ("penstock-enginecore",)
    operators: tuple[str, ...] = ("penstock-operator",)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A gRPC listener. ``max_message_bytes`` bounds a message, ``max_concurrent_streams`` the calls of a connection.

    ``health_port``: another port of the same host with ``grpc.health.v1`` alone, without TLS, for probes that know none;
    -1 for none. ``reuse_port``: other processes that say so too may listen on ``port`` beside this one, and the system shares the
    connections out; otherwise a port that is taken is refused.
    """

    host: str = "0.0.0.0"
    port: int = 0
    max_message_bytes: ByteSize = 64 * 1024 * 1024
    max_concurrent_streams: int = 10_000
    health_port: int = -1
    reuse_port: bool = False
    tls: TlsConfig = TlsConfig()

    def __post_init__(self) -> None:
        require("server.host", self.host)
        check_reuse_port("server.reuse_port", self.reuse_port)
        check_range("server.port", self.port, low=0, high=65_535)
        check_range("server.health_port", self.health_port, low=-1, high=65_535)
        check_range("server.max_message_bytes", self.max_message_bytes, low=64 * 1024, high=2**31 - 1)
        check_range("server.max_concurrent_streams", self.max_concurrent_streams, low=1)


class MetricsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Prometheus endpoint ``/metrics``. Port -1 switches it off."""

    host: str = "0.0.0.0"
    port: int = -1
    tls: TlsConfig = TlsConfig()

    def __post_init__(self) -> None:
        check_range("metrics.port", self.port, low=-1, high=65_535)


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``format`` text is for people at a terminal, json for collectors.

    ``requests``: a line for every request that ends, at level info; engines write one for those that fail. ``prompts``: that
    line also has what users wrote and what the model answered. Both mean nothing to the coordinator.
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    requests: bool = False
    prompts: bool = False

    def __post_init__(self) -> None:
        if self.prompts and not self.requests:
            raise ConfigError("log.prompts is true; it adds to the lines of log.requests, which must be true as well")


class TracingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenTelemetry traces. ``endpoint``: where an OTLP collector listens for gRPC, ``host:port`` or a URL; empty: no traces.

    ``sample_ratio``: fraction of the requests traced, of those that come without a trace context; the others follow their
    caller's decision. ``service_name``: name of the service in traces; empty: penstock-frontend, penstock-enginecore or
    penstock-coordinator.
    """

    endpoint: str = ""
    sample_ratio: float = 1.0
    service_name: str = ""

    def __post_init__(self) -> None:
        check_range("tracing.sample_ratio", self.sample_ratio, low=0.0, high=1.0)
        if self.endpoint and not re.fullmatch(r"(https?://)?(\[[0-9a-fA-F:.]+\]|[^\s/:@]+):\d{1,5}/?", self.endpoint):
            raise ConfigError(f"tracing.endpoint is {self.endpoint!r}; it must be host:port or http(s)://host:port")

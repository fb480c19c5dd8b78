"""The sections that the configurations of several services have."""

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.allowed_hosts import AllowedHosts
from penstock_common.config.checks import check_fields, check_reuse_port
from penstock_common.config.settings import ByteSize
from penstock_common.errors import ConfigError

ReconnectMax = Annotated[float, Meta(ge=0.05, le=300, description="Seconds between two attempts to connect, at most.")]
"""Of the coordinator's clients, each with a default of its own."""


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of a listener; off while ``certificate`` is empty. PEM files are read anew when they change."""

    certificate: Annotated[
        str, Meta(description="Path of the listener's certificate (PEM), with the intermediate ones after it.")
    ] = ""
    key: Annotated[str, Meta(description="Path of the certificate's key (PEM).")] = ""
    ca: Annotated[
        str,
        Meta(
            description="Path of authorities (PEM): clients must show a certificate that one of them issued; empty: clients "
            "need none."
        ),
    ] = ""

    def __post_init__(self) -> None:
        _check_pair(self.certificate, self.key)
        if self.ca and not self.certificate:
            raise ConfigError(f"tls.ca is {self.ca!r}; it asks clients for certificates, which needs tls.certificate")

    @property
    def enabled(self) -> bool:
        """Whether the listener speaks TLS, and nothing else."""
        return bool(self.certificate)


class ClientTlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of connections to another service; off while ``ca`` is empty. PEM files are read anew when they change."""

    ca: Annotated[
        str, Meta(description="Path of the authorities (PEM) that may have issued the server's certificate.")
    ] = ""
    certificate: Annotated[str, Meta(description="Path of the certificate (PEM) that this service shows.")] = ""
    key: Annotated[str, Meta(description="Path of the certificate's key (PEM).")] = ""
    server_name: Annotated[
        str,
        Meta(description="Name that the server's certificate must have; empty: the host that is connected to."),
    ] = ""

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
    """Who is who, where listeners ask for certificates: by the DNS names and URIs of their subjects (SAN). Certificates' other
    names and their common names count for nothing.
    """

    frontends: Annotated[tuple[str, ...], Meta(description="Names in certificates of frontends.")] = (
        "penstock-frontend",
    )
    engines: Annotated[tuple[str, ...], Meta(description="Names in certificates of engines.")] = (
        "penstock-enginecore",
    )
    operators: Annotated[tuple[str, ...], Meta(description="Names in certificates of operators.")] = (
        "penstock-operator",
    )
    scalers: Annotated[
        tuple[str, ...], Meta(description="Names in certificates of autoscalers, which ask the coordinator alone.")
    ] = ("penstock-scaler",)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A gRPC listener."""

    host: Annotated[str, Meta(min_length=1, description="Interface to listen on.")] = "0.0.0.0"
    port: Annotated[int, Meta(ge=0, le=65_535, description="Port to listen on; 0: one that is free.")] = 0
    max_message_bytes: Annotated[
        ByteSize, Meta(ge=64 * 1024, le=2**31 - 1, description="Bytes of a message, either way.")
    ] = 64 * 1024 * 1024
    max_concurrent_streams: Annotated[int, Meta(ge=1, description="Calls of one connection at once.")] = 10_000
    health_port: Annotated[
        int,
        Meta(
            ge=-1,
            le=65_535,
            description="Another port of the host with grpc.health.v1 alone, without TLS, for probes that know none; -1: none.",
        ),
    ] = -1
    reuse_port: Annotated[
        bool,
        Meta(
            description="Other processes that say so too may listen on the port beside this one, and the system shares the "
            "connections out; false: a port that is taken is refused."
        ),
    ] = False
    max_connection_age: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="Seconds, up to a tenth more or less, after which a connection's client is asked to open another one "
            "(GOAWAY); calls that run there go on. 0: connections may last, and a frontend that stops does not wait for them.",
        ),
    ] = 0.0
    tls: TlsConfig = TlsConfig()

    def __post_init__(self) -> None:
        check_fields("server", self)
        check_reuse_port("server.reuse_port", self.reuse_port)


class MetricsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Prometheus endpoint ``/metrics``, on a port of its own."""

    host: Annotated[str, Meta(description="Interface to listen on.")] = "0.0.0.0"
    port: Annotated[int, Meta(ge=-1, le=65_535, description="Port to listen on; 0: one that is free; -1: none.")] = -1
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Names in the Host header under which scrapers may call, beside localhost, loopback addresses and "
            "metrics.host: metrics.example.org, *.example.org (every name below it), 10.0.0.0/8 (a network), or * for any. "
            "Other calls are refused with 421. Empty: any, except where metrics.host is a loopback address."
        ),
    ] = ()
    tls: TlsConfig = TlsConfig()

    def __post_init__(self) -> None:
        check_fields("metrics", self)
        AllowedHosts(self.allowed_hosts, field="metrics.allowed_hosts")


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The log, on standard error. ``requests`` and ``prompts`` mean nothing to the coordinator."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="Least level that is logged.")] = (
        "info"
    )
    format: Annotated[
        Literal["text", "json"], Meta(description="text for people at a terminal, json for collectors.")
    ] = "text"
    requests: Annotated[
        bool,
        Meta(description="A line for every request that ends, at level info; engines write one for those that fail."),
    ] = False
    prompts: Annotated[
        bool,
        Meta(description="These lines also have what users wrote and what the model answered; needs log.requests."),
    ] = False

    def __post_init__(self) -> None:
        check_fields("log", self)
        if self.prompts and not self.requests:
            raise ConfigError("log.prompts is true; it adds to the lines of log.requests, which must be true as well")


class TracingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenTelemetry traces."""

    endpoint: Annotated[
        str,
        Meta(description="Where an OTLP collector listens for gRPC, host:port or a URL; empty: no traces."),
    ] = ""
    sample_ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Fraction traced of the requests that come without a trace context; the others follow their caller's "
            "decision.",
        ),
    ] = 1.0
    service_name: Annotated[
        str,
        Meta(
            description="Name of the service in traces; empty: penstock-frontend, penstock-enginecore or "
            "penstock-coordinator."
        ),
    ] = ""

    def __post_init__(self) -> None:
        check_fields("tracing", self)
        if self.endpoint and not re.fullmatch(r"(https?://)?(\[[0-9a-fA-F:.]+\]|[^\s/:@]+):\d{1,5}/?", self.endpoint):
            raise ConfigError(f"tracing.endpoint is {self.endpoint!r}; it must be host:port or http(s)://host:port")

"""Configuration sections that several services have in common."""

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.allowed_hosts import AllowedHosts
from penstock_common.config.checks import check_fields, check_reuse_port
from penstock_common.config.settings import ByteSize
from penstock_common.errors import ConfigError

ReconnectMax = Annotated[float, Meta(ge=0.05, le=300, description="Maximum seconds between two connection attempts.")]
"""Type of the setting ``reconnect_max`` of the services that connect to the coordinator. Each service has its own
default.
"""


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS for a listener. TLS is off if ``certificate`` is empty. The service reloads changed PEM files."""

    certificate: Annotated[
        str, Meta(description="PEM file with the listener's certificate, followed by intermediate certificates.")
    ] = ""
    key: Annotated[str, Meta(description="PEM file with the private key of the certificate.")] = ""
    ca: Annotated[
        str,
        Meta(
            description=(
                "PEM file with CA certificates. If set, each client must present a certificate that one of these CAs "
                "issued. Empty: clients need no certificate."
            )
        ),
    ] = ""

    def __post_init__(self) -> None:
        _check_pair(self.certificate, self.key)
        if self.ca and not self.certificate:
            raise ConfigError(
                f"tls.ca is {self.ca!r}, but tls.certificate is empty; set tls.certificate, or leave tls.ca empty"
            )

    @property
    def enabled(self) -> bool:
        """Whether the listener uses TLS. If so, the listener refuses connections without TLS."""
        return bool(self.certificate)


class ClientTlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS for connections to another service. TLS is off if ``ca`` is empty. The service reloads changed PEM files."""

    ca: Annotated[str, Meta(description="PEM file with the CA certificates that verify the server's certificate.")] = ""
    certificate: Annotated[
        str, Meta(description=("PEM file with the certificate that this service presents as a client."))
    ] = ""
    key: Annotated[str, Meta(description="PEM file with the private key of the certificate.")] = ""
    server_name: Annotated[
        str,
        Meta(
            description=(
                "Name that the server's certificate must contain. Empty: the host to which the service connects."
            )
        ),
    ] = ""

    def __post_init__(self) -> None:
        _check_pair(self.certificate, self.key)
        if (self.certificate or self.server_name) and not self.ca:
            raise ConfigError("tls.ca is required: without a CA file, the server's certificate cannot be checked")

    @property
    def enabled(self) -> bool:
        """Whether to connect with TLS."""
        return bool(self.ca)


def _check_pair(certificate: str, key: str) -> None:
    if certificate and not key:
        raise ConfigError("tls.certificate is set, but tls.key is empty; set both or neither")
    if key and not certificate:
        raise ConfigError("tls.key is set, but tls.certificate is empty; set both or neither")


class PeersConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names of peers, for listeners that require certificates: the DNS names and URIs in a certificate's subject
    alternative names (SAN). Other names in certificates, including common names, are ignored.
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
        tuple[str, ...], Meta(description="Names in certificates of autoscalers, which may only call the coordinator.")
    ] = ("penstock-scaler",)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A gRPC listener."""

    host: Annotated[str, Meta(min_length=1, description="Interface to listen on.")] = "0.0.0.0"
    port: Annotated[int, Meta(ge=0, le=65_535, description="Port to listen on; 0: any free port.")] = 0
    max_message_bytes: Annotated[
        ByteSize, Meta(ge=64 * 1024, le=2**31 - 1, description="Maximum size of a message in either direction.")
    ] = 64 * 1024 * 1024
    max_concurrent_streams: Annotated[
        int, Meta(ge=1, description=("Maximum number of concurrent calls on one connection."))
    ] = 10_000
    health_port: Annotated[
        int,
        Meta(
            ge=-1,
            le=65_535,
            description=(
                "Additional port that serves only grpc.health.v1, always without TLS, for probes that do not support "
                "TLS. -1: no such port."
            ),
        ),
    ] = -1
    reuse_port: Annotated[
        bool,
        Meta(
            description=(
                "Share the port with other processes that also set this; the operating system distributes the "
                "connections. false: a port in use is an error."
            )
        ),
    ] = False
    max_connection_age: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description=(
                "Seconds, plus or minus a tenth, after which the server asks a client to open a new connection "
                "(GOAWAY). Running calls complete on the old connection. 0: connections have no maximum age, and a "
                "stopping frontend does not wait until they close."
            ),
        ),
    ] = 0.0
    tls: TlsConfig = TlsConfig()

    def __post_init__(self) -> None:
        check_fields("server", self)
        check_reuse_port("server.reuse_port", self.reuse_port)


class MetricsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Prometheus endpoint ``/metrics``, on a separate port."""

    host: Annotated[str, Meta(description="Interface to listen on.")] = "0.0.0.0"
    port: Annotated[int, Meta(ge=-1, le=65_535, description="Port to listen on; 0: any free port; -1: none.")] = -1
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "Host header values that scrapers may use, in addition to localhost, loopback addresses and "
                "metrics.host: metrics.example.org, *.example.org (all subdomains), 10.0.0.0/8 (a network), or * for "
                "any. Other calls are refused with 421. Empty: any, unless metrics.host is a loopback address."
            )
        ),
    ] = ()
    tls: TlsConfig = TlsConfig()

    def __post_init__(self) -> None:
        check_fields("metrics", self)
        AllowedHosts(self.allowed_hosts, field="metrics.allowed_hosts")


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The log, on standard error. The coordinator ignores ``requests`` and ``prompts``."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Minimum level that is logged.")
    ] = "info"
    format: Annotated[Literal["text", "json"], Meta(description="text for terminals, json for log collectors.")] = (
        "text"
    )
    requests: Annotated[
        bool,
        Meta(description="Log one line at level info for every finished request. Engines log only failed requests."),
    ] = False
    prompts: Annotated[
        bool,
        Meta(description="Include prompts and outputs in the lines of log.requests."),
    ] = False

    def __post_init__(self) -> None:
        check_fields("log", self)
        if self.prompts and not self.requests:
            raise ConfigError(
                "log.prompts is true, but log.requests is false; set log.requests to true, or log.prompts to false"
            )


class TracingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenTelemetry traces."""

    endpoint: Annotated[
        str,
        Meta(description="Address of an OTLP collector's gRPC port, host:port or a URL; empty: no traces."),
    ] = ""
    sample_ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description=(
                "Fraction of requests to trace, among requests without a trace context. If a request has a trace "
                "context, the caller's sampling decision applies."
            ),
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

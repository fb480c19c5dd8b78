"""Settings of the HTTP listener."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.allowed_hosts import AllowedHosts, AllowedOrigins
from penstock_common.config.checks import check_fields, check_range, check_reuse_port
from penstock_common.config.sections import TlsConfig
from penstock_common.config.settings import ByteSize


class ResponsesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits on the responses that a frontend stores for ``/v1/responses``.

    The frontend keeps these responses in memory, so that later calls can continue them.
    """

    max_stored: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Maximum number of stored responses. At the limit, the oldest response of the tenant with the most "
                "stored bytes is dropped. A call can ask that its response is not stored. 0: no responses are stored."
            ),
        ),
    ] = 1024
    max_stored_bytes: Annotated[
        ByteSize,
        Meta(
            ge=1,
            description=(
                "Maximum bytes of all stored responses and their conversations. A larger response is not stored."
            ),
        ),
    ] = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        check_fields("http.responses", self)


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the HTTP listener, which serves OpenAI's and Anthropic's APIs, ``/health`` and ``/metrics``."""

    host: Annotated[str, Meta(min_length=1, description="Interface to listen on.")] = "0.0.0.0"
    port: Annotated[
        int, Meta(ge=-1, le=65_535, description=("Port to listen on. 0: a free port. -1: no HTTP listener."))
    ] = 8000
    reuse_port: Annotated[
        bool,
        Meta(
            description=(
                "Share the port with other frontends that also set this; the operating system distributes the "
                "connections. false: a port in use is an error."
            )
        ),
    ] = False
    page: Annotated[
        bool,
        Meta(
            description=(
                "Serve a web page at /, and the engine state that it shows at /cluster. The state includes the "
                "engines' addresses."
            )
        ),
    ] = True
    max_body_bytes: Annotated[ByteSize, Meta(ge=1, description="Maximum bytes of the body of one call.")] = (
        32 * 1024 * 1024
    )
    max_body_bytes_in_flight: Annotated[
        ByteSize,
        Meta(
            ge=1,
            description=(
                "Maximum total bytes of the bodies of all calls that are not admitted yet. Must be at least "
                "http.max_body_bytes."
            ),
        ),
    ] = 256 * 1024 * 1024
    max_body_values: Annotated[int, Meta(ge=1, description="Maximum number of JSON values in one body.")] = 1024 * 1024
    max_body_objects: Annotated[int, Meta(ge=1, description="Maximum number of JSON objects in one body.")] = 64 * 1024
    max_header_bytes: Annotated[
        ByteSize,
        Meta(
            ge=1024,
            description=(
                "Maximum bytes of a request's headers. For chunked bodies, headers, chunk lines and trailers "
                "together may have this many bytes plus the size of the body."
            ),
        ),
    ] = 64 * 1024
    max_headers: Annotated[int, Meta(ge=8, description="Maximum number of headers and trailers of a request.")] = 128
    header_timeout: Annotated[
        float,
        Meta(
            ge=0.05,
            le=3600,
            description="Seconds within which a request's headers must arrive, from their first byte.",
        ),
    ] = 10.0
    body_timeout: Annotated[
        float,
        Meta(
            ge=0.05,
            le=3600,
            description="Seconds within which a request's body must arrive, from the end of its headers.",
        ),
    ] = 60.0
    max_connection_age: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description=(
                "Seconds after which a connection is closed with its next answer (Connection: close). The time "
                "varies by up to 10 percent per connection. 0: connections have no age limit, and a stopping "
                "frontend closes idle connections without waiting."
            ),
        ),
    ] = 120.0
    max_requests: Annotated[
        int,
        Meta(ge=1, description="Maximum number of calls in progress, including those whose bodies are being read."),
    ] = 10_000
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "Additional origins of web pages, browser extensions and desktop apps that may call the server (CORS): "
                "https://example.org, chrome-extension://* (every origin of a scheme), null, or * for any. The "
                "server's own origin is always allowed. Calls with any other Origin header are refused with 403."
            )
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "Additional names that clients may use in the Host header: llm.example.org, *.example.org (every "
                "name below it), 10.0.0.0/8 (a network), or * for any. localhost, loopback addresses and http.host "
                "are always allowed. Other calls are refused with 421, except /health and /ping. Empty: any name, "
                "unless http.host is a loopback address."
            )
        ),
    ] = ()
    unknown_fields: Annotated[
        Literal["ignore", "refuse"],
        Meta(
            description=(
                "Handling of unknown fields in a request body. ignore: the frontend counts the field and logs it "
                "once per client. refuse: the call fails with 400, and the error has the field's path and the "
                "nearest known name."
            )
        ),
    ] = "ignore"
    engine_metrics: Annotated[
        bool,
        Meta(
            description=(
                "Include the engines' load, as this frontend knows it, in /metrics. Set this to false if Prometheus "
                "also scrapes the engines, so that no load is counted twice."
            )
        ),
    ] = True
    responses: ResponsesConfig = ResponsesConfig()
    tls: TlsConfig = TlsConfig()

    def __post_init__(self) -> None:
        check_fields("http", self)
        check_reuse_port("http.reuse_port", self.reuse_port)
        AllowedHosts(self.allowed_hosts, field="http.allowed_hosts")
        AllowedOrigins(self.allowed_origins)
        check_range("http.max_body_bytes_in_flight", self.max_body_bytes_in_flight, low=self.max_body_bytes)

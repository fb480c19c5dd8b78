"""The HTTP listener."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock_common.config.allowed_hosts import AllowedHosts, AllowedOrigins
from penstock_common.config.checks import check_fields, check_range, check_reuse_port
from penstock_common.config.sections import TlsConfig
from penstock_common.config.settings import ByteSize


class ResponsesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Responses of ``/v1/responses`` that a frontend keeps in its memory, for others that go on with them."""

    max_stored: Annotated[
        int,
        Meta(
            ge=0,
            description="Responses that are kept at once, unless a call says not to; where there are more, the oldest of the "
            "tenant that has the most goes. 0: none are kept.",
        ),
    ] = 1024
    max_stored_bytes: Annotated[
        ByteSize, Meta(ge=1, description="Bytes of them, with their conversations; a larger one is not kept.")
    ] = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        check_fields("http.responses", self)


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP listener with OpenAI's and Anthropic's APIs, ``/health`` and ``/metrics``."""

    host: Annotated[str, Meta(min_length=1, description="Interface to listen on.")] = "0.0.0.0"
    port: Annotated[int, Meta(ge=-1, le=65_535, description="Port to listen on; 0: one that is free; -1: no HTTP.")] = (
        8000
    )
    reuse_port: Annotated[
        bool,
        Meta(
            description="Other frontends that say so too may listen on the port beside this one, and the system shares the "
            "connections out; false: a port that is taken is refused."
        ),
    ] = False
    page: Annotated[
        bool,
        Meta(
            description="Serve a page for people at /, and the state of the engines that it shows, addresses included, at "
            "/cluster."
        ),
    ] = True
    max_body_bytes: Annotated[ByteSize, Meta(ge=1, description="Bytes of the body of one call.")] = 32 * 1024 * 1024
    max_body_bytes_in_flight: Annotated[
        ByteSize,
        Meta(
            ge=1,
            description="Bytes of all bodies at once whose calls are not admitted yet; http.max_body_bytes at least.",
        ),
    ] = 256 * 1024 * 1024
    max_body_values: Annotated[int, Meta(ge=1, description="JSON values of one body.")] = 1024 * 1024
    max_body_objects: Annotated[int, Meta(ge=1, description="JSON objects of one body.")] = 64 * 1024
    max_header_bytes: Annotated[
        ByteSize,
        Meta(
            ge=1024,
            description="Bytes of the headers of a request. The lines around the chunks of its body and its trailers may have as "
            "many, and as many as the body has itself.",
        ),
    ] = 64 * 1024
    max_headers: Annotated[int, Meta(ge=8, description="Headers and trailers of a request.")] = 128
    header_timeout: Annotated[
        float,
        Meta(ge=0.05, le=3600, description="Seconds that the headers of a request may take from their first byte."),
    ] = 10.0
    body_timeout: Annotated[
        float,
        Meta(ge=0.05, le=3600, description="Seconds that the body of a request may take from the end of its headers."),
    ] = 60.0
    max_connection_age: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="Seconds, up to a tenth more or less, after which a connection ends with its next answer "
            "(Connection: close). 0: connections may last, and a frontend that stops does not wait for idle ones.",
        ),
    ] = 120.0
    max_requests: Annotated[
        int, Meta(ge=1, description="Calls that are served at once, or whose bodies are being read.")
    ] = 10_000
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Origins of web pages, browser extensions and desktop apps that may call (CORS), beside the server's "
            "own: https://example.org, chrome-extension://* (every origin of a scheme), null, or * for any. Calls with "
            "another Origin are refused with 403."
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Names in the Host header under which clients may call, beside localhost, loopback addresses and "
            "http.host: llm.example.org, *.example.org (every name below it), 10.0.0.0/8 (a network), or * for any. Other calls "
            "but those of /health and /ping are refused with 421. Empty: any, except where http.host is a loopback address."
        ),
    ] = ()
    unknown_fields: Annotated[
        Literal["ignore", "refuse"],
        Meta(
            description="What happens to a field of a body that the server does not know: ignore (it is logged once per client "
            "and counted) or refuse (400 with the field's place and the nearest known name)."
        ),
    ] = "ignore"
    engine_metrics: Annotated[
        bool,
        Meta(
            description="/metrics also has what this frontend knows of its engines' load. Off where the engines' own /metrics "
            "are collected, so that nothing is counted twice."
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

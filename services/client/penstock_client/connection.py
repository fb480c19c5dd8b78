"""Connection to a Penstock server, with load balancing, health checks, retries, keepalive, TLS and authentication."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import grpc

SERVICE_CONFIG = resources.files("penstock").joinpath("service_config.json").read_text()
"""gRPC service config. Calls are sent to all addresses of the server's name in turn, except to a frontend that is
shutting down.

If a call fails with UNAVAILABLE before the first part of its answer, the channel retries the call on the next address.
"""
MIN_KEEPALIVE = 5.0
"""Minimum keepalive interval in seconds. If pings are more frequent, servers close the connection."""
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # gRPC's default of 4 MiB is too small for long log-probabilities

_URL = re.compile(r"(https?|grpcs?)://", re.IGNORECASE)

Options = list[tuple[str, str | int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """TLS settings of a connection.

    All fields except ``server_name`` are paths of PEM files. The files are read when a client is created.
    """

    ca: str | os.PathLike[str] = ""
    """File with the CA certificates to trust. Empty means the CA certificates that are part of gRPC."""
    certificate: str | os.PathLike[str] = ""
    """File with the client certificate, for servers that require a client certificate. Needs ``key``."""
    key: str | os.PathLike[str] = ""
    """File with the private key of the client certificate."""
    server_name: str = ""
    """Name that the server's certificate must have. Empty means the host of the address."""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            given, missing = ("certificate", "key") if self.certificate else ("key", "certificate")
            raise ValueError(
                f"tls.{given} is {os.fspath(getattr(self, given))!r}, but tls.{missing} is empty; set both"
            )

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a channel. Raises OSError if a file cannot be read."""
        ca, key, certificate = (
            Path(path).read_bytes() if path else None for path in (self.ca, self.key, self.certificate)
        )
        return grpc.ssl_channel_credentials(ca, key, certificate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """Settings of keepalive pings. If a server sends nothing for ``interval`` seconds, the client sends a ping.

    If the server does not answer the ping within ``timeout`` seconds, calls on the connection fail with Unavailable.
    """

    interval: float = 30.0
    timeout: float = 10.0

    def __post_init__(self) -> None:
        if not self.interval >= MIN_KEEPALIVE:
            raise ValueError(f"keepalive.interval is {self.interval:g}; it must be at least {MIN_KEEPALIVE:g} s")
        if not self.timeout > 0:
            raise ValueError(f"keepalive.timeout is {self.timeout:g}; it must be above 0 s")


class BaseClient(ABC):
    """Base class of ``Client`` and ``AsyncClient``, with the connection settings."""

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        key: str = "",
        tls: Tls | None = None,
        timeout: float | None = None,
        keepalive: Keepalive | None = None,
        options: Sequence[tuple[str, str | int]] = (),
        channel: grpc.Channel | grpc.aio.Channel | None = None,
    ) -> None:
        """Create the client. Raises ValueError for a wrong argument, and OSError if a file cannot be read.

        Args:
            address: host:port, or ``dns:///host:port`` to use all addresses of the host name in turn.
            key: API key or token. Empty means no credentials.
            tls: TLS settings. None means a connection without encryption.
            timeout: Default timeout of calls in seconds. None means no timeout.
            keepalive: Settings of keepalive pings.
            options: gRPC channel options. These options override the client's options.
            channel: Channel to use instead of a new channel. ``close`` of the client also closes this channel. ``tls``,
                ``keepalive`` and ``options`` are then ignored.
        """
        if not address:
            raise ValueError("address is empty; it must be host:port")
        if channel is None and (url := _URL.match(address)) is not None:
            remedy = " and pass tls=Tls()" if url[0].endswith("s://") else ""
            raise ValueError(
                f"address is {address!r}; it must be HOST:PORT of the server's gRPC port, without {url[0]}{remedy}, "
                "such as localhost:50051"
            )
        if not (key.isascii() and key.isprintable()):
            raise ValueError("key has characters that are not printable ASCII; gRPC metadata cannot contain them")
        self._address = address if channel is None else ""
        self._timeout = timeout
        self._deadline(timeout)
        self.metadata = (("authorization", f"Bearer {key}"),) if key else ()
        """gRPC metadata that the client sends with every call."""
        self._open(channel, address, tls, _channel_options(tls, keepalive or Keepalive(), options))

    def _deadline(self, timeout: float | None) -> float | None:
        """Return the timeout of a call in seconds. This is ``timeout``, or the client's default. None means no limit.

        Raises ValueError if the timeout is not above 0.
        """
        wanted = self._timeout if timeout is None else timeout
        if wanted is not None and not wanted > 0:
            raise ValueError(f"timeout is {wanted:g}; it must be above 0 s")
        return wanted

    @abstractmethod
    def _open(self, channel: Any, address: str, tls: Tls | None, options: Options) -> None:
        """Create the stub. If ``channel`` is None, create the channel too."""


def _channel_options(tls: Tls | None, keepalive: Keepalive, own: Sequence[tuple[str, str | int]]) -> Options:
    timeout = int(keepalive.timeout * 1000)
    options: Options = [
        ("grpc.service_config", SERVICE_CONFIG),
        ("grpc.keepalive_time_ms", int(keepalive.interval * 1000)),
        ("grpc.keepalive_timeout_ms", timeout),
        ("grpc.http2.ping_timeout_ms", timeout),  # the default is one minute, whatever keepalive_timeout_ms is
        ("grpc.http2.max_pings_without_data", 0),  # no limit, because a stream may be silent for any time
        ("grpc.dns_min_time_between_resolutions_ms", 5_000),  # find new addresses sooner than with the default of 30 s
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ]
    if tls is not None and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return [*options, *own]

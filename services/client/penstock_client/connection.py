"""Connection to a Penstock server: channel, load balancing, health checks, retries, keepalive, TLS, and authentication."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import grpc

SERVICE_CONFIG = resources.files("penstock").joinpath("service_config.json").read_text()
"""gRPC service config. Calls go to all addresses of the name in turn, but not to a frontend that is shutting down.

A call that fails with UNAVAILABLE before the first part of its answer is retried on the next address.
"""
MIN_KEEPALIVE = 5.0
"""Minimum keepalive interval in seconds. Servers close connections with more frequent pings."""
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # gRPC's default of 4 MiB is too small for long log-probabilities

Options = list[tuple[str, str | int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """TLS settings of a connection.

    All fields except ``server_name`` are paths of PEM files, read when a client is created.
    """

    ca: str | os.PathLike[str] = ""
    """CA certificates to trust. Empty: those that come with gRPC."""
    certificate: str | os.PathLike[str] = ""
    """Client certificate, for servers that require one. Needs ``key``."""
    key: str | os.PathLike[str] = ""
    """Private key of the client certificate."""
    server_name: str = ""
    """Expected name in the server's certificate. Empty: the host of the address."""

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
    """Keepalive pings: a silent server is pinged after ``interval`` seconds and has ``timeout`` seconds to answer.

    If there is no answer in time, calls on the connection fail with Unavailable.
    """

    interval: float = 30.0
    timeout: float = 10.0

    def __post_init__(self) -> None:
        if not self.interval >= MIN_KEEPALIVE:
            raise ValueError(f"keepalive.interval is {self.interval:g}; it must be at least {MIN_KEEPALIVE:g} s")
        if not self.timeout > 0:
            raise ValueError(f"keepalive.timeout is {self.timeout:g}; it must be above 0 s")


class BaseClient(ABC):
    """Base class of both clients, which holds the connection settings."""

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
        """Create the client. Raises ValueError for a wrong argument, and OSError for unreadable files.

        Args:
            address: host:port, or ``dns:///host:port`` to use all addresses of the name in turn.
            key: API key or token.
            tls: TLS settings; None for a connection without encryption.
            timeout: Default timeout of calls, in seconds.
            keepalive: Keepalive settings.
            options: gRPC channel options, which override the client's.
            channel: Channel to use and close. ``tls``, ``keepalive`` and ``options`` are then ignored.
        """
        if not address:
            raise ValueError("address is empty; it must be host:port")
        if not (key.isascii() and key.isprintable()):
            raise ValueError("key has characters that are not printable ASCII; gRPC metadata cannot contain them")
        self._timeout = timeout
        self._deadline(timeout)
        self.metadata = (("authorization", f"Bearer {key}"),) if key else ()
        """gRPC metadata sent with every call."""
        self._open(channel, address, tls, _channel_options(tls, keepalive or Keepalive(), options))

    def _deadline(self, timeout: float | None) -> float | None:
        """Return the timeout of a call in seconds: ``timeout``, or the client's default; None for no limit.

        Raises ValueError.
        """
        wanted = self._timeout if timeout is None else timeout
        if wanted is not None and not wanted > 0:
            raise ValueError(f"timeout is {wanted:g}; it must be above 0 s")
        return wanted

    @abstractmethod
    def _open(self, channel: Any, address: str, tls: Tls | None, options: Options) -> None:
        """Create the stub, and the channel unless one is given."""


def _channel_options(tls: Tls | None, keepalive: Keepalive, own: Sequence[tuple[str, str | int]]) -> Options:
    timeout = int(keepalive.timeout * 1000)
    options: Options = [
        ("grpc.service_config", SERVICE_CONFIG),
        ("grpc.keepalive_time_ms", int(keepalive.interval * 1000)),
        ("grpc.keepalive_timeout_ms", timeout),
        ("grpc.http2.ping_timeout_ms", timeout),  # one minute by default, regardless of keepalive_timeout_ms
        ("grpc.http2.max_pings_without_data", 0),  # a stream may be silent for any time
        ("grpc.dns_min_time_between_resolutions_ms", 5_000),  # finds new addresses sooner than the default of 30 s
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ]
    if tls is not None and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return [*options, *own]

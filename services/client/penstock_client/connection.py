"""Connection to a Penstock server: channel, load balancing, health, retries, keepalive, TLS, and a key in the metadata."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import grpc

SERVICE_CONFIG = resources.files("penstock").joinpath("service_config.json").read_text()
"""Calls go in turn to all addresses that the name has, but not to a frontend that leaves. One that failed as UNAVAILABLE before
anything of its answer came is tried again, on the next address."""
MIN_KEEPALIVE = 5.0
"""Seconds; servers end connections that are pinged more often."""
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # gRPC's 4 MiB are too few for long log-probabilities

Options = list[tuple[str, str | int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """An encrypted connection. All are paths of PEM files but ``server_name``; they are read when a client is made."""

    ca: str | os.PathLike[str] = ""
    """The certificates to trust. Empty: those that gRPC brings along."""
    certificate: str | os.PathLike[str] = ""
    """The client's own, for servers that ask for one; with ``key``."""
    key: str | os.PathLike[str] = ""
    """Its private key."""
    server_name: str = ""
    """What the server's certificate must be for. Empty: the host of the address."""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            given, missing = ("certificate", "key") if self.certificate else ("key", "certificate")
            raise ValueError(
                f"tls.{given} is {os.fspath(getattr(self, given))!r} and tls.{missing} is empty; give both"
            )

    def credentials(self) -> grpc.ChannelCredentials:
        """Of a channel. Raises OSError for a file that cannot be read."""
        ca, key, certificate = (
            Path(path).read_bytes() if path else None for path in (self.ca, self.key, self.certificate)
        )
        return grpc.ssl_channel_credentials(ca, key, certificate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """When a silent server is pinged, and how long it has to answer, in seconds. Else the calls on it fail as Unavailable."""

    interval: float = 30.0
    timeout: float = 10.0

    def __post_init__(self) -> None:
        if not self.interval >= MIN_KEEPALIVE:
            raise ValueError(f"keepalive.interval is {self.interval:g}; it must be at least {MIN_KEEPALIVE:g} s")
        if not self.timeout > 0:
            raise ValueError(f"keepalive.timeout is {self.timeout:g}; it must be above 0 s")


class BaseClient(ABC):
    """The connection of a client, before it is known whether threads or an event loop use it."""

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
        """Raises ValueError, naming what is wrong, and OSError for files that cannot be read.

        Args:
            address: host:port, or ``dns:///host:port`` for all addresses of the name in turn.
            key: An API key or a token.
            tls: None for a connection that is not encrypted.
            timeout: Deadline of calls that name none, in seconds.
            keepalive: When a silent server is pinged.
            options: gRPC's own, which win.
            channel: One of yours, which the client closes; ``tls``, ``keepalive`` and ``options`` are then not used.
        """
        if not address:
            raise ValueError("address is empty; it must be host:port")
        if not (key.isascii() and key.isprintable()):
            raise ValueError("key has characters that are no printable ASCII; metadata cannot carry it")
        self._timeout = timeout
        self._deadline(timeout)
        self.metadata = (("authorization", f"Bearer {key}"),) if key else ()
        """The gRPC metadata that is sent with every call."""
        self._open(channel, address, tls, _channel_options(tls, keepalive or Keepalive(), options))

    def _deadline(self, timeout: float | None) -> float | None:
        """Seconds that a call may take: ``timeout``, or the client's; None for as long as it takes. Raises ValueError."""
        wanted = self._timeout if timeout is None else timeout
        if wanted is not None and not wanted > 0:
            raise ValueError(f"timeout is {wanted:g}; it must be above 0 s")
        return wanted

    @abstractmethod
    def _open(self, channel: Any, address: str, tls: Tls | None, options: Options) -> None:
        """Make the stub, and the channel unless there is one."""


def _channel_options(tls: Tls | None, keepalive: Keepalive, own: Sequence[tuple[str, str | int]]) -> Options:
    timeout = int(keepalive.timeout * 1000)
    options: Options = [
        ("grpc.service_config", SERVICE_CONFIG),
        ("grpc.keepalive_time_ms", int(keepalive.interval * 1000)),
        ("grpc.keepalive_timeout_ms", timeout),
        ("grpc.http2.ping_timeout_ms", timeout),  # a minute unless it is set, whatever the one above says
        ("grpc.http2.max_pings_without_data", 0),  # a stream may be silent however long
        ("grpc.dns_min_time_between_resolutions_ms", 5_000),  # new addresses are found sooner than after 30 s
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ]
    if tls is not None and tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return [*options, *own]

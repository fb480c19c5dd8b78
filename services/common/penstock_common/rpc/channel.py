"""gRPC channels for all clients inside Penstock, and keepalive settings for channels and servers."""

from collections.abc import Sequence
from typing import NamedTuple

import grpc

from penstock_common.rpc.credentials import NO_TLS, ClientCredentials


class Keepalive(NamedTuple):
    """Keepalive times in seconds: time without data until a peer is pinged, and time in which the peer must answer."""

    interval: float
    timeout: float

    def options(self) -> list[tuple[str, int]]:
        """Return gRPC's arguments for a server or a channel."""
        timeout = int(self.timeout * 1000)
        return [
            ("grpc.keepalive_time_ms", int(self.interval * 1000)),
            ("grpc.keepalive_timeout_ms", timeout),
            (
                "grpc.http2.ping_timeout_ms",
                timeout,
            ),  # without this option, gRPC waits one minute, regardless of the timeout above
            ("grpc.keepalive_permit_without_calls", 1),
        ]


_KEEPALIVE = Keepalive(10.0, 10.0)


def make_channel(
    address: str,
    *,
    credentials: ClientCredentials = NO_TLS,
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    max_message_bytes: int = 64 * 1024 * 1024,
) -> grpc.aio.Channel:
    """Return a channel to ``host:port`` that detects a dead peer within 20 s and reconnects within 1 s."""
    return credentials.channel(
        address,
        [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            *_KEEPALIVE.options(),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            # Despite its name, this option is the timeout of one connection attempt.
            ("grpc.min_reconnect_backoff_ms", 5_000),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ],
        interceptors,
    )

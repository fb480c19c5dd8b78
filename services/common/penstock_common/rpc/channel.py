"""The gRPC channel every client inside Penstock is built on, and the keepalive of channels and servers."""

from collections.abc import Sequence
from typing import NamedTuple

import grpc

from penstock_common.rpc.credentials import NO_TLS, ClientCredentials

# How gRPC notices that the other side of a connection has gone or hangs.


class Keepalive(NamedTuple):
    """When a silent peer is pinged, and how long it has to answer, in seconds."""

    interval: float
    timeout: float

    def options(self) -> list[tuple[str, int]]:
        """GRPC's arguments for a server or a channel."""
        timeout = int(self.timeout * 1000)
        return [
            ("grpc.keepalive_time_ms", int(self.interval * 1000)),
            ("grpc.keepalive_timeout_ms", timeout),
            ("grpc.http2.ping_timeout_ms", timeout),  # a minute unless it is set, whatever the one above says
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
    """A channel to ``host:port`` that notices a dead peer within 20 s and reconnects within a second."""
    return credentials.channel(
        address,
        [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            *_KEEPALIVE.options(),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 5_000),  # in gRPC this is how long one attempt to connect may take
            ("grpc.max_reconnect_backoff_ms", 1_000),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ],
        interceptors,
    )

"""The gRPC channel every client inside Penstock is built on."""

from collections.abc import Sequence

import grpc

from penstock_common.rpc.credentials import NO_TLS, ClientCredentials
from penstock_common.rpc.keepalive import Keepalive

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

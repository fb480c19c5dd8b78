"""How gRPC notices that the other side of a connection has gone or hangs."""

from typing import NamedTuple


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

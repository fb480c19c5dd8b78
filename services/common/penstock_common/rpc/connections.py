"""The connections of a gRPC server, which gRPC itself counts (channelz)."""

import json
from collections.abc import Iterator
from typing import Any

from grpc._cython import cygrpc  # type: ignore[attr-defined]  # where grpcio-channelz has them from

OPTIONS = [("grpc.enable_channelz", 1)]
"""Of servers whose connections are looked at."""


class Connections:
    """Those of the server that this process has made last. To be made directly after it."""

    def __init__(self) -> None:
        self._server_id = max(_servers())

    def open(self) -> frozenset[int]:
        """A number for each open connection, which no other one ever has. Empty where the server is gone."""
        try:
            return frozenset(_sockets(self._server_id))
        except ValueError:  # what gRPC raises for a server that it does not know
            return frozenset()


def _servers() -> Iterator[int]:
    last = -1
    while True:
        page: dict[str, Any] = json.loads(cygrpc.channelz_get_servers(last + 1))
        for server in page.get("server", ()):
            last = int(server["ref"]["serverId"])
            yield last
        if page.get("end") or not page.get("server"):
            return


def _sockets(server_id: int) -> Iterator[int]:
    last = -1
    while True:
        page: dict[str, Any] = json.loads(cygrpc.channelz_get_server_sockets(server_id, last + 1, 0))
        for socket in page.get("socketRef", ()):
            last = int(socket["socketId"])
            yield last
        if page.get("end") or not page.get("socketRef"):
            return

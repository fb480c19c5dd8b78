"""The connections of a gRPC server, which gRPC itself counts (channelz)."""

import json
from collections.abc import Callable, Iterator
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
    return _listed(cygrpc.channelz_get_servers, "server", lambda entry: entry["ref"]["serverId"])


def _sockets(server_id: int) -> Iterator[int]:
    return _listed(
        lambda start: cygrpc.channelz_get_server_sockets(server_id, start, 0),
        "socketRef",
        lambda entry: entry["socketId"],
    )


def _listed(ask: Callable[[int], str], field: str, number: Callable[[Any], str]) -> Iterator[int]:
    """The numbers of what gRPC lists, from all pages. ``ask``: gives the page that begins at a number."""
    last = -1
    while True:
        page: dict[str, Any] = json.loads(ask(last + 1))
        for entry in page.get(field, ()):
            last = int(number(entry))
            yield last
        if page.get("end") or not page.get(field):
            return
